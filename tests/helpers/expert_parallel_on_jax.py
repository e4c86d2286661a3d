"""Checks expert parallelism over eight devices of JAX against transformers and one device: `python -m
helpers.expert_parallel_on_jax SCRATCH QUANTIZATION ARCHITECTURE CHANGES`, with the changes of the tiny config in JSON
and "none" for plain weights."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from helpers.paged_model import PagedModel
from helpers.parity_cases import STEPS, TOLERANCE, prompts, transformers_logits
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax import Engine, SamplingParams
from sglang_jax.checkpoint.quantization import INT8_ROWS, Quantization
from sglang_jax.config import EngineConfig
from sglang_jax.layers.sharding import make_mesh

DEVICES = 8
EXPERTS = 16
"""Of every checkpoint; no other axis is so long."""

PARTS = (2, 4, 8)
PROMPTS = [[5, 6, 7, 9], [100, 3, 77, 200, 13, 14, 15, 16, 18, 40, 41, 42, 43, 44, 45, 46, 47, 48], [301]]
PARAMS = (
    SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, top_k=50, top_p=0.9, seed=4, max_new_tokens=12, ignore_eos=True),
)


def check_logits(folder: Path, quantization: Quantization | None, expected: list[np.ndarray]) -> None:
    """Each device holds an eighth of the experts' weights, of whole experts where there are eight parts. Sums over
    devices: of embeddings, and two of each layer."""
    for parts in PARTS:
        model = PagedModel(folder, mesh=make_mesh(jax.devices(), expert=parts), quantization=quantization)
        experts = [leaf for leaf in jax.tree.leaves(model.state) if leaf.ndim == 3 and leaf.shape[0] == EXPERTS]
        assert len(experts) >= 6, len(experts)
        for leaf in experts:
            own = leaf.addressable_shards[1].data
            assert (own.shape[0], own.size) == (EXPERTS // parts, leaf.size // DEVICES), (parts, leaf.shape, own.shape)
        for logits, wanted in zip(model.run(prompts(), STEPS), expected, strict=True):
            assert np.abs(logits - wanted).max() < TOLERANCE, parts
        batch = model.batch([np.arange(9)] * 4, [0] * 4, dict.fromkeys(range(4), 1))
        with jax.sharding.use_abstract_mesh(model._mesh):
            program = model._step.lower(model.state, model.kv_caches, batch).compile().as_text()
        collectives = re.findall(r" (all-[a-z]+|collective-permute|reduce-scatter)[(]", program)
        assert collectives == ["all-reduce"] * (1 + 2 * len(model.kv_caches)), (parts, collectives)


def tokens(folder: Path, cache: Path, tp_size: int, ep_size: int, **options: Any) -> list[list[int]]:
    config = EngineConfig(
        model_path=str(folder),
        backend="jax",
        device="cpu",
        dtype="float32",
        tp_size=tp_size,
        ep_size=ep_size,
        skip_warmup=True,
        max_total_tokens=512,
        max_running_requests=4,
        chunked_prefill_size=16,
        page_size=4,
        compilation_cache_dir=str(cache),
        **options,
    )
    with Engine(config=config) as engine:
        return [output.output_ids for params in PARAMS for output in engine.generate(PROMPTS, params)]


def main(scratch: str, quantization: str, architecture: str, changes: str) -> None:
    assert len(jax.devices()) == DEVICES
    folder, changed = Path(scratch, "model"), json.loads(changes)
    make_tiny_checkpoint(folder, architecture, **changed)
    if quantization == "none":
        quantized, options = None, {}
        expected = [transformers_logits(architecture, each, **changed) for each in prompts()]
    else:
        quantized, options = Quantization(INT8_ROWS), {"quantization": quantization}
        expected = PagedModel(folder, quantization=quantized).run(prompts(), STEPS)
    check_logits(folder, quantized, expected)
    alone = tokens(folder, Path(scratch, "cache"), 1, 1, **options)
    for parts in PARTS:
        assert tokens(folder, Path(scratch, "cache"), DEVICES, parts, **options) == alone, parts


if __name__ == "__main__":
    main(*sys.argv[1:])
