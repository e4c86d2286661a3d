"""Every kernel that ships, in every configuration it is meant for: what is compiled ahead of time and checked.

Sizes are those of the models served most: hidden sizes 576 (SmolLM2) to 8192 (Llama 70B), head sizes 64 to 256.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torch_backend.kernels.chip import Chip
from torch_backend.kernels.configuration import ShippedKernel
from torch_backend.kernels.draw import draw, greedy
from torch_backend.kernels.gelu_mul import gelu_mul
from torch_backend.kernels.rms_norm import add_rms_norm, rms_norm
from torch_backend.kernels.rotate_and_write import rotate_and_write
from torch_backend.kernels.shipped_attention import attention_kernels
from torch_backend.kernels.silu_mul import silu_mul
from torch_backend.kv_pages import KVPages
from torch_backend.operations import HeadNorms, Rotation

_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_HIDDEN_SIZES = (576, 896, 2048, 3584, 4096, 5120, 8192)
_HEAD_DIMS = (64, 80, 96, 128, 256)
_PAGE_SIZES = (1, 16, 64)
_TOKENS = 48


def shipped_kernels() -> list[ShippedKernel]:
    """All of them, each with a name of its own."""
    activations = [_activation(name, dtype) for name in ("silu_mul", "gelu_mul") for dtype in _TYPES]
    # Vocabularies whose rows are aligned to 16 bytes, and not.
    draws = [*_draws(128_256), *_draws(50_257)]
    return [*_norms(), *_wide_weights(), *activations, *_rotations(), *draws, *attention_kernels()]


def _empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _norms() -> Iterator[ShippedKernel]:
    for dtype in _TYPES:
        for hidden in _HIDDEN_SIZES if dtype == torch.bfloat16 else (4096,):
            yield from _norms_of(dtype, hidden)


def _norms_of(dtype: torch.dtype, hidden: int) -> Iterator[ShippedKernel]:
    x, weight = _empty(dtype, _TOKENS, hidden), _empty(dtype, hidden)
    configuration = f"{_name(dtype)}, hidden {hidden}"
    yield ShippedKernel("rms_norm", configuration, lambda _: rms_norm(x, weight, 1e-6))
    yield ShippedKernel("add_rms_norm", configuration, lambda _: add_rms_norm(x, x, weight, 1e-6))


def _wide_weights() -> Iterator[ShippedKernel]:
    """Weights in float32 beside bfloat16 activations, as Gemma's norms have them."""
    hidden, dtype = 2304, torch.bfloat16
    x, weight = _empty(dtype, _TOKENS, hidden), _empty(torch.float32, hidden)
    configuration = f"{_name(dtype)}, hidden {hidden}, float32 weight"
    yield ShippedKernel("rms_norm", configuration, lambda _: rms_norm(x, weight, 1e-6))
    yield ShippedKernel("add_rms_norm", configuration, lambda _: add_rms_norm(x, x, weight, 1e-6))


def _activation(name: str, dtype: torch.dtype) -> ShippedKernel:
    activate = {"silu_mul": silu_mul, "gelu_mul": gelu_mul}[name]
    gate_up = _empty(dtype, _TOKENS, 2 * 14_336)
    return ShippedKernel(name, _name(dtype), lambda _: activate(gate_up))


def _rotations() -> Iterator[ShippedKernel]:
    for dtype in _TYPES:
        for pages in (dtype, torch.float8_e4m3fn):
            for head_dim in _HEAD_DIMS if dtype == torch.bfloat16 else (128,):
                for has_norms in (False, True):
                    yield _rotation(dtype, pages, head_dim, has_norms, page_size=16)
    for page_size in _PAGE_SIZES:
        if page_size != 16:
            yield _rotation(torch.bfloat16, torch.bfloat16, 128, False, page_size)


def _rotation(dtype: torch.dtype, pages: torch.dtype, head_dim: int, has_norms: bool, page_size: int) -> ShippedKernel:
    heads, kv_heads = 32, 8

    def launch(_: Chip) -> object:
        half = _empty(torch.float32, _TOKENS, head_dim // 2)
        weight = _empty(dtype, head_dim)
        return rotate_and_write(
            _empty(dtype, _TOKENS, (heads + 2 * kv_heads) * head_dim),
            Rotation(half, half),
            HeadNorms(weight, weight, 1e-6) if has_norms else None,
            KVPages.allocate(2, kv_heads, page_size, head_dim, pages, torch.device("meta")),
            _empty(torch.int64, _TOKENS),
        )

    norms = ", head norms" if has_norms else ""
    configuration = f"{_name(dtype)}, head_dim {head_dim}, {_name(pages)} pages of {page_size}{norms}"
    return ShippedKernel("rotate_and_write", configuration, launch)


def _draws(vocab: int) -> Iterator[ShippedKernel]:
    logits = _empty(torch.float32, _TOKENS, vocab)
    reals, words, seeds = _empty(torch.float32, _TOKENS), _empty(torch.int32, _TOKENS), _empty(torch.int32, _TOKENS, 2)
    configuration = f"vocabulary {vocab}"
    yield ShippedKernel("greedy", configuration, lambda _: greedy(logits))
    yield ShippedKernel(
        "draw", configuration, lambda _: draw(logits, reals, words, reals, reals, seeds=seeds, positions=words)
    )
