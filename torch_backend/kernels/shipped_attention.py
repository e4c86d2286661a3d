"""The attention kernels that ship, in every configuration they are meant for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from torch_backend.attention.interface import AttentionOptions
from torch_backend.attention.triton import TritonAttention
from torch_backend.batch import ForwardBatch
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.configuration import ShippedKernel
from torch_backend.kv_pages import KVPages

_META = torch.device("meta")
_LONGEST = 8192


@dataclass(frozen=True, slots=True)
class _Shape:
    """What attention's kernels are compiled for."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    pages: torch.dtype = torch.bfloat16
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        words = [
            f"{_name(self.dtype)}, {self.heads}/{self.kv_heads} heads of {self.head_dim}",
            f"{_name(self.pages)} pages of {self.page_size}",
        ]
        words += ["window"] * (self.window is not None) + ["soft cap"] * (self.soft_cap is not None)
        return ", ".join(words + ["sinks"] * self.sinks)


_LLAMA_8B = _Shape(32, 8, 128)
_SHAPES = (
    _LLAMA_8B,
    _Shape(9, 3, 64),  # SmolLM2 135M
    _Shape(14, 2, 64),  # Qwen2 0.5B
    _Shape(28, 4, 128),  # Qwen2 7B
    _Shape(40, 8, 128),  # Qwen3 14B
    _Shape(64, 8, 128),  # Llama 70B
    _Shape(32, 32, 80),
    _Shape(32, 32, 96),
    _Shape(16, 8, 256),
)


def attention_kernels() -> list[ShippedKernel]:
    """Decode and extend attention of each shape."""
    return [kernel for shape in _shapes() for kernel in (_decode(shape), _extend(shape))]


def _shapes() -> Iterator[_Shape]:
    for pages in (torch.bfloat16, torch.float8_e4m3fn):
        for shape in _SHAPES:
            yield replace(shape, pages=pages)
        for page_size in (1, 64):
            yield replace(_LLAMA_8B, pages=pages, page_size=page_size)
    yield replace(_LLAMA_8B, dtype=torch.float16, pages=torch.float16)
    yield replace(_LLAMA_8B, dtype=torch.float16, pages=torch.float8_e4m3fn)
    yield replace(_LLAMA_8B, dtype=torch.float32, pages=torch.float32)
    yield replace(_LLAMA_8B, window=4096)
    yield replace(_LLAMA_8B, soft_cap=50.0)
    yield _Shape(64, 8, 64, sinks=True)
    yield _Shape(64, 8, 64, sinks=True, window=128)
    yield _Shape(16, 8, 256, window=4096, soft_cap=50.0)


def _decode(shape: _Shape) -> ShippedKernel:
    sequences = 48
    return ShippedKernel(
        "decode_attention", str(shape), lambda chip: _attend(shape, sequences, sequences, sequences, chip)
    )


def _extend(shape: _Shape) -> ShippedKernel:
    return ShippedKernel("extend_attention", str(shape), lambda chip: _attend(shape, 1024, 4, 0, chip))


def _attend(shape: _Shape, tokens: int, sequences: int, num_decode: int, chip: Chip) -> object:
    """Attention of a step of so many tokens, sequences, and decode sequences among them."""
    batch = ForwardBatch(
        tokens=_ints(tokens),
        positions=_ints(tokens),
        write_slots=_ints(tokens).long(),
        page_table=_ints(sequences, _LONGEST // shape.page_size),
        kv_lens=_ints(sequences),
        query_starts=_ints(sequences + 1),
        num_decode=num_decode,
    )
    options = AttentionOptions(
        scale=shape.head_dim**-0.5,
        window=shape.window,
        soft_cap=shape.soft_cap,
        sinks=torch.empty(shape.heads, dtype=torch.float32, device=_META) if shape.sinks else None,
    )
    queries = torch.empty((tokens, shape.heads, shape.head_dim), dtype=shape.dtype, device=_META)
    kv = KVPages.allocate(2, shape.kv_heads, shape.page_size, shape.head_dim, shape.pages, _META)
    return TritonAttention(chip).prepare(batch)(queries, kv, options)


def _ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device=_META)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
