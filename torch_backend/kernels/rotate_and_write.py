"""Normalises and rotates queries and keys, and writes keys and values to their pages, in one pass over qkv."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torch_backend.kernels.dependent_launch import after_previous
from torch_backend.kernels.integers import quantise, scale_of
from torch_backend.kv_pages import KVPages
from torch_backend.operations import HeadNorms, Rotation


@triton.jit
def encode_e4m3(x):
    """float32 to the nearest float8 e4m3 (without infinities, Micikevicius et al. 2022, "FP8 formats for deep
    learning"), ties to even, as uint8; values beyond +-448 become +-448. Triton supports the type from compute
    capability 8.9 on. Integers work on every chip, with the same bits on all."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), 448.0)
    # Below 2^-6, numbers are multiples of 2^-9, and the addition of 2^14 leaves just these multiples in a float32.
    small = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    large = magnitude.to(tl.int32, bitcast=True)
    large = ((large + 0x7FFFF + ((large >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    code = tl.where(magnitude < 0.015625, small, large)
    return tl.where(x == x, sign | code, 0x7F).to(tl.uint8)


# Values of a program, eight consecutive ones per thread.
_TILE = 1024
_HEAD_DIMS = (64, 80, 96, 128, 256)


@triton.jit
def _halves(start, heads, lanes, head_dim: tl.constexpr, inside):
    """The two halves of heads, float32 `[heads, lanes]` each."""
    at = start + heads[:, None] * head_dim + lanes[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + head_dim // 2, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _norm(first, second, weight, lanes, eps, head_dim: tl.constexpr):
    present = lanes < head_dim // 2
    scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / head_dim + eps)[:, None]
    first = first * scale * tl.load(weight + lanes, mask=present, other=0.0).to(tl.float32)[None, :]
    second = second * scale * tl.load(weight + head_dim // 2 + lanes, mask=present, other=0.0).to(tl.float32)[None, :]
    return first, second


@triton.jit
def _rotate(first, second, cosines, sines, token, lanes, head_dim: tl.constexpr):
    present = lanes < head_dim // 2
    at = token * (head_dim // 2) + lanes
    cosine = tl.load(cosines + at, mask=present, other=0.0)[None, :]
    sine = tl.load(sines + at, mask=present, other=0.0)[None, :]
    return first * cosine - second * sine, second * cosine + first * sine


@triton.jit
def _write_integers(
    pages, scales, mean, slot, page_size, kv_heads, heads, lanes, first, second, head_dim: tl.constexpr, inside
):
    """Stores heads of one token in its slot in int8, minus `mean` (None for no mean), with a scale for each head."""
    rows = ((slot // page_size) * kv_heads + heads) * page_size + slot % page_size
    if mean is not None:
        at = mean + heads[:, None] * head_dim + lanes[None, :]
        first -= tl.load(at, mask=inside, other=0.0)
        second -= tl.load(at + head_dim // 2, mask=inside, other=0.0)
    largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
    scale = scale_of(largest, tl.sum(first, 1) + tl.sum(second, 1))
    tl.store(scales + rows, scale, mask=heads < kv_heads)
    at = pages + rows[:, None] * head_dim + lanes[None, :]
    tl.store(at, quantise(first, scale[:, None]), mask=inside)
    tl.store(at + head_dim // 2, quantise(second, scale[:, None]), mask=inside)


@triton.jit
def _write_page(pages, scales, slot, page_size, kv_heads, heads, lanes, first, second, head_dim: tl.constexpr, inside):
    """Stores heads of one token in its slot; pages of bytes hold float8, divided by the head's scale."""
    page = slot // page_size
    rows = (page * kv_heads + heads) * page_size + slot % page_size
    at = pages + rows[:, None] * head_dim + lanes[None, :]
    if pages.dtype.element_ty == tl.uint8:
        scale = tl.load(scales + heads, mask=heads < kv_heads, other=1.0)[:, None]
        tl.store(at, encode_e4m3(tl.div_rn(first, scale)), mask=inside)
        tl.store(at + head_dim // 2, encode_e4m3(tl.div_rn(second, scale)), mask=inside)
    else:
        tl.store(at, first.to(pages.dtype.element_ty), mask=inside)
        tl.store(at + head_dim // 2, second.to(pages.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_and_write_kernel(
    qkv,
    cosines,
    sines,
    query_norm,
    key_norm,
    eps,
    keys,
    values,
    key_scale,
    value_scale,
    key_scales,
    value_scales,
    key_mean,
    write_slots,
    queries,
    heads,
    kv_heads,
    page_size,
    head_dim: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    # The second axis is blocks of query heads, then of key heads, then of value heads.
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    query_blocks = tl.cdiv(heads, HEADS_BLOCK)
    kv_blocks = tl.cdiv(kv_heads, HEADS_BLOCK)
    lanes = tl.arange(0, HALF_BLOCK)
    tile = tl.arange(0, HEADS_BLOCK)
    present = lanes[None, :] < head_dim // 2
    start = qkv + token * (heads + 2 * kv_heads) * head_dim
    after_previous(DEPENDENT)
    if block < query_blocks:
        own = block * HEADS_BLOCK + tile
        inside = (own[:, None] < heads) & present
        first, second = _halves(start, own, lanes, head_dim, inside)
        if HAS_NORMS:
            first, second = _norm(first, second, query_norm, lanes, eps, head_dim)
        first, second = _rotate(first, second, cosines, sines, token, lanes, head_dim)
        at = queries + (token * heads + own)[:, None] * head_dim + lanes[None, :]
        tl.store(at, first.to(queries.dtype.element_ty), mask=inside)
        tl.store(at + head_dim // 2, second.to(queries.dtype.element_ty), mask=inside)
    elif block < query_blocks + kv_blocks:
        own = (block - query_blocks) * HEADS_BLOCK + tile
        inside = (own[:, None] < kv_heads) & present
        first, second = _halves(start + heads * head_dim, own, lanes, head_dim, inside)
        if HAS_NORMS:
            first, second = _norm(first, second, key_norm, lanes, eps, head_dim)
        first, second = _rotate(first, second, cosines, sines, token, lanes, head_dim)
        slot = tl.load(write_slots + token)
        if key_scales is not None:
            _write_integers(
                keys, key_scales, key_mean, slot, page_size, kv_heads, own, lanes, first, second, head_dim, inside
            )
        else:
            _write_page(keys, key_scale, slot, page_size, kv_heads, own, lanes, first, second, head_dim, inside)
    else:
        own = (block - query_blocks - kv_blocks) * HEADS_BLOCK + tile
        inside = (own[:, None] < kv_heads) & present
        first, second = _halves(start + (heads + kv_heads) * head_dim, own, lanes, head_dim, inside)
        slot = tl.load(write_slots + token)
        if value_scales is not None:
            _write_integers(
                values, value_scales, None, slot, page_size, kv_heads, own, lanes, first, second, head_dim, inside
            )
        else:
            _write_page(values, value_scale, slot, page_size, kv_heads, own, lanes, first, second, head_dim, inside)


def rotate_and_write(
    qkv: torch.Tensor,
    rotation: Rotation,
    norms: HeadNorms | None,
    kv: KVPages,
    write_slots: torch.Tensor,
    dependent: bool = False,
) -> torch.Tensor:
    """Normalises (with `norms`) and rotates queries and keys, and stores keys and values in their slots. Returns
    queries `[T, heads, head_dim]`, contiguous. Results are rounded once, from float32; float8 saturates. int8 is stored
    with a scale for each token and head.

    `qkv` `[T, (heads + 2 * kv_heads) * head_dim]`, contiguous: all queries, all keys, all values of each token;
    `write_slots` int64 `[T]`; `dependent`: see `kernels.dependent_launch`.
    """
    _, kv_heads, page_size, head_dim = kv.keys.shape
    tokens = qkv.shape[0]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    if heads < 1 or qkv.shape[1] % head_dim or not qkv.is_contiguous() or head_dim not in _HEAD_DIMS:
        raise ValueError(
            f"qkv is {list(qkv.shape)} with strides {list(qkv.stride())}; wanted is a contiguous "
            f"[T, (heads + 2 * {kv_heads}) * {head_dim}], of a head_dim among {_HEAD_DIMS}"
        )
    queries = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return queries
    by_token = kv.token_scales
    half_block = triton.next_power_of_2(head_dim // 2)
    tile = _TILE if by_token is None else _TILE // 2
    heads_block = min(tile // (2 * half_block), triton.next_power_of_2(max(heads, kv_heads)))
    float8 = kv.keys.dtype == torch.float8_e4m3fn
    grid = (tokens, triton.cdiv(heads, heads_block) + 2 * triton.cdiv(kv_heads, heads_block))
    _rotate_and_write_kernel[grid](
        qkv,
        rotation.cosines,
        rotation.sines,
        norms.query if norms else None,
        norms.key if norms else None,
        norms.eps if norms else 0.0,
        kv.keys.view(torch.uint8) if float8 else kv.keys,
        kv.values.view(torch.uint8) if float8 else kv.values,
        kv.key_scale,
        kv.value_scale,
        None if by_token is None else by_token.keys,
        None if by_token is None else by_token.values,
        None if by_token is None else by_token.key_mean,
        write_slots,
        queries,
        heads,
        kv_heads,
        page_size,
        head_dim=head_dim,
        HAS_NORMS=norms is not None,
        HEADS_BLOCK=heads_block,
        HALF_BLOCK=half_block,
        DEPENDENT=dependent,
        num_warps=4,
        launch_pdl=dependent,
    )
    return queries
