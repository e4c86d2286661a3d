"""Products of int8 with int8: inputs are rounded with a scale per token, and sums are integers, exact in any order: a
row's result is the same, bit for bit, for any number of rows."""

from __future__ import annotations

import torch

from torch_backend.kernels.chip import Chip
from torch_backend.kernels.scaled_product import add_and_scale, multiply_and_scale
from torch_backend.rounded_rows import RoundedRows

_MAX_ROWS = 64
"""Maximum rows of the kernel. For more, torch's product is used, which needs at least 17 on a GPU."""


def integer_product(
    x: RoundedRows, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, chip: Chip
) -> torch.Tensor:
    """Multiplies `x [T, inputs]` in int8, as `kernels.rounding` rounds it, by int8 `values [outputs, inputs]`: `[T,
    outputs]` in the dtype of x. Values are contiguous; torch's product on a GPU needs sides that are multiples of 8.
    Sums are multiplied by the scale of a row and by `scales`, float32 `[outputs]`; `bias [outputs]` is added and the
    result rounded once. A row with a number that is not finite gives NaN."""
    rows = len(x)
    out = torch.empty((rows, len(values)), dtype=x.dtype, device=values.device)
    if not rows:
        return out
    if rows <= _MAX_ROWS:
        multiply_and_scale(x.values[:rows], x.scales, values, scales, bias, out, chip)
    else:
        sums = torch._int_mm(x.values, values.t())[:rows]
        add_and_scale(sums[None], x.scales, scales, bias, out, chip.dependent_launches)
    return out
