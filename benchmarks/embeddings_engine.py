"""`Engine.embed` as a worker of embeddings.py, which runs it."""

from __future__ import annotations

import argparse

import numpy as np
from decode_protocol import FirstTokens, Run, Times, answer_batches

from sglang_jax import Engine
from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.config import EngineConfig


def load(config: EngineConfig, vectors: str) -> Run:
    """An engine that lives as long as the process, and writes the vectors of each batch to the file `vectors`."""
    engine = Engine(config=config)

    def run(texts: list[str], _: int) -> Times:
        clock = FirstTokens(0)
        found = engine.embed(texts)
        times = clock.end()
        compiles = engine.stats.compiles_after_warm_up
        assert compiles == 0, f"{compiles} programs were compiled after warm-up"
        np.save(vectors, found)
        return times

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("backend")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--vectors", required=True)
    parser.add_argument("--chunk", type=int, help="maximum prompt tokens per step; default: the engine's")
    arguments = parser.parse_args()
    config = EngineConfig(
        model_path=arguments.folder,
        backend=arguments.backend,
        device="cpu",
        dtype=arguments.dtype,
        context_length=min(1024, open_checkpoint(arguments.folder).config.max_position),
        max_total_tokens=16384,
        chunked_prefill_size=arguments.chunk,
        debug_memory=False,
    )
    answer_batches(lambda: load(config, arguments.vectors))


if __name__ == "__main__":
    main()
