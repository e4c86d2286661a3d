"""Output tokens per second of random models with experts on a CPU, next to transformers' `generate`, in alternation.

    python benchmarks/experts_cpu.py [--backend torch jax] [--dtype float32] [--batch 1 8 32] [--turns 5] [--json FILE]

Qwen3-MoE of 100 million parameters (8 layers of 32 experts, 4 of them for each token) and a tiny one. Prompts of 32
tokens, 32 output tokens, greedy, prefill included. transformers runs in this process, with as many threads as there
are cores. "ratio" is the median over the turns, each of which measures both.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import report
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from sglang_jax import Engine, SamplingParams
from sglang_jax.config import EngineConfig

PROMPT = OUTPUT = 32
VOCABULARY = 49152
"""The embedded model, whose tokenizer is used."""
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "100M": {
        "hidden_size": 512,
        "moe_intermediate_size": 224,
        "num_hidden_layers": 8,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}


def prompts(batch: int, turn: int) -> list[list[int]]:
    """Prompts that share no prefix with those of another turn."""
    return np.random.default_rng((batch, turn)).integers(10, VOCABULARY, (batch, PROMPT)).tolist()


def rate_of_engine(engine: Engine, batch: int, turn: int) -> float:
    """Output tokens per second."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=OUTPUT, ignore_eos=True)
    start = time.perf_counter()
    outputs = engine.generate(prompts(batch, turn), sampling)
    seconds = time.perf_counter() - start
    assert all(output.completion_tokens == OUTPUT for output in outputs)
    return batch * OUTPUT / seconds


def rate_of_transformers(model: Qwen3MoeForCausalLM, batch: int, turn: int) -> float:
    """Output tokens per second."""
    ids = torch.tensor(prompts(batch, turn))
    start = time.perf_counter()
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUT, min_new_tokens=OUTPUT, do_sample=False
    )
    seconds = time.perf_counter() - start
    assert found.shape[1] == PROMPT + OUTPUT
    return batch * OUTPUT / seconds


def rows_of(name: str, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of one shape for each backend and batch."""
    config = Qwen3MoeConfig(vocab_size=VOCABULARY, norm_topk_prob=True, tie_word_embeddings=True, **SHAPES[name])
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).to(getattr(torch, options.dtype)).eval()
    model.save_pretrained(folder)
    rows = []
    for backend in options.backend:
        engine_options = EngineConfig(
            model_path=str(folder),
            backend=backend,
            device="cpu",
            dtype=options.dtype,
            tokenizer_path="demo",
            context_length=128,
            max_running_requests=32,
            max_total_tokens=8192,
        )
        with Engine(engine_options) as engine:
            for batch in options.batch:
                pairs = [
                    (rate_of_engine(engine, batch, turn), rate_of_transformers(model, batch, turn))
                    for turn in range(options.turns + 1)
                ][1:]
                ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
                ratio = statistics.median(own / other for own, other in pairs)
                rows.append(
                    {
                        "model": name,
                        "backend": backend,
                        "batch": batch,
                        "tok/s": round(ours, 1),
                        "transformers tok/s": round(theirs, 1),
                        "ratio": round(ratio, 2),
                    }
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=["torch", "jax"], choices=["torch", "jax"])
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    rows = []
    for name in options.shape:
        with tempfile.TemporaryDirectory() as folder:
            rows += rows_of(name, Path(folder), options)
    report(f"Models with experts, {options.dtype}", rows, options.json)


if __name__ == "__main__":
    main()
