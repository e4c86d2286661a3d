"""Float8 numbers (e4m3 without infinities, Micikevicius et al. 2022, "FP8 formats for deep learning") as bytes. Triton
supports the type from compute capability 8.9 on. Integers work on every chip, with the same bits on all."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def encode_e4m3(x):
    """float32 to the nearest float8 e4m3, ties to even, as uint8; values beyond +-448 become +-448."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), 448.0)
    # Below 2^-6, numbers are multiples of 2^-9, and the addition of 2^14 leaves just these multiples in a float32.
    small = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    large = magnitude.to(tl.int32, bitcast=True)
    large = ((large + 0x7FFFF + ((large >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    code = tl.where(magnitude < 0.015625, small, large)
    return tl.where(x == x, sign | code, 0x7F).to(tl.uint8)
