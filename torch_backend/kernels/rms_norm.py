"""RMS norm of rows (Zhang and Sennrich 2019, "Root mean square layer normalization"), optionally after a sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torch_backend.kernels.dependent_launch import after_previous

_MAX_HIDDEN = 32_768


@triton.jit
def _rms_norm_kernel(x, weight, out, hidden, eps, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * hidden
    lanes = tl.arange(0, BLOCK)
    inside = lanes < hidden
    weights = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    after_previous(DEPENDENT)
    values = tl.load(x + row + lanes, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / hidden + eps)
    tl.store(out + row + lanes, (values * scale * weights).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm_kernel(x, residual, weight, hidden, eps, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * hidden
    lanes = tl.arange(0, BLOCK)
    inside = lanes < hidden
    weights = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    after_previous(DEPENDENT)
    values = tl.load(x + row + lanes, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(residual + row + lanes, mask=inside, other=0.0).to(tl.float32)
    # Rounded before the norm: the next layer adds to the rounded sum.
    rounded = values.to(residual.dtype.element_ty)
    tl.store(residual + row + lanes, rounded, mask=inside)
    values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / hidden + eps)
    tl.store(x + row + lanes, (values * scale * weights).to(x.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dependent: bool = False) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis of a contiguous `[T, hidden]`, in the dtype of `x`.
    `dependent`: the kernel starts while the one before it ends (`kernels.dependent_launch`)."""
    out = torch.empty_like(x)
    rows, hidden = _rows_and_hidden(x, weight)
    if rows:
        block = triton.next_power_of_2(hidden)
        _rms_norm_kernel[(rows,)](
            x,
            weight,
            out,
            hidden,
            eps,
            BLOCK=block,
            DEPENDENT=dependent,
            num_warps=_warps(block),
            launch_pdl=dependent,
        )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, dependent: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of `x + residual` and that sum, both contiguous `[T, hidden]`: written into `x` and `residual`."""
    rows, hidden = _rows_and_hidden(x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype or not residual.is_contiguous():
        raise ValueError(f"the residual is {_describe(residual)}; it must be contiguous and like x: {_describe(x)}")
    if rows:
        block = triton.next_power_of_2(hidden)
        _add_rms_norm_kernel[(rows,)](
            x,
            residual,
            weight,
            hidden,
            eps,
            BLOCK=block,
            DEPENDENT=dependent,
            num_warps=_warps(block),
            launch_pdl=dependent,
        )
    return x, residual


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
