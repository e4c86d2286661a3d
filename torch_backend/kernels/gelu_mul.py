"""The gated activation of Gemma's feed-forward layers: GELU (Hendrycks and Gimpel 2016) by tanh's approximation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _gelu_mul_kernel(gate_up, out, intermediate, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < intermediate
    start = gate_up + row * 2 * intermediate
    gate = tl.load(start + lanes, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + intermediate + lanes, mask=inside, other=0.0).to(tl.float32)
    # (1 + tanh(z)) / 2 is the sigmoid of 2 z, of which nothing cancels; 1.5957691 is twice the root of 2 / pi.
    activated = gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))) * up
    tl.store(out + row * intermediate + lanes, activated.to(out.dtype.element_ty), mask=inside)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up` of a contiguous `[T, 2 * intermediate]`, gate first: `[T, intermediate]`, in its type."""
    rows, both = gate_up.shape
    if both % 2 or not gate_up.is_contiguous():
        raise ValueError(
            f"gate and up are {list(gate_up.shape)} with strides {list(gate_up.stride())}; "
            "wanted is a contiguous [T, 2 * intermediate]"
        )
    out = torch.empty((rows, both // 2), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, triton.cdiv(both // 2, _BLOCK))
        _gelu_mul_kernel[grid](gate_up, out, both // 2, BLOCK=_BLOCK, num_warps=4)
    return out
