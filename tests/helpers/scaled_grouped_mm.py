"""`torch.nn.functional.scaled_grouped_mm` for rows of several matrices in float8, which torch has on GPUs only: the
checks of its GPU version, and sums in float64."""

from __future__ import annotations

import torch
from torch.nn.functional import ScalingType


def scaled_grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_recipe_a: ScalingType,
    scale_b: torch.Tensor,
    scale_recipe_b: ScalingType,
    *,
    offs: torch.Tensor,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """`mat_a [M, inputs]`, `mat_b [groups, inputs, outputs]` whose columns are contiguous, float32 `scale_a [M]` and
    `scale_b [groups, outputs]`, ends of groups int32 `offs [groups]` → bfloat16 `[M, outputs]`, NaN in the rows after
    the last group. Raises `ValueError` or `RuntimeError` for what a GPU refuses."""
    if (scale_recipe_a, scale_recipe_b) != (ScalingType.RowWise, ScalingType.RowWise):
        raise ValueError("No gemm implementation was found")
    if any(side % 16 for side in (mat_a.shape[-1], *mat_b.shape[-2:])):
        raise ValueError(f"shapes must be divisible by 16, got {list(mat_a.shape)} and {list(mat_b.shape)}")
    given = [each.to("meta") for each in (mat_a, mat_b, scale_a, scale_b, offs)]
    assert [each.stride() for each in given] == [each.stride() for each in (mat_a, mat_b, scale_a, scale_b, offs)]
    # The older operation has the same checks, and these on every device.
    out = torch._scaled_grouped_mm(*given[:4], offs=given[4], out_dtype=output_dtype)
    product = torch.full(out.shape, torch.nan, dtype=torch.float64)
    first = 0
    for group, last in enumerate(offs.tolist()):
        sums = mat_a[first:last].double() @ mat_b[group].double()
        product[first:last] = sums * scale_a[first:last, None].double() * scale_b[group].double()
        first = last
    return product.to(output_dtype)
