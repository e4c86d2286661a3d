"""Attention's kernels as they ship: head sizes, types and page sizes in all combinations, options on the side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from torch_backend.attention.interface import AttentionOptions
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.configuration import ShippedKernel
from torch_backend.kernels.decode_attention import Partials, decode_attention, plan_decode
from torch_backend.kernels.extend_attention import extend_attention, extend_tile, plan_extend
from torch_backend.kv_pages import KVPages

_ROWS = 48
_TOKENS = 4096
_LONGEST = 32_768
_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class _Shape:
    """What attention's kernels are compiled for."""

    head_dim: int = 128
    group: int = 4
    queries: torch.dtype = torch.bfloat16
    pages: torch.dtype = torch.bfloat16
    page_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    kv_heads: int = 8

    @property
    def name(self) -> str:
        types = [str(dtype).removeprefix("torch.") for dtype in (self.queries, self.pages)]
        named = f"{types[0]}, head_dim {self.head_dim}, group {self.group}, {types[1]} pages of {self.page_size}"
        options = {"window": self.window is not None, "soft cap": self.soft_cap is not None, "sinks": self.sinks}
        return ", ".join([named, *(name for name, given in options.items() if given)])

    @property
    def options(self) -> AttentionOptions:
        sinks = torch.empty(self.group * self.kv_heads, dtype=torch.float32, device=_META) if self.sinks else None
        return AttentionOptions(self.head_dim**-0.5, self.window, self.soft_cap, sinks)

    def tensors(self, tokens: int) -> tuple[torch.Tensor, KVPages, torch.Tensor, torch.Tensor]:
        """Queries, pages, page table and lengths."""
        queries = torch.empty(tokens, self.kv_heads * self.group, self.head_dim, dtype=self.queries, device=_META)
        kv = KVPages.allocate(2, self.kv_heads, self.page_size, self.head_dim, self.pages, _META)
        page_table = torch.empty(_ROWS, _LONGEST // self.page_size, dtype=torch.int32, device=_META)
        return queries, kv, page_table, torch.empty(_ROWS, dtype=torch.int32, device=_META)


def attention_kernels() -> list[ShippedKernel]:
    """Decode and extend for every shape."""
    return [
        ShippedKernel(operation, shape.name, partial(launch, shape))
        for shape in _shapes()
        for operation, launch in (("decode_attention", _decode), ("extend_attention", _extend))
    ]


def _shapes() -> Iterator[_Shape]:
    float8 = torch.float8_e4m3fn
    for head_dim in (64, 80, 96, 128, 256):
        for pages in (torch.bfloat16, float8):
            for page_size in (1, 16, 64):
                yield _Shape(head_dim, pages=pages, page_size=page_size)
    for group in (1, 3, 8, 16):
        yield _Shape(group=group)
    half = _Shape(queries=torch.float16, pages=torch.float16)
    yield from (half, replace(half, pages=float8))
    yield _Shape(queries=torch.float32, pages=torch.float32)
    for pages in (torch.bfloat16, float8):
        yield _Shape(pages=pages, window=4096)  # Mistral
        yield _Shape(64, group=8, pages=pages, window=128, sinks=True)  # gpt-oss
        yield _Shape(64, group=8, pages=pages, sinks=True)
        yield _Shape(256, group=2, pages=pages, window=4096, soft_cap=50.0)  # Gemma 2
        yield _Shape(256, group=2, pages=pages, soft_cap=50.0)


def _decode(shape: _Shape, chip: Chip) -> None:
    queries, kv, page_table, kv_lens = shape.tensors(_ROWS)
    plan = plan_decode(kv_lens, _ROWS, _LONGEST, shape.kv_heads, shape.window)
    partials = Partials.allocate(plan, queries)
    output = torch.empty_like(queries)
    decode_attention(queries, kv, page_table, kv_lens, shape.options, plan, partials, output, chip)


def _extend(shape: _Shape, chip: Chip) -> None:
    queries, kv, page_table, kv_lens = shape.tensors(_TOKENS)
    starts = torch.empty(_ROWS + 1, dtype=torch.int32, device=_META)
    tile = extend_tile(shape.head_dim, shape.pages, chip)
    plan = plan_extend(starts, 0, _TOKENS, tile.tokens(shape.group))
    output = torch.empty_like(queries)
    extend_attention(queries, kv, page_table, kv_lens, starts, 0, shape.options, plan, output, chip)
