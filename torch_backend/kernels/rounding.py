"""Rounds rows to int8 or float8 (e4m3), with a scale for each row, in registers or in a kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torch_backend.kernels.dependent_launch import after_previous
from torch_backend.kernels.integers import quantise, scale_of
from torch_backend.rounded_rows import RoundedRows

_MULTIPLES = {torch.int8: 32, torch.float8_e4m3fn: 1}
"""Divisors of the rows of values: cuBLAS has been seen to refuse odd numbers of rows of int8."""

_LARGEST_BLOCK = 8192
"""Numbers of a row that a program has at a time: 32 for each thread."""

_LARGEST_FLOAT8 = tl.constexpr(448.0)
_SMALLEST_SCALE = tl.constexpr(2.0**-126)


@triton.jit
def _scale_of(largest, total, values):
    """As `integers.scale_of`, for the type of `values`: at least the smallest normal number for float8."""
    if values.dtype.element_ty == tl.int8:
        return scale_of(largest, total)
    scale = tl.div_rn(largest + 0.0 * total, _LARGEST_FLOAT8)
    return tl.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale)


@triton.jit
def _rounded(numbers, scale, values):
    """float32 `numbers` over `scale`, rounded to the type of `values`, ties to even."""
    if values.dtype.element_ty == tl.int8:
        return quantise(numbers, scale)
    return tl.div_rn(numbers, scale).to(values.dtype.element_ty)


@triton.jit
def store_rounded(numbers, values, scales, row, columns, lanes, inside):
    """Rounds a row `numbers`, float32, 0 where not `inside`, and stores it in `values [rows, columns]` and `scales`."""
    scale = _scale_of(tl.max(tl.abs(numbers), 0), tl.sum(0.0 * numbers, 0), values)
    tl.store(scales + row, scale)
    tl.store(values + row * columns + lanes, _rounded(numbers, scale, values), mask=inside)


def empty_rows(x: torch.Tensor, columns: int, values: torch.dtype) -> RoundedRows:
    """Memory for as many rows as `x [T, ...]` has, of `columns` numbers, in int8 or float8."""
    room = _MULTIPLES[values] * triton.cdiv(len(x), _MULTIPLES[values])
    return RoundedRows(
        torch.empty((room, columns), dtype=values, device=x.device),
        torch.empty(len(x), dtype=torch.float32, device=x.device),
        x.dtype,
    )


def round_rows(x: torch.Tensor, values: torch.dtype, dependent: bool = False) -> RoundedRows:
    """Rounds a contiguous `x [T, n]` to int8 or float8, to nearest, ties to even: see `Rounding`. A row of zeros has
    scale 0 in int8. `dependent`: see `kernels.dependent_launch`."""
    if not x.is_contiguous():
        raise ValueError(f"x is {list(x.shape)} with strides {list(x.stride())}; wanted is a contiguous [T, n]")
    rows, columns = x.shape
    found = empty_rows(x, columns, values)
    if rows:
        block = min(triton.next_power_of_2(columns), _LARGEST_BLOCK)
        round_row[(rows,)](
            x,
            found.values,
            found.scales,
            columns,
            BLOCK=block,
            DEPENDENT=dependent,
            num_warps=max(1, min(8, block // 512)),
            launch_pdl=dependent,
        )
    return found


@triton.jit
def round_row(x, values, scales, columns, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """One program per row, which it reads twice."""
    row = tl.program_id(0).to(tl.int64)
    after_previous(DEPENDENT)
    largest = tl.zeros([BLOCK], tl.float32)
    zeros = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        place = start + tl.arange(0, BLOCK)
        numbers = tl.load(x + row * columns + place, mask=place < columns, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(numbers))
        zeros += 0.0 * numbers
    scale = _scale_of(tl.max(largest, 0), tl.sum(zeros, 0), values)
    tl.store(scales + row, scale)
    for start in range(0, columns, BLOCK):
        place = start + tl.arange(0, BLOCK)
        numbers = tl.load(x + row * columns + place, mask=place < columns, other=0.0).to(tl.float32)
        tl.store(values + row * columns + place, _rounded(numbers, scale, values), mask=place < columns)
