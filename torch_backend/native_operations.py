"""The fused operations of a layer in plain torch: for CPUs, and for whatever device has no kernels of its own."""

from __future__ import annotations

import torch
from torch.nn import functional

from torch_backend.kv_pages import KVPages
from torch_backend.operations import HeadNorms, Rotation

_FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max


class NativeOperations:
    """`Operations` without kernels."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `Operations`."""
        return functional.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Operations`. Writes the sum into `residual`."""
        residual += x
        return functional.rms_norm(residual, weight.shape, weight, eps), residual

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See `Operations`."""
        gate, up = gate_up.chunk(2, dim=-1)
        if gate_up.dtype == torch.float32:
            return functional.silu(gate) * up
        return (functional.silu(gate.float()) * up).to(gate_up.dtype)

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        kv: KVPages,
        write_slots: torch.Tensor,
    ) -> torch.Tensor:
        """See `Operations`."""
        kv_heads, page_size, head_dim = kv.keys.shape[1:]
        parts = qkv.view(qkv.shape[0], -1, head_dim)
        queries_and_keys = parts[:, :-kv_heads].float()
        if norms is not None:
            heads = parts.shape[1] - 2 * kv_heads
            weights = torch.cat((norms.query.expand(heads, -1), norms.key.expand(kv_heads, -1)))
            queries_and_keys = _head_norms(queries_and_keys, weights, norms.eps)
        rotated = rotate(queries_and_keys, rotation)
        pages, offsets = write_slots // page_size, write_slots % page_size
        _write(kv.keys, kv.key_scale, pages, offsets, rotated[:, -kv_heads:])
        _write(kv.values, kv.value_scale, pages, offsets, parts[:, -kv_heads:])
        return rotated[:, :-kv_heads].to(qkv.dtype, memory_format=torch.contiguous_format)


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotates float32 `x [T, heads, head_dim]`."""
    first, second = x.chunk(2, dim=-1)
    cosines, sines = rotation.cosines[:, None], rotation.sines[:, None]
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def _head_norms(x: torch.Tensor, weights: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weights


def _write(
    stored: torch.Tensor, scale: torch.Tensor | None, pages: torch.Tensor, offsets: torch.Tensor, data: torch.Tensor
) -> None:
    """Stores `data [T, kv_heads, head_dim]`, over its head's scale where there is one."""
    if scale is not None:
        data = (data.float() / scale[:, None]).clamp(-_FLOAT8_MAX, _FLOAT8_MAX)
    data = data.to(stored.dtype)
    if stored.dtype == torch.float8_e4m3fn:  # written as bytes: few devices index float8
        stored, data = stored.view(torch.uint8), data.contiguous().view(torch.uint8)
    stored.transpose(1, 2)[pages, offsets] = data
