"""Common parts of decode and extend attention: a block of queries over a run of a sequence's keys. The recurrence is
that of FlashAttention (Dao et al. 2022; Dao 2023): tiles of keys one after the other, with the largest score and the
sum of exponentials in addition to the weighted sum of values. Exponentials are powers of two, with the logarithm's base
folded into the scale of the scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torch_backend.attention.interface import AttentionOptions
from torch_backend.kernels.chip import Chip

LOG2_E = tl.constexpr(1.4426950408889634)

TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_FIRST_CAPABILITY_WITH_FLOAT8 = 89


def compute_type(queries: torch.dtype, pages: torch.dtype) -> torch.dtype:
    """The dtype in which queries, keys and softmax weights are multiplied, for given dtypes of queries and pages.
    float8 is widened to float16 even with bfloat16 queries: this is exact, one instruction for two numbers instead of
    four, and leaves the softmax weights three more bits. Queries must then stay below 65504."""
    if pages == torch.float8_e4m3fn and queries == torch.bfloat16:
        return torch.float16
    return queries


def has_float8(chip: Chip) -> bool:
    """Whether the chip has an instruction that widens float8."""
    return chip.capability >= _FIRST_CAPABILITY_WITH_FLOAT8


def readable(pages: torch.Tensor, chip: Chip) -> torch.Tensor:
    """`pages`, as bytes if they are float8 and the chip has no instruction to widen it."""
    if pages.dtype == torch.float8_e4m3fn and not has_float8(chip):
        return pages.view(torch.uint8)
    return pages


def check_options(queries: torch.Tensor, keys: torch.Tensor, options: AttentionOptions) -> None:
    """Raises `ValueError` for options with which the kernels would return wrong results."""
    heads, kv_heads = queries.shape[1], keys.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot be divided among {kv_heads} kv heads")
    if options.scale <= 0:
        raise ValueError(f"the scale of scores must be positive, not {options.scale}")
    if options.window is not None and options.window < 1:
        raise ValueError(f"a window must hold at least the query's own key, but is {options.window}")
    if not queries.is_contiguous():
        raise ValueError(f"queries must be contiguous, but have strides {queries.stride()}")
    if keys.shape[2] & (keys.shape[2] - 1):
        raise ValueError(f"the page size must be a power of two, not {keys.shape[2]}")


@triton.jit
def attend(
    queries,
    positions,
    largest,
    total,
    weighted,
    first,
    last,
    pages,
    keys,
    values,
    key_scales,
    value_scales,
    scales_at,
    page_stride,
    score_scale,
    bias,
    soft_cap,
    window,
    EDGES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Adds the keys `first : last` of one sequence to a softmax in progress. Returns `largest`, `total` and `weighted`.

    - `queries` `[M, WIDTH]` of dtype `COMPUTE`, 0 from `HEAD_DIM` on; `positions` int32 `[M]`.
    - `largest`, `total` float32 `[M]`, `weighted` float32 `[M, WIDTH]`: of the keys so far. They start as -inf, 0, 0.
    - `first`: a multiple of `KEYS`. `pages`: the sequence's row of the page table.
    - `keys`, `values`: of one kv head in page 0; pages are `page_stride` elements apart.
    - `key_scales`, `value_scales`: float32, a scale for each token of int8 pages, else None. Those of the kv head start
      at `scales_at` in page 0. With `key_scales`, queries are int8 too.
    - `score_scale`: of products of queries and keys, in units of log2(e), or divided by the `soft_cap` if there is one.
      With `key_scales` it is `[M]`, and `bias` `[M]` is added to scores before the cap.
    - `EDGES`: some query may not see some key of a tile, or a tile is not full. Without it, nothing is masked.
    """
    lanes = tl.arange(0, KEYS)
    dims = tl.arange(0, WIDTH)
    # Pages before all keys that the queries see may belong to other rows.
    oldest = first if window is None else tl.min(positions, 0) - window + 1
    page = load_pages(pages, first, last, PAGE_SIZE, KEYS)
    for start in range(first, last, KEYS):
        places = start + lanes
        slots = page.to(tl.int64) * page_stride + (places % PAGE_SIZE) * HEAD_DIM
        if key_scales is not None:
            tokens = scales_at + page.to(tl.int64) * (page_stride // HEAD_DIM) + places % PAGE_SIZE
        # Page numbers are read one tile ahead. If they were read in the same iteration, the compiler would give half of
        # its pipeline to them, and have as many fewer tiles in flight.
        page = load_pages(pages, start + KEYS, last, PAGE_SIZE, KEYS)
        offsets = slots[:, None] + dims[None, :]
        key_tile = _load_tile(keys + offsets, places, dims, last, oldest, window, EDGES, HEAD_DIM, WIDTH)
        if key_scales is not None:
            by_token = _load_scales(key_scales, tokens, places, last, oldest, window, EDGES)
            scores = tl.dot(queries, tl.trans(key_tile)).to(tl.float32) * by_token[None, :]
        else:
            scores = tl.dot(queries, tl.trans(widen(key_tile, COMPUTE)), input_precision="ieee")
        if soft_cap is not None:
            if key_scales is not None:
                scores = tanh(scores * score_scale[:, None] + bias[:, None]) * (soft_cap * LOG2_E)
            else:
                scores = tanh(scores * score_scale) * (soft_cap * LOG2_E)
        if EDGES:
            visible = places[None, :] <= positions[:, None]
            if window is not None:
                visible = visible & (positions[:, None] - places[None, :] < window)
            scores = tl.where(visible, scores, float("-inf"))

        # The scale is positive, so it can be multiplied in after the maximum: one fused operation per score.
        if soft_cap is not None:
            new_largest = tl.maximum(largest, tl.max(scores, 1))
        else:
            new_largest = tl.maximum(largest, tl.max(scores, 1) * score_scale)
        base = new_largest
        if EDGES:
            # For a query that has seen no key yet: infinities must not be subtracted from each other.
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        if soft_cap is not None:
            weights = tl.exp2(scores - base[:, None])
        elif key_scales is not None:
            weights = tl.exp2(scores * score_scale[:, None] - base[:, None])
        else:
            weights = tl.exp2(scores * score_scale - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None]
        value_tile = _load_tile(values + offsets, places, dims, last, oldest, window, EDGES, HEAD_DIM, WIDTH)
        if value_scales is not None:
            weights *= _load_scales(value_scales, tokens, places, last, oldest, window, EDGES)[None, :]
        weighted = tl.dot(weights.to(COMPUTE), widen(value_tile, COMPUTE), weighted, input_precision="ieee")
        largest = new_largest
    return largest, total, weighted


@triton.jit
def _load_tile(
    at, places, dims, last, oldest, window, EDGES: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """Loads keys or values `[KEYS, WIDTH]`; none after the last key or before the oldest, which may be NaN: NaN times a
    weight of 0 is NaN."""
    if EDGES:
        held = (places < last)[:, None] & (dims < HEAD_DIM)[None, :]
        if window is not None:
            held = held & (places >= oldest)[:, None]
        return tl.load(at, mask=held, other=0.0)
    elif WIDTH == HEAD_DIM:
        return tl.load(at)
    else:
        return tl.load(at, mask=(dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _load_scales(scales, tokens, places, last, oldest, window, EDGES: tl.constexpr):
    """Loads scales of a tile's keys or values; 0 for those that no query sees, which may be NaN."""
    if EDGES:
        held = places < last
        if window is not None:
            held = held & (places >= oldest)
        return tl.load(scales + tokens, mask=held, other=0.0)
    else:
        return tl.load(scales + tokens)


@triton.jit
def scale_of_products(scale, key_scale, soft_cap, kv_head):
    """The factor by which `attend` multiplies products of queries and stored keys."""
    if key_scale is not None:
        scale = scale * tl.load(key_scale + kv_head)
    if soft_cap is not None:
        return scale / soft_cap
    else:
        return scale * LOG2_E


@triton.jit
def with_bias(largest, bias, soft_cap):
    """Adds the scores' common part `bias` (None for none), which `attend` leaves out without a cap, to its `largest`.
    Only a softmax with sinks depends on it; a cap applies to whole scores, which include it."""
    if bias is None or soft_cap is not None:
        return largest
    else:
        return largest + bias


@triton.jit
def load_pages(pages, start, last, PAGE_SIZE: tl.constexpr, KEYS: tl.constexpr):
    """Pages of the keys `start : start + KEYS`, at least of those before `last`; a scalar if one page has them all."""
    if PAGE_SIZE >= KEYS:
        return tl.load(pages + start // PAGE_SIZE, mask=start < last, other=0)
    else:
        places = start + tl.arange(0, KEYS)
        return tl.load(pages + places // PAGE_SIZE, mask=places < last, other=0)


@triton.jit
def merge_sums(largest, total, weighted, next_largest, next_total, next_weighted):
    """Merges the sums of `attend` over two runs of keys. Products are fused explicitly, so that kernels that merge the
    same runs round the same way, whatever the compiler would fuse."""
    together = tl.maximum(largest, next_largest)
    # For a query that sees no key of either: infinities must not be subtracted from each other.
    base = tl.where(together == float("-inf"), 0.0, together)
    keep, take = tl.exp2(largest - base), tl.exp2(next_largest - base)
    total = tl.fma(total, keep, next_total * take)
    weighted = tl.fma(weighted, keep[:, None], next_weighted * take[:, None])
    return together, total, weighted


@triton.jit
def with_sinks(largest, total, weighted, sinks):
    """Adds `sinks` `[M]`, scores in units of log2(e) without a value, to `total` and `weighted` of `attend`."""
    new_largest = tl.maximum(largest, sinks)
    shrink = tl.exp2(largest - new_largest)
    return total * shrink + tl.exp2(sinks - new_largest), weighted * shrink[:, None]


@triton.jit
def widen(stored, COMPUTE: tl.constexpr):
    """Stored keys or values as `COMPUTE`, exactly; bytes are those of float8 (e4m3)."""
    if stored.dtype == tl.uint8:
        # The same bits as float16 have an exponent bias of 15 instead of 7: smaller by a factor of 2^8. This holds for
        # subnormal numbers too; NaN, which no key is, would become 480.
        bits = stored.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return (half * 256.0).to(COMPUTE)
    elif stored.dtype == tl.float8e4nv:
        return stored.to(tl.float16).to(COMPUTE)
    else:
        return stored.to(COMPUTE)


@triton.jit
def tanh(x):
    """tanh with an absolute error of about 1e-7, enough for scores. Overflow and underflow give 1 and -1."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)
