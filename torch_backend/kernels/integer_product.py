"""Products of int8 with int8: inputs are rounded with a scale per token, and sums are integers, exact in any order: a
row's result is the same, bit for bit, for any number of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torch_backend.kernels.chip import Chip
from torch_backend.kernels.dependent_launch import after_previous
from torch_backend.kernels.integers import quantise, scale_of
from torch_backend.kernels.scaled_product import add_and_scale, multiply_and_scale

_MAX_ROWS = 64
"""Maximum rows of the kernel. For more, torch's product is used, which needs at least 17 on a GPU."""

_MULTIPLE = 32
"""Divisor of the rows of torch's product: cuBLAS has been seen to refuse odd numbers of rows."""

_LARGEST_BLOCK = 8192
"""Values of a token that a program has at a time: 32 for each thread."""


def integer_product(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, chip: Chip
) -> torch.Tensor:
    """Multiplies `x [T, inputs]`, rounded to int8, by int8 `values [outputs, inputs]`: `[T, outputs]` in the dtype of
    x. Both are contiguous; torch's product on a GPU needs sides of values that are multiples of 8. Sums are multiplied
    by the scale of a token and by `scales`, float32 `[outputs]`; `bias [outputs]` is added and the result rounded once.
    A token with a value that is not finite gives NaN."""
    rows = len(x)
    out = torch.empty((rows, len(values)), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    if rows <= _MAX_ROWS:
        rounded, of_tokens = round_tokens(x, rows, chip.dependent_launches)
        multiply_and_scale(rounded, of_tokens, values, scales, bias, out, chip)
    else:
        rounded, of_tokens = round_tokens(x, _MULTIPLE * triton.cdiv(rows, _MULTIPLE), chip.dependent_launches)
        sums = torch._int_mm(rounded, values.t())[:rows]
        add_and_scale(sums[None], of_tokens, scales, bias, out, chip.dependent_launches)
    return out


def round_tokens(x: torch.Tensor, room: int, dependent: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds a contiguous `x [T, inputs]` to int8 `[room, inputs]`, undefined after row T, with a scale per token,
    float32 `[T]`: its largest magnitude over 127. Rounds to nearest, ties to even. A token of zeros has scale 0; one
    with a value that is not finite has zeros and scale NaN. `dependent`: see `kernels.dependent_launch`."""
    rows, inputs = x.shape
    rounded = torch.empty((room, inputs), dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = min(triton.next_power_of_2(inputs), _LARGEST_BLOCK)
    round_token[(rows,)](
        x,
        rounded,
        scales,
        inputs,
        BLOCK=block,
        DEPENDENT=dependent,
        num_warps=max(1, min(8, block // 512)),
        launch_pdl=dependent,
    )
    return rounded, scales


@triton.jit
def round_token(x, rounded, scales, inputs, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """One program per token, which it reads twice."""
    row = tl.program_id(0).to(tl.int64)
    after_previous(DEPENDENT)
    largest = tl.zeros([BLOCK], tl.float32)
    zeros = tl.zeros([BLOCK], tl.float32)
    for start in range(0, inputs, BLOCK):
        place = start + tl.arange(0, BLOCK)
        numbers = tl.load(x + row * inputs + place, mask=place < inputs, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(numbers))
        zeros += 0.0 * numbers
    scale = scale_of(tl.max(largest, 0), tl.sum(zeros, 0))
    tl.store(scales + row, scale)
    for start in range(0, inputs, BLOCK):
        place = start + tl.arange(0, BLOCK)
        numbers = tl.load(x + row * inputs + place, mask=place < inputs, other=0.0).to(tl.float32)
        tl.store(rounded + row * inputs + place, quantise(numbers, scale), mask=place < inputs)
