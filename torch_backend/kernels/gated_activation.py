"""The gated activations of feed-forward layers (Shazeer 2020, "GLU variants improve transformer"): one kernel, compiled
for SiLU and for GELU (Hendrycks and Gimpel 2016) by the tanh approximation; another one also rounds to 8 bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_jax.architectures.kinds.feed_forward import Activation
from torch_backend.kernels.dependent_launch import after_previous
from torch_backend.kernels.rounding import empty_rows, round_rows, store_rounded
from torch_backend.rounded_rows import RoundedRows

_BLOCK = 1024
_LARGEST_ROW = 16_384
"""Numbers of a row that a program holds to round them: 32 for each thread."""

_GELU_TANH = tl.constexpr(Activation.GELU_TANH.value)


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    """`activation(gate) * up` in float32."""
    exponent = -gate
    if ACTIVATION == _GELU_TANH:
        # (1 + tanh(z)) / 2 is the sigmoid of 2 z, without cancellation; 1.5957691 is twice the root of 2 / pi.
        exponent = -1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(exponent)) * up


@triton.jit
def activate_clamped(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """gpt-oss's gate (see `ClampedGate`) in float32."""
    gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))


@triton.jit
def _activated(gate_up, row, lanes, inside, intermediate, ACTIVATION: tl.constexpr):
    """Some numbers of a row, in the type of `gate_up`; 0 where not `inside`."""
    start = gate_up + row * 2 * intermediate
    gate = tl.load(start + lanes, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + intermediate + lanes, mask=inside, other=0.0).to(tl.float32)
    return activate(gate, up, ACTIVATION).to(gate_up.dtype.element_ty)


@triton.jit
def _gated_kernel(gate_up, out, intermediate, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < intermediate
    after_previous(DEPENDENT)
    activated = _activated(gate_up, row, lanes, inside, intermediate, ACTIVATION)
    tl.store(out + row * intermediate + lanes, activated, mask=inside)


@triton.jit
def _rounded_gated_kernel(
    gate_up, values, scales, intermediate, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < intermediate
    after_previous(DEPENDENT)
    activated = _activated(gate_up, row, lanes, inside, intermediate, ACTIVATION)
    store_rounded(activated.to(tl.float32), values, scales, row, intermediate, lanes, inside)


def silu_mul(gate_up: torch.Tensor, dependent: bool = False) -> torch.Tensor:
    """`silu(gate) * up` of a contiguous `[T, 2 * intermediate]`, gate first: `[T, intermediate]`, in its dtype.
    `dependent`: the kernel starts while the one before it ends (`kernels.dependent_launch`)."""
    return gated(gate_up, Activation.SILU, dependent)


def gelu_mul(gate_up: torch.Tensor, dependent: bool = False) -> torch.Tensor:
    """The same with `gelu(gate)`."""
    return gated(gate_up, Activation.GELU_TANH, dependent)


def gated(gate_up: torch.Tensor, activation: Activation, dependent: bool = False) -> torch.Tensor:
    """The same with either. Raises `ValueError` for other layouts and odd sizes."""
    rows, intermediate = _rows_and_intermediate(gate_up)
    out = torch.empty((rows, intermediate), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(intermediate, _BLOCK))
        _gated_kernel[grid](
            gate_up,
            out,
            intermediate,
            ACTIVATION=activation.value,
            BLOCK=_BLOCK,
            DEPENDENT=dependent,
            num_warps=4,
            launch_pdl=dependent,
        )
    return out


def rounded_gated(
    gate_up: torch.Tensor, activation: Activation, values: torch.dtype, dependent: bool = False
) -> RoundedRows:
    """The same, then rounded to `values`, int8 or float8 (e4m3): see `Rounding`. A second kernel rounds rows of more
    than 16,384 numbers."""
    rows, intermediate = _rows_and_intermediate(gate_up)
    if intermediate > _LARGEST_ROW:
        return round_rows(gated(gate_up, activation, dependent), values, dependent)
    found = empty_rows(gate_up, intermediate, values)
    if rows:
        block = triton.next_power_of_2(intermediate)
        _rounded_gated_kernel[(rows,)](
            gate_up,
            found.values,
            found.scales,
            intermediate,
            ACTIVATION=activation.value,
            BLOCK=block,
            DEPENDENT=dependent,
            num_warps=max(1, min(16, block // 512)),
            launch_pdl=dependent,
        )
    return found


def _rows_and_intermediate(gate_up: torch.Tensor) -> tuple[int, int]:
    rows, both = gate_up.shape
    if both % 2 or not gate_up.is_contiguous():
        raise ValueError(
            f"gate and up are {list(gate_up.shape)} with strides {list(gate_up.stride())}; "
            "wanted is a contiguous [T, 2 * intermediate]"
        )
    return rows, both // 2
