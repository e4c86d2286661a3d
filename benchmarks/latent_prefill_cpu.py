"""Cost of latent attention of a chunk on a CPU in its two forms, absorbed and expanded, in alternation.

    python benchmarks/latent_prefill_cpu.py [--backend torch jax] [--dtype float32 bfloat16]
        [--queries 64 128 256 512 2048] [--contexts 512 2048 8192] [--repeat 5] [--json FILE]

One row with DeepSeek-V2-Lite's heads: from queries of heads to outputs of heads, without the layer's projections.
The context includes the chunk. Milliseconds of processor time on one thread, the median; "ratio" is absorbed over
expanded, the median over the turns, and "products" the same ratio of multiply-adds, by the formulas of
`LatentAttentionConfig.expands_from`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax
import jax.numpy as jnp
import numpy as np
import torch
from machine import report

from sglang_jax.architectures.kinds.latent_attention import LatentAttentionConfig
from sglang_jax.architectures.kinds.norm import NormConfig
from sglang_jax.kernels.kv_storage import to_storage
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation
from sglang_jax.layers.batch import ForwardBatch as JaxBatch
from sglang_jax.layers.latent_attention import attend_latents
from torch_backend.attention.interface import AttentionOptions, LatentHeads
from torch_backend.attention.native import NativeAttention
from torch_backend.batch import ForwardBatch
from torch_backend.kv_pages import KVPages

PAGE_SIZE = 64
CONFIG = LatentAttentionConfig(
    num_heads=16,
    latent=512,
    query_latent=None,
    key_dim=128,
    rotary_dim=64,
    value_dim=128,
    scale=192**-0.5,
    rope=None,
    norm=NormConfig(eps=1e-6),
)


class Absorbed(LatentAttentionConfig):
    @property
    def expands_from(self) -> None:
        return None


class Expanded(LatentAttentionConfig):
    @property
    def expands_from(self) -> int:
        return 2


FORMS = {
    kind.__name__.lower(): kind(**{field.name: getattr(CONFIG, field.name) for field in fields(CONFIG)})
    for kind in (Absorbed, Expanded)
}


def products(queries: int, context: int) -> float:
    """Multiply-adds of the absorbed form over those of the expanded one."""
    made = CONFIG.key_dim + CONFIG.value_dim
    absorbed = queries * context * (2 * CONFIG.latent + CONFIG.rotary_dim)
    return absorbed / (queries * context * (made + CONFIG.rotary_dim) + context * CONFIG.latent * made)


def numbers(queries: int, context: int) -> dict[str, np.ndarray]:
    """The arrays of one row in pages 1, 2, ...; the chunk's vectors are already in the pages."""
    rng = np.random.default_rng(0)
    pages, width = 1 + -(-context // PAGE_SIZE), CONFIG.latent + CONFIG.rotary_dim
    sizes = {"plain": CONFIG.key_dim, "rotated": CONFIG.rotary_dim}
    asked = {name: rng.standard_normal((queries, CONFIG.num_heads, size)) for name, size in sizes.items()}
    up = {
        name: rng.standard_normal((CONFIG.num_heads, size, CONFIG.latent)) * CONFIG.latent**-0.5
        for name, size in (("key_up", CONFIG.key_dim), ("value_up", CONFIG.value_dim))
    }
    return {"pages": rng.standard_normal((pages, PAGE_SIZE, width)), **asked, **up}


def on_torch(queries: int, context: int, dtype: str) -> dict[str, Callable[[], object]]:
    made = {
        name: torch.from_numpy(array).to(getattr(torch, dtype)) for name, array in numbers(queries, context).items()
    }
    pages = KVPages(made["pages"][:, None], made["pages"][:, None])
    batch = ForwardBatch(
        tokens=torch.zeros(queries, dtype=torch.int32),
        positions=torch.zeros(queries, dtype=torch.int32),
        write_slots=torch.zeros(queries, dtype=torch.int64),
        page_table=torch.arange(1, len(made["pages"]), dtype=torch.int32)[None],
        kv_lens=torch.tensor([context], dtype=torch.int32),
        query_starts=torch.tensor([0, queries], dtype=torch.int32),
        num_decode=0,
    )
    asked = torch.cat((made["plain"], made["rotated"]), dim=-1)

    def run(config: LatentAttentionConfig) -> object:
        heads = LatentHeads(made["key_up"], made["value_up"], config.expands_from)
        with torch.inference_mode():
            return NativeAttention().prepare(batch)(asked, pages, AttentionOptions(config.scale, latents=heads))

    return {name: lambda config=config: run(config) for name, config in FORMS.items()}


def on_jax(queries: int, context: int, dtype: str) -> dict[str, Callable[[], object]]:
    found = numbers(queries, context)
    storage = jnp.dtype(jnp.uint16 if dtype == "bfloat16" else dtype)
    pages = to_storage(jnp.asarray(found["pages"][:, None, None], jnp.float32), storage)
    made = {name: jnp.asarray(array, dtype) for name, array in found.items()}
    slots = PAGE_SIZE + np.arange(context - queries, context)
    cached = made["pages"].reshape(-1, 1, found["pages"].shape[-1])[slots]
    batch = JaxBatch(
        tokens=jnp.zeros(queries, jnp.int32),
        positions=jnp.zeros(queries, jnp.int32),
        write_slots=jnp.asarray(slots, jnp.int32),
        page_table=jnp.arange(1, len(found["pages"]), dtype=jnp.int32)[None],
        kv_lens=jnp.asarray([context], jnp.int32),
        query_starts=jnp.asarray([0, queries], jnp.int32),
        num_decode=jnp.int32(0),
    )
    asked, up = (made["plain"], made["rotated"]), (made["key_up"], made["value_up"])

    def form(config: LatentAttentionConfig) -> Callable[[], object]:
        program, kept = jax.jit(attend_latents, static_argnums=(0, 1), donate_argnums=5), [jnp.array(pages)]

        def run() -> object:
            values, kept[0] = program(AttentionImplementation.XLA, config, asked, cached, up, kept[0], batch)
            return values.block_until_ready()

        return run

    return {name: form(config) for name, config in FORMS.items()}


def measure(backend: str, dtype: str, queries: int, context: int, repeat: int) -> dict[str, Any]:
    forms = (on_torch if backend == "torch" else on_jax)(queries, context, dtype)
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(repeat + 1):
        for name, run in forms.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    absorbed, expanded = (each[1:] for each in seconds.values())
    return {
        "backend": backend,
        "dtype": dtype,
        "queries": queries,
        "context": context,
        "absorbed": round(median(absorbed) * 1e3, 1),
        "expanded": round(median(expanded) * 1e3, 1),
        "ratio": median(one / other for one, other in zip(absorbed, expanded, strict=True)),
        "products": products(queries, context),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=["torch", "jax"], choices=["torch", "jax"])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--queries", type=int, nargs="+", default=[64, 128, 256, 512, 2048])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        measure(backend, dtype, queries, context, options.repeat)
        for backend in options.backend
        for dtype in options.dtype
        for context in options.contexts
        for queries in options.queries
        if queries <= context
    ]
    report("Latent attention of a chunk, milliseconds of one thread", rows, options.json)


if __name__ == "__main__":
    main()
