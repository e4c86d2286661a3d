"""Products of int8 with int8: inputs are rounded by a scale of each token, sums are whole numbers.

Sums are exact, whoever adds them up in whatever order: a row's result is the same, bit for bit, for any number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torch_backend.kernels.chip import Chip
from torch_backend.kernels.dependent_launch import after_previous
from torch_backend.kernels.integers import levels, scale_of
from torch_backend.kernels.scaled_product import add_and_scale, multiply_and_scale

_MOST_ROWS = 64
"""Of the kernel. More are for torch's product, which on a GPU takes 17 and more."""

_LARGEST_BLOCK = 8192
"""Numbers of a token that a program has at a time: 32 for each thread."""


def integer_product(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, chip: Chip
) -> torch.Tensor:
    """`x [T, inputs]`, rounded to int8, times int8 `values [outputs, inputs]`: `[T, outputs]` in the type of x. Both
    are contiguous; torch's product on a GPU wants sides of values that are multiples of 8. Sums are multiplied by the
    scale of a token and by `scales`, float32 `[outputs]`; `bias [outputs]` is added and the number rounded once. A
    token with a number that is not finite gives NaN."""
    rows = len(x)
    out = torch.empty((rows, len(values)), dtype=x.dtype, device=x.device)
    if not rows:
        return out
    rounded, of_tokens = round_tokens(x, chip.dependent_launches)
    if rows <= _MOST_ROWS:
        multiply_and_scale(rounded, of_tokens, values, scales, bias, out, chip)
    else:
        sums = torch._int_mm(rounded, values.t())
        add_and_scale(sums[None], of_tokens, scales, bias, out, chip.dependent_launches)
    return out


def round_tokens(x: torch.Tensor, dependent: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """A contiguous `x [T, inputs]` as int8, and the scale of each token, float32 `[T]`: its largest number over 127. To
    nearest, ties to even. A token of zeros has scale 0; one with a number that is not finite has zeros and NaN.

    **Arguments:** `dependent`: the kernel starts while the one before it ends (`kernels.dependent_launch`).
    """
    rows, inputs = x.shape
    rounded = torch.empty((rows, inputs), dtype=torch.int8, device=x.device)
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
    """A program for each token, which it reads twice."""
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
        tl.store(rounded + row * inputs + place, levels(numbers, scale), mask=place < inputs)
