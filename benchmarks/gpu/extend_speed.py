"""Extend attention of Llama 3 8B's layers, as a share of the rate of matrix products, next to torch's attention."""

from __future__ import annotations

from collections.abc import Iterator

from gpu.bench import Bench, Row, Table, share
from gpu.rivals import HEAD_DIM, HEADS, KV_HEADS, flex, rival_seconds, sdpa
from gpu.steps import Shape, make_batch, random_pages
from torch_backend.attention.interface import AttentionOptions

_PAGE_SIZE = 16
_OPTIONS = AttentionOptions(HEAD_DIM**-0.5)


def run(bench: Bench) -> Iterator[Table]:
    """Chunks on prefixes."""
    chunks, prefixes = ((8,), (0, 24)) if bench.small else ((128, 512, 2048, 8192), (0, 4096, 32768))
    flexed = {(8, 24)} if bench.small else {(2048, 4096)}
    rate = bench.rates.matmul_flops_per_second
    yield Table(
        f"extend attention ({bench.kernels.name}), 32 heads of 128 on 8 kv heads, "
        f"matrix products {rate / 1e12:.4g} TFLOP/s",
        [_extend(bench, chunk, prefix, (chunk, prefix) in flexed) for prefix in prefixes for chunk in chunks],
    )


def _extend(bench: Bench, chunk: int, prefix: int, with_flex: bool) -> Row:
    shape = Shape((chunk,), (prefix + chunk,), num_decode=0)
    batch = make_batch(bench, shape, _PAGE_SIZE)
    kv = random_pages(bench, shape.pages(_PAGE_SIZE), KV_HEADS, _PAGE_SIZE, HEAD_DIM, bench.dtype)
    queries = bench.normal(chunk, HEADS, HEAD_DIM)
    step = bench.kernels.attention.prepare(batch)
    seconds = bench.stopwatch.seconds(lambda: step(queries, kv, _OPTIONS))
    flops = 4 * HEADS * HEAD_DIM * shape.visible_pairs()
    possible = bench.rates.matmul_flops_per_second
    row: Row = {
        "chunk": chunk,
        "prefix": prefix,
        "us": seconds * 1e6,
        "TFLOP/s": flops / seconds / 1e12,
        "share of matmul": share(flops / seconds, possible),
    }
    for rival in (sdpa, flex) if with_flex else (sdpa,):
        for key, value in rival_seconds(bench, rival, (1, chunk, prefix + chunk)).items():
            name = key.removesuffix(" seconds")
            row[name] = share(flops / value, possible) if name != key else value
    return row
