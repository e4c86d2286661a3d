"""The gated activations of feed-forward layers (Shazeer 2020, "GLU variants improve transformer"): one kernel, compiled
for SiLU and for GELU (Hendrycks and Gimpel 2016) by the tanh approximation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_jax.architectures.kinds.feed_forward import Activation
from torch_backend.kernels.dependent_launch import after_previous

_BLOCK = 1024
_GELU_TANH = tl.constexpr(Activation.GELU_TANH.value)


@triton.jit
def _gated_kernel(gate_up, out, intermediate, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < intermediate
    start = gate_up + row * 2 * intermediate
    after_previous(DEPENDENT)
    gate = tl.load(start + lanes, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + intermediate + lanes, mask=inside, other=0.0).to(tl.float32)
    exponent = -gate
    if ACTIVATION == _GELU_TANH:
        # (1 + tanh(z)) / 2 is the sigmoid of 2 z, without cancellation; 1.5957691 is twice the root of 2 / pi.
        exponent = -1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    activated = gate / (1.0 + tl.exp(exponent)) * up
    tl.store(out + row * intermediate + lanes, activated.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor, dependent: bool = False) -> torch.Tensor:
    """`silu(gate) * up` of a contiguous `[T, 2 * intermediate]`, gate first: `[T, intermediate]`, in its dtype.
    `dependent`: the kernel starts while the one before it ends (`kernels.dependent_launch`)."""
    return _gated(gate_up, Activation.SILU, dependent)


def gelu_mul(gate_up: torch.Tensor, dependent: bool = False) -> torch.Tensor:
    """The same with `gelu(gate)`."""
    return _gated(gate_up, Activation.GELU_TANH, dependent)


def _gated(gate_up: torch.Tensor, activation: Activation, dependent: bool) -> torch.Tensor:
    rows, both = gate_up.shape
    if both % 2 or not gate_up.is_contiguous():
        raise ValueError(
            f"gate and up are {list(gate_up.shape)} with strides {list(gate_up.stride())}; "
            "wanted is a contiguous [T, 2 * intermediate]"
        )
    out = torch.empty((rows, both // 2), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(both // 2, _BLOCK))
        _gated_kernel[grid](
            gate_up,
            out,
            both // 2,
            ACTIVATION=activation.value,
            BLOCK=_BLOCK,
            DEPENDENT=dependent,
            num_warps=4,
            launch_pdl=dependent,
        )
    return out
