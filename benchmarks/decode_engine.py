"""This project's engine as a worker of decode_cpu.py, which runs it; other benchmarks import `measure_engine`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
from decode_protocol import FirstTokens, Run, Times, answer_batches

from sglang_jax import Engine, SamplingParams
from sglang_jax.config import EngineConfig

PROMPT = 64
OUTPUT = 64


def prompts(batch: int, length: int, run: int) -> list[list[int]]:
    """Prompts that share no prefix with those of any other run."""
    random = np.random.default_rng((batch, length, run))
    return random.integers(100, 40_000, (batch, length)).tolist()


@dataclass(frozen=True, slots=True)
class Rates:
    """Output tokens per second of one batch: over its whole time, and over the time after its first tokens."""

    whole: float
    decode: float


def rates(times: Times, batch: int, output: int) -> Rates:
    """The rates of `batch` requests of `output` tokens each, at least 2."""
    return Rates(batch * output / times.whole, batch * (output - 1) / (times.whole - times.first))


def run_batch(engine: Engine, prompts: list[list[int]], output: int) -> Times:
    """Runs one batch on the engine."""
    params = SamplingParams(temperature=0.0, max_new_tokens=output, ignore_eos=True)
    clock, tokens = FirstTokens(len(prompts)), 0
    for delta in engine.generate(prompts, params, stream=True):
        tokens += len(delta.delta_ids)
        clock.saw(delta.index)
    times = clock.end()
    assert tokens == len(prompts) * output
    return times


def measure_engine(engine: Engine, batch: int, run: int) -> Rates:
    """Runs one batch of `PROMPT` tokens in and `OUTPUT` out."""
    return rates(run_batch(engine, prompts(batch, PROMPT, run), OUTPUT), batch, OUTPUT)


def load(config: EngineConfig) -> Run:
    """An engine that lives as long as the process."""
    engine = Engine(config=config)

    def run(prompts: list[list[int]], output: int) -> Times:
        times = run_batch(engine, prompts, output)
        compiles = engine.stats.compiles_after_warm_up
        assert compiles == 0, f"{compiles} programs were compiled after warm-up"
        return times

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("backend")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--blocks", action="store_true", help="--keep-gguf-blocks --cpu-activations int8")
    arguments = parser.parse_args()
    config = EngineConfig(
        model_path=arguments.model,
        backend=arguments.backend,
        device="cpu",
        dtype=arguments.dtype,
        context_length=arguments.context,
        keep_gguf_blocks=arguments.blocks,
        cpu_activations="int8" if arguments.blocks else "exact",
        debug_memory=False,
    )
    answer_batches(lambda: load(config))


if __name__ == "__main__":
    main()
