"""RMS norm of rows (Zhang and Sennrich 2019, "Root mean square layer normalization"), optionally after a sum, and
optionally rounded to 8 bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torch_backend.kernels.dependent_launch import after_previous
from torch_backend.kernels.rounding import empty_rows, store_rounded
from torch_backend.rounded_rows import RoundedRows

_MAX_HIDDEN = 32_768


@triton.jit
def _rms_norm_kernel(x, weight, out, scales, hidden, eps, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < hidden
    weights = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    after_previous(DEPENDENT)
    values = tl.load(x + row * hidden + lanes, mask=inside, other=0.0).to(tl.float32)
    _store_norm(values, weights, x, out, scales, row, hidden, lanes, inside, eps)


@triton.jit
def _add_rms_norm_kernel(x, residual, weight, out, scales, hidden, eps, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < hidden
    weights = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    after_previous(DEPENDENT)
    values = tl.load(x + row * hidden + lanes, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(residual + row * hidden + lanes, mask=inside, other=0.0).to(tl.float32)
    # Rounded before the norm: the next layer adds to the rounded sum.
    rounded = values.to(residual.dtype.element_ty)
    tl.store(residual + row * hidden + lanes, rounded, mask=inside)
    _store_norm(rounded.to(tl.float32), weights, x, out, scales, row, hidden, lanes, inside, eps)


@triton.jit
def _store_norm(values, weights, x, out, scales, row, hidden, lanes, inside, eps):
    """Stores the norm of a row in the type of `x`, or with `scales` rounded to that of `out`."""
    factor = tl.rsqrt(tl.sum(values * values, 0) / hidden + eps)
    normed = (values * factor * weights).to(x.dtype.element_ty)
    if scales is None:
        tl.store(out + row * hidden + lanes, normed, mask=inside)
    else:
        store_rounded(normed.to(tl.float32), out, scales, row, hidden, lanes, inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dependent: bool = False) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis of a contiguous `[T, hidden]`, in the dtype of `x`.
    `dependent`: the kernel starts while the one before it ends (`kernels.dependent_launch`). Raises `ValueError` for
    other layouts and shapes."""
    out = torch.empty_like(x)
    _launch(x, None, weight, out, None, eps, dependent)
    return out


def rounded_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, values: torch.dtype, dependent: bool = False
) -> RoundedRows:
    """The same, then rounded to `values`, int8 or float8 (e4m3): see `Rounding`."""
    found = empty_rows(x, x.shape[1], values)
    _launch(x, None, weight, found.values, found.scales, eps, dependent)
    return found


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, dependent: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of `x + residual` and that sum, both contiguous `[T, hidden]`: written into `x` and `residual`. Raises
    `ValueError` for other layouts and shapes."""
    _launch(x, residual, weight, x, None, eps, dependent)
    return x, residual


def rounded_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    values: torch.dtype,
    dependent: bool = False,
) -> tuple[RoundedRows, torch.Tensor]:
    """The same, with the norm rounded to `values`, int8 or float8 (e4m3): see `Rounding`. `x` stays."""
    found = empty_rows(x, x.shape[1], values)
    _launch(x, residual, weight, found.values, found.scales, eps, dependent)
    return found, residual


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    eps: float,
    dependent: bool,
) -> None:
    rows, hidden = _rows_and_hidden(x, weight)
    if residual is not None and (
        residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_contiguous()
    ):
        raise ValueError(f"the residual is {_describe(residual)}; it must be contiguous and like x: {_describe(x)}")
    if not rows:
        return
    block = triton.next_power_of_2(hidden)
    options = {"BLOCK": block, "DEPENDENT": dependent, "num_warps": _warps(block), "launch_pdl": dependent}
    if residual is None:
        _rms_norm_kernel[(rows,)](x, weight, out, scales, hidden, eps, **options)
    else:
        _add_rms_norm_kernel[(rows,)](x, residual, weight, out, scales, hidden, eps, **options)


def _rows_and_hidden(x: torch.Tensor, weight: torch.Tensor) -> tuple[int, int]:
    rows, hidden = x.shape
    if not x.is_contiguous() or weight.shape != (hidden,) or hidden > _MAX_HIDDEN:
        raise ValueError(
            f"x is {_describe(x)} and the weight {_describe(weight)}; wanted are a contiguous [T, hidden] with "
            f"hidden <= {_MAX_HIDDEN}, and [hidden]"
        )
    return rows, hidden


def _describe(x: torch.Tensor) -> str:
    return f"{x.dtype} {list(x.shape)} with strides {list(x.stride())}"


def _warps(block: int) -> int:
    """Eight to sixteen values for each thread."""
    return max(1, min(32, block // 512))
