"""A hybrid model with prompts that share prefixes: throughput with and without the prefix cache, and the cached tokens.

    python benchmarks/hybrid_shared_prefix.py [--backend jax|torch] [--page-size N] [--json FILE]

8 groups of 16 prompts with 1,000 shared tokens and 40 different ones each, 16 output tokens, all submitted at once
with the groups interleaved; a model of Qwen3.5's structure (gated delta nets, every fourth layer attention) with
random weights. The last row has prompts without shared prefixes: there the cache should cost less than 2 %. Each
figure is the better of two runs. Every prompt except the first of its group could hit the whole pages of the 1,000
tokens.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import report
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sglang_jax import Engine, SamplingParams
from sglang_jax.config import Backend, EngineConfig, LoadFormat

GROUPS, SHARERS, COMMON, TAIL, OUTPUT = 8, 16, 1000, 40, 16
VOCABULARY = 4096
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 2048,
    "dtype": "float32",
}


def write_model(folder: Path, **fields: Any) -> None:
    """Writes the config, with other values for `fields`, and a tokenizer of bytes; the weights are random."""
    (folder / "config.json").write_text(json.dumps({**MODEL, **fields}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(f"{folder}/tokenizer.json")


def prompts(shared: bool) -> list[list[int]]:
    """Prompt k is in group `k % GROUPS`; without sharing, no two prompts share a prefix."""
    random = np.random.default_rng(7)
    common = random.integers(3, VOCABULARY, (GROUPS, COMMON)).tolist()
    tails = random.integers(3, VOCABULARY, (GROUPS * SHARERS, TAIL)).tolist()
    heads = random.integers(3, VOCABULARY, (GROUPS * SHARERS, COMMON)).tolist()
    return [[*(common[k % GROUPS] if shared else heads[k]), *tail] for k, tail in enumerate(tails)]


def measure(folder: Path, backend: Backend, page_size: int, *, shared: bool, cache: bool) -> dict[str, Any]:
    """One row of the table."""
    config = EngineConfig(
        model_path=str(folder),
        backend=backend,
        device="cpu",
        load_format=LoadFormat.DUMMY,
        page_size=page_size,
        disable_radix_cache=not cache,
        max_running_requests=32,
        max_mamba_cache_size=96,
        max_total_tokens=160_000,
    )
    sampling = SamplingParams(max_new_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    best, cached = float("inf"), 0.0
    with Engine(config=config) as engine:
        engine.generate(prompts(shared)[:1], sampling)
        for _ in range(2):
            engine.flush_cache()
            start = time.perf_counter()
            outputs = engine.generate(prompts(shared), sampling)
            best = min(best, time.perf_counter() - start)
            later = [output.cached_tokens for output in outputs[GROUPS:]]
            cached = sum(later) / len(later) / (COMMON // page_size * page_size)
    tokens = GROUPS * SHARERS * (COMMON + TAIL + OUTPUT)
    return {
        "backend": backend.value,
        "page size": page_size,
        "prompts begin": "alike" if shared else "differently",
        "cache": "on" if cache else "off",
        "tokens/s": tokens / best,
        "cached of what could be": cached if shared else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", type=Backend, default=Backend.TORCH)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        rows = [
            measure(Path(folder), arguments.backend, arguments.page_size, shared=shared, cache=cache)
            for shared in (True, False)
            for cache in (True, False)
        ]
    report("A hybrid model with the prefix cache and without", rows, arguments.json)


if __name__ == "__main__":
    main()
