"""Attention over latent vectors on a CPU by the kernel that reads pages in place, and by operations of torch or XLA,
in alternation.

    python benchmarks/latent_decode_cpu.py [--backend torch jax] [--dtype float32 bfloat16] [--rows 1 16]
        [--queries 1 64] [--context 2048] [--repeat 7] [--json FILE]

Heads of DeepSeek-V2-Lite (16 over 512 + 64 numbers), MiniCPM3 (40 over 256 + 32), and DeepSeek-V3 (128 over 512 + 64),
in the absorbed form: on torch from queries of heads to outputs of heads, on JAX from absorbed queries to sums of
vectors. Milliseconds of processor time on one thread, the least of the turns; "ratio" is operations over the kernel,
the median over the turns.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax
import jax.numpy as jnp
import numpy as np
import torch
from machine import report

from sglang_jax.config import EngineConfig
from sglang_jax.jax_runner.attention_kernels import cpu_attention
from sglang_jax.kernels import ragged_paged_attention as on_pages
from sglang_jax.kernels.kv_storage import to_storage
from sglang_jax.kernels.ragged_paged_attention.cpu import LatentForm as VectorForm
from sglang_jax.layers.batch import ForwardBatch as JaxBatch
from torch_backend.attention.cpu_latents import CpuLatents
from torch_backend.attention.interface import AttentionImplementation, AttentionOptions, LatentForm, LatentHeads
from torch_backend.attention.native import NativeAttention
from torch_backend.batch import ForwardBatch
from torch_backend.cpu_kernels.compiling import caching_compiler
from torch_backend.kv_pages import KVPages

PAGE_SIZE = 64
FORMS = {
    "DeepSeek-V2-Lite": (LatentForm(16, 512, 64), 128),
    "MiniCPM3": (LatentForm(40, 256, 32), 64),
    "DeepSeek-V3": (LatentForm(128, 512, 64), 128),
}
"""Sizes, and numbers of a head's keys and values."""


def on_jax(
    form: LatentForm, of_head: int, dtype: str, rows: int, queries: int, context: int
) -> dict[str, Callable[[], object]]:
    """The operations, and the kernel, on the same step."""
    make, pages, tokens = np.random.default_rng(0), -(-context // PAGE_SIZE), rows * queries
    sizes = VectorForm(form.heads, form.latent, form.rotary)
    kernel = cpu_attention(sizes, kv_dtype=jnp.dtype(dtype), cache_folder=EngineConfig().cache_folder())
    assert kernel is not None
    shape = (1 + rows * pages, 1, 1, PAGE_SIZE, form.width)
    numbers = jnp.asarray(make.standard_normal(shape), jnp.float32)
    stored = to_storage(numbers, jnp.dtype(jnp.uint16 if dtype == "bfloat16" else dtype))
    nothing = jnp.zeros(tokens, jnp.int32)
    batch = JaxBatch(
        tokens=nothing,
        positions=nothing,
        write_slots=nothing,
        page_table=jnp.asarray(1 + make.permutation(rows * pages).reshape(rows, pages), jnp.int32),
        kv_lens=jnp.full(rows, context, jnp.int32),
        query_starts=jnp.arange(0, tokens + 1, queries, dtype=jnp.int32),
        num_decode=jnp.int32(rows if queries == 1 else 0),
    )
    asked = jnp.asarray(make.standard_normal((tokens, form.heads, form.width)), dtype)
    options = on_pages.AttentionOptions(value_dim=form.latent)
    by_xla = partial(on_pages.ragged_paged_attention, on_pages.AttentionImplementation.XLA)

    def program(attend: Callable[..., jax.Array]) -> Callable[[], object]:
        compiled = jax.jit(partial(attend, scale=form.width**-0.5, options=options))
        return lambda: compiled(asked, stored, batch).block_until_ready()

    return {"operations": program(by_xla), "kernel": program(kernel)}


def on_torch(
    form: LatentForm, of_head: int, name: str, rows: int, queries: int, context: int
) -> dict[str, Callable[[], object]]:
    """The operations, and the kernel, on the same step."""
    dtype: torch.dtype = getattr(torch, name)
    make, pages = torch.Generator().manual_seed(0), -(-context // PAGE_SIZE)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make).to(dtype)

    stored = numbers(1 + rows * pages, 1, PAGE_SIZE, form.width)
    nothing = torch.zeros(rows * queries, dtype=torch.int32)
    batch = ForwardBatch(
        tokens=nothing,
        positions=nothing,
        write_slots=nothing.long(),
        page_table=1 + torch.randperm(rows * pages, generator=make).int().view(rows, pages),
        kv_lens=torch.full((rows,), context, dtype=torch.int32),
        query_starts=torch.arange(0, rows * queries + 1, queries, dtype=torch.int32),
        num_decode=rows if queries == 1 else 0,
    )
    asked = numbers(rows * queries, form.heads, of_head + form.rotary)
    up = [numbers(form.heads, of_head, form.latent) * form.latent**-0.5 for _ in range(2)]
    options = AttentionOptions((of_head + form.rotary) ** -0.5, latents=LatentHeads(up[0], up[1], None))
    kernel = CpuLatents(caching_compiler(EngineConfig().cache_folder()), dtype, [form])

    def attend(attention: AttentionImplementation) -> torch.Tensor:
        with torch.inference_mode():
            return attention.prepare(batch)(asked, KVPages(stored, stored), options)

    return {"operations": lambda: attend(NativeAttention()), "kernel": lambda: attend(kernel)}


def measure(backend: str, model: str, dtype: str, rows: int, queries: int, context: int, repeat: int) -> dict[str, Any]:
    found = (on_torch if backend == "torch" else on_jax)(*FORMS[model], dtype, rows, queries, context)
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(repeat + 1):
        for name, run in found.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    old, new = (each[1:] for each in seconds.values())
    return {
        "backend": backend,
        "model": model,
        "dtype": dtype,
        "rows": rows,
        "queries": queries,
        "context": context,
        "operations": round(min(old) * 1e3, 2),
        "kernel": round(min(new) * 1e3, 2),
        "ratio": round(median(one / other for one, other in zip(old, new, strict=True)), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=["torch", "jax"], choices=["torch", "jax"])
    parser.add_argument("--models", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = [
        measure(backend, model, dtype, rows, queries, args.context, args.repeat)
        for backend in args.backend
        for model in args.models
        for dtype in args.dtype
        for queries in args.queries
        for rows in (args.rows if queries == 1 else args.rows[:1])
    ]
    report("Attention over latent vectors on one thread: operations and the kernel", found, args.json)


if __name__ == "__main__":
    main()
