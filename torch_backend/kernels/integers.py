"""Quantises numbers to int8 with a scale, in registers, with torch's rounding."""

from __future__ import annotations

import triton
import triton.language as tl

_LARGEST = tl.constexpr(127.0)
_ROUNDER = tl.constexpr(12582912.0)
"""1.5 * 2**23: the float32 nearest to a number plus this one is an integer."""


@triton.jit
def scale_of(largest, total):
    """The scale of numbers with largest magnitude `largest` and sum `total`, which shows if any is not finite: NaN."""
    return tl.div_rn(largest + 0.0 * total, _LARGEST)


@triton.jit
def quantise(numbers, scale):
    """float32 `numbers` divided by `scale`, float32 of a shape that broadcasts to theirs, rounded to the nearest
    integer, ties to even: int8. Zeros for a scale of 0 and for NaN."""
    quotients = tl.div_rn(numbers, tl.where(scale == 0.0, 1.0, scale))
    whole = (quotients + _ROUNDER) - _ROUNDER
    return tl.where(whole == whole, whole, 0.0).to(tl.int8)


@triton.jit
def queries_as_integers(queries, key_mean):
    """Queries `[M, WIDTH]` in int8 with a scale for each, float32 `[M]`, and their products with the mean `[WIDTH]`
    that was subtracted from stored keys, float32 `[M]`."""
    wide = queries.to(tl.float32)
    scale = scale_of(tl.max(tl.abs(wide), 1), tl.sum(wide, 1))
    scale = tl.where(scale == 0.0, 1.0, scale)
    return quantise(wide, scale[:, None]), scale, tl.sum(wide * key_mean[None, :], 1)
