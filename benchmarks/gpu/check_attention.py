"""Attention on the device against `torch_backend/attention/reference.py` in float32, over poisoned pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from gpu.bench import Bench, Row, Table
from gpu.checks import Comparison, exact, short
from gpu.steps import Shape, make_batch, poison_unused, random_pages
from torch_backend.attention.interface import AttentionOptions
from torch_backend.attention.reference import ReferenceAttention
from torch_backend.batch import ForwardBatch
from torch_backend.kv_pages import KVForm, KVPages


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layer's attention, and the type of its pages (None: that of its queries)."""

    dtype: torch.dtype
    kv_dtype: torch.dtype | KVForm | None = None
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    page_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        parts = [short(self.dtype)]
        if isinstance(self.kv_dtype, KVForm):
            parts.append(f"KV {self.kv_dtype.name}")
        elif self.kv_dtype is not None:
            parts.append(f"KV {short(self.kv_dtype)}")
        parts.append(f"heads {self.kv_heads}x{self.group} dim {self.head_dim} page {self.page_size}")
        if self.window is not None:
            parts.append(f"window {self.window}")
        if self.soft_cap is not None:
            parts.append(f"cap {self.soft_cap:g}")
        return " ".join([*parts, "sinks"] if self.sinks else parts)


def cases(bench: Bench) -> list[Case]:
    """One property changed at a time, then some together. Float8 pages are left out where unsupported."""
    base = Case(dtype=bench.dtype, kv_heads=2, group=2, head_dim=64) if bench.small else Case(dtype=bench.dtype)
    fp8 = torch.float8_e4m3fn
    found = [replace(base, dtype=dtype) for dtype in bench.dtypes]
    found += [replace(base, head_dim=size) for size in ((80,) if bench.small else (64, 80, 96, 256))]
    found += [replace(base, page_size=size) for size in (1, 64)]
    found += [replace(base, window=window) for window in ((5,) if bench.small else (1, 65, 1000))]
    found += [replace(base, soft_cap=20.0), replace(base, sinks=True), replace(base, kv_dtype=fp8)]
    found += [replace(base, soft_cap=20.0, sinks=True, window=70), replace(base, kv_dtype=fp8, window=70, sinks=True)]
    sage, int8 = KVForm(torch.int8, bench.dtype), KVForm(torch.int8, torch.int8)
    found += [replace(base, kv_dtype=sage), replace(base, kv_dtype=int8, window=70, sinks=True)]
    if not bench.small:
        found += [replace(base, kv_dtype=sage, soft_cap=20.0), replace(base, kv_dtype=int8, head_dim=256)]
        found += [replace(base, kv_dtype=sage, page_size=size) for size in (1, 64)]
        found += [replace(base, group=group) for group in (1, 7, 8)]
        found += [replace(base, kv_heads=1, group=8), replace(base, kv_heads=32, group=1)]
        found += [replace(base, kv_dtype=fp8, dtype=torch.float16), replace(base, kv_dtype=fp8, head_dim=256)]
        found += [replace(base, kv_dtype=fp8, page_size=size) for size in (1, 64)]
        found += [replace(base, dtype=torch.float32, head_dim=80, page_size=1, sinks=True)]
    return found


def shapes(bench: Bench) -> dict[str, Shape]:
    """Lengths at and next to the edges of pages, tiles and splits; prefixes of zero, aligned and unaligned lengths."""
    if bench.small:
        return {
            "decode": Shape.decode((1, 16, 33, 70), padding=2),
            "mixed": Shape((1, 1, 5, 3), (17, 40, 5, 37), num_decode=2),
        }
    edges = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 513, 1023, 2049, 5000)
    chunks = {1: 1, 7: 7, 64: 64, 65: 100, 128: 1152, 200: 200, 33: 2081, 513: 3000}
    return {
        "decode": Shape.decode(edges, padding=3),
        "extend": Shape(tuple(chunks), tuple(chunks.values()), num_decode=0),
        # longer than a split, and so few tokens that splits have separate programs
        "short chunk": Shape((40,), (7000,), num_decode=0),
        "mixed": Shape((1, 1, 1, 65, 257), (1, 300, 1025, 65, 900), num_decode=3),
    }


def run(bench: Bench) -> Iterator[Table]:
    """One table."""
    rows: list[Row] = []
    for case in cases(bench):
        for name, shape in shapes(bench).items():
            rows += _check(bench, case, name, shape)
    yield Table(f"attention ({bench.kernels.name}) against the reference", rows)


def _check(bench: Bench, case: Case, name: str, shape: Shape) -> Iterator[Row]:
    batch = make_batch(bench, shape, case.page_size)
    kv = random_pages(
        bench, shape.pages(case.page_size), case.kv_heads, case.page_size, case.head_dim, case.kv_dtype or case.dtype
    )
    poison_unused(kv, batch)
    heads = case.kv_heads * case.group
    queries = bench.normal(shape.tokens, heads, case.head_dim, dtype=case.dtype)
    sinks = bench.normal(heads, dtype=torch.float32) if case.sinks else None
    options = AttentionOptions(case.head_dim**-0.5, case.window, case.soft_cap, sinks)
    found = _attend(bench, batch, queries, kv, options)
    expected = ReferenceAttention().prepare(batch)(queries.float(), kv, options)
    coarsest = torch.int8 if kv.token_scales is not None else case.dtype
    yield Comparison.of(found, expected, coarsest).row(name, str(case))
    # Native attention batches rows of similar length; Triton's kernels promise more.
    if name == "decode" and bench.kernels.name == "triton":
        yield _single_row(bench, case, batch, queries, kv, options, found)
        if bench.on_gpu:
            yield _replayed(bench, case, batch, queries, kv, options)


def _attend(
    bench: Bench, batch: ForwardBatch, queries: torch.Tensor, kv: KVPages, options: AttentionOptions
) -> torch.Tensor:
    # the result probably reuses this memory: NaN shows what no program writes
    torch.full_like(queries, torch.nan)
    return bench.kernels.attention.prepare(batch)(queries, kv, options)


def _single_row(
    bench: Bench,
    case: Case,
    batch: ForwardBatch,
    queries: torch.Tensor,
    kv: KVPages,
    options: AttentionOptions,
    together: torch.Tensor,
) -> Row:
    """The longest row in a batch by itself gives the same bits."""
    row = int(batch.kv_lens.argmax())
    single = replace(
        batch,
        page_table=batch.page_table[row : row + 1].clone(),
        kv_lens=batch.kv_lens[row : row + 1].clone(),
        query_starts=batch.query_starts[:2],
        num_decode=1,
    )
    alone = _attend(bench, single, queries[row : row + 1].clone(), kv, options)
    return exact("a row alone", str(case), alone[0], together[row])


def _replayed(
    bench: Bench,
    case: Case,
    batch: ForwardBatch,
    queries: torch.Tensor,
    kv: KVPages,
    options: AttentionOptions,
) -> Row:
    """A captured step replayed with other lengths gives the same bits as the same step launched eagerly."""
    lens = batch.kv_lens.clone()
    captured = replace(batch, kv_lens=lens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = bench.kernels.attention.prepare(captured)(queries, kv, options)
    lens.copy_((lens + 1) // 2)
    graph.replay()
    torch.cuda.synchronize()
    return exact("replayed", str(case), output, _attend(bench, replace(batch, kv_lens=lens), queries, kv, options))
