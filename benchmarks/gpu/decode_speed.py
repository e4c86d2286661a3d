"""Decode attention of Llama 3 8B's layers, as a share of copy bandwidth, next to torch's attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpu.bench import Bench, Row, Table, judged, share
from gpu.rivals import HEAD_DIM, HEADS, KV_HEADS, flex, rival_seconds, sdpa
from gpu.steps import Shape, make_batch, random_pages
from torch_backend.attention.interface import AttentionOptions

DECODE_TARGET = 0.8
"""Share of copy bandwidth, from 32 rows of 4k tokens on."""

FLOAT8_TARGET = 0.75
"""The same for float8 pages, which are read at twice the tokens a second and take more instructions a byte."""

_PAGE_SIZE = 16


def run(bench: Bench) -> Iterator[Table]:
    """Every batch and context that fits, then variations of one of them."""
    rows, contexts = ((1, 2), (32, 64)) if bench.small else ((1, 8, 32, 64, 128, 256), (1024, 4096, 8192, 16384, 32768))
    flexed = {(1, 32)} if bench.small else {(32, 4096)}
    yield Table(
        f"decode attention ({bench.kernels.name}), 32 heads of 128 on 8 kv heads, {_copy_rate(bench)}",
        [_decode(bench, count, context, (count, context) in flexed) for context in contexts for count in rows],
    )
    yield Table(
        f"decode attention ({bench.kernels.name}) of float8 pages, {_copy_rate(bench)}",
        [_decode_float8(bench, count, context) for context in contexts[1:] for count in rows],
    )
    count, context = (2, 32) if bench.small else (32, 4096)
    generator = torch.Generator().manual_seed(0)
    ragged = (2 * context * torch.rand(count, generator=generator)).int().clamp(min=1).tolist()
    variants = {
        "page size 1": _timed(bench, Shape.decode((context,) * count), 1, bench.dtype),
        "page size 64": _timed(bench, Shape.decode((context,) * count), 64, bench.dtype),
        "ragged lengths": _timed(bench, Shape.decode(ragged), _PAGE_SIZE, bench.dtype),
        "window of a quarter": _timed(
            bench, Shape.decode((context,) * count), _PAGE_SIZE, bench.dtype, window=context // 4
        ),
    }
    yield Table(f"decode attention, variations of {count} x {context}", [{"what": k} | v for k, v in variants.items()])


def _copy_rate(bench: Bench) -> str:
    return f"copy {bench.rates.copy_bytes_per_second / 1e9:.4g} GB/s"


def _decode(bench: Bench, count: int, context: int, with_flex: bool) -> Row:
    shape = Shape.decode((context,) * count)
    row: Row = {"rows": count, "context": context}
    row |= _timed(bench, shape, _PAGE_SIZE, bench.dtype)
    if "share of copy" not in row:
        return row
    for rival in (sdpa, flex) if with_flex else (sdpa,):
        row |= _rival(bench, rival_seconds(bench, rival, (count, 1, context)), _kv_bytes(shape, bench.dtype))
    heavy = count >= 32 and context >= 4096
    return judged(row, "share of copy", DECODE_TARGET, at_least=True) if heavy else row


def _decode_float8(bench: Bench, count: int, context: int) -> Row:
    row: Row = {"rows": count, "context": context}
    row |= _timed(bench, Shape.decode((context,) * count), _PAGE_SIZE, torch.float8_e4m3fn)
    heavy = count >= 32 and context >= 4096 and "share of copy" in row
    return judged(row, "share of copy", FLOAT8_TARGET, at_least=True) if heavy else row


def _timed(bench: Bench, shape: Shape, page_size: int, kv_dtype: torch.dtype, window: int | None = None) -> Row:
    """For one layer: microseconds of the kernels that each layer launches, and of the plan that layers share."""
    needed = 2 * shape.pages(page_size) * page_size * KV_HEADS * HEAD_DIM * kv_dtype.itemsize
    if needed > 0.8 * bench.free_bytes():
        return {"note": f"{needed / 2**30:.0f} GiB of KV do not fit"}
    batch = make_batch(bench, shape, page_size)
    kv = random_pages(bench, shape.pages(page_size), KV_HEADS, page_size, HEAD_DIM, kv_dtype)
    queries = bench.normal(shape.tokens, HEADS, HEAD_DIM)
    options = AttentionOptions(HEAD_DIM**-0.5, window=window)
    step = bench.kernels.attention.prepare(batch)
    seconds = bench.stopwatch.seconds(lambda: step(queries, kv, options))
    whole = bench.stopwatch.seconds(lambda: bench.kernels.attention.prepare(batch)(queries, kv, options))
    rate = _kv_bytes(shape, kv_dtype, window) / seconds
    return {
        "us": seconds * 1e6,
        "plan us": max(whole - seconds, 0.0) * 1e6,
        "GB/s": rate / 1e9,
        "share of copy": share(rate, bench.rates.copy_bytes_per_second),
    }


def _kv_bytes(shape: Shape, kv_dtype: torch.dtype, window: int | None = None) -> int:
    """Keys and values that decode rows must read."""
    keys = sum(min(length, window or length) for length in shape.kv_lens)
    return 2 * keys * KV_HEADS * HEAD_DIM * kv_dtype.itemsize


def _rival(bench: Bench, found: Row, kv_bytes: int) -> Row:
    """Seconds as a share of copy bandwidth."""
    return {
        key.removesuffix(" seconds"): share(kv_bytes / value, bench.rates.copy_bytes_per_second)
        if key.endswith(" seconds")
        else value
        for key, value in found.items()
    }
