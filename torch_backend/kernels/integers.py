"""Numbers as whole numbers of 8 bits over a scale, in registers, as torch rounds them."""

from __future__ import annotations

import triton
import triton.language as tl

_LARGEST = tl.constexpr(127.0)
_ROUNDER = tl.constexpr(12582912.0)
"""1.5 * 2**23: the float32 next to a number plus this one is whole."""


@triton.jit
def scale_of(largest, total):
    """What numbers are to be divided by whose largest is `largest` by size, and whose sum is `total`: NaN where any of
    them is not finite, as a maximum alone would not tell."""
    return tl.div_rn(largest + 0.0 * total, _LARGEST)


@triton.jit
def levels(numbers, scale):
    """float32 `numbers` over `scale`, float32 of a shape that goes with theirs, to the nearest whole number, ties to
    even: int8. Zeros of a scale of 0 and of NaN."""
    quotients = tl.div_rn(numbers, tl.where(scale == 0.0, 1.0, scale))
    whole = (quotients + _ROUNDER) - _ROUNDER
    return tl.where(whole == whole, whole, 0.0).to(tl.int8)


@triton.jit
def queries_as_integers(queries, key_mean):
    """Queries `[M, WIDTH]` in int8 with the scale of each, float32 `[M]`, and their products with the mean `[WIDTH]`
    that stored keys are without, float32 `[M]`."""
    wide = queries.to(tl.float32)
    scale = scale_of(tl.max(tl.abs(wide), 1), tl.sum(wide, 1))
    scale = tl.where(scale == 0.0, 1.0, scale)
    return levels(wide, scale[:, None]), scale, tl.sum(wide * key_mean[None, :], 1)
