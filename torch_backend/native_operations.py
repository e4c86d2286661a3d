"""Fused operations of a layer in plain torch, for CPUs and devices without kernels."""

from __future__ import annotations

import functools
from functools import partial

import torch
from torch.nn import functional

from torch_backend.elementwise import evenly
from torch_backend.kv_pages import LARGEST_INT8, KVPages
from torch_backend.operations import HeadNorms, Rotation
from torch_backend.parallel import TensorParallel

_FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max


class NativeOperations:
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return normalise(x.to(torch.float32, copy=True), weight, eps).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Operations`. Writes the sum into `residual`."""
        residual += x
        return self.rms_norm(residual, weight, eps), residual

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, parallel: TensorParallel
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.add_rms_norm(parallel.all_reduce(x), residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate.float()).mul_(up).to(gate_up.dtype)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.gelu(gate.float(), approximate="tanh").mul_(up).to(gate_up.dtype)

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        kv: KVPages,
        write_slots: torch.Tensor,
    ) -> torch.Tensor:
        kv_heads, page_size, head_dim = kv.keys.shape[1:]
        parts = qkv.view(qkv.shape[0], -1, head_dim)
        heads = parts.shape[1] - 2 * kv_heads
        to_rotate = parts.narrow(1, 0, heads + kv_heads).to(torch.float32, copy=True)
        if norms is not None:
            weights = torch.cat((norms.query.expand(heads, -1), norms.key.expand(kv_heads, -1)))
            to_rotate = normalise(to_rotate, weights, norms.eps)
        rotated = rotate(to_rotate, rotation)
        slots = (write_slots // page_size, write_slots % page_size)
        keys, values = rotated.narrow(1, heads, kv_heads), parts.narrow(1, heads + kv_heads, kv_heads)
        scales = kv.token_scales
        if scales is None:
            _write(kv.keys, kv.key_scale, slots, keys)
        else:
            _write_integers(kv.keys, scales.keys, slots, keys - scales.key_mean)
        if scales is None or scales.values is None:
            _write(kv.values, kv.value_scale, slots, values)
        else:
            _write_integers(kv.values, scales.values, slots, values.float())
        return rotated.narrow(1, 0, heads).to(qkv.dtype).contiguous()


class EvenOperations(NativeOperations):
    """The same, where a token's result does not depend on its place in the step: see `evenly`."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return evenly(functional.silu, gate.float()).mul_(up).to(gate_up.dtype)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return evenly(partial(functional.gelu, approximate="tanh"), gate.float()).mul_(up).to(gate_up.dtype)


def normalise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of float32 `x` over its last axis, in place."""
    return divide_by_rms(x, eps).mul_(weight)


def divide_by_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Divides float32 `x` by the root mean square of its last axis, in place."""
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scales = torch.addcmul(_scalar(eps, x.device), norms, norms, value=1 / x.shape[-1]).rsqrt_()
    return x.mul_(scales)


@functools.cache
def _scalar(value: float, device: torch.device) -> torch.Tensor:
    return torch.tensor(value, device=device)


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotates float32 `x [T, heads, head_dim]`, in place."""
    cosines, sines = rotation.of_whole_heads
    swapped = x.roll(x.shape[-1] // 2, -1)
    return x.mul_(cosines).addcmul_(swapped, sines)


def _write(
    stored: torch.Tensor, scale: torch.Tensor | None, slots: tuple[torch.Tensor, torch.Tensor], data: torch.Tensor
) -> None:
    """Stores `data [T, kv_heads, head_dim]` at (page, offset), divided by its head's scale if there is one."""
    if scale is not None:
        # Older versions of torch convert values beyond the largest float8 to NaN.
        scaled = (data.float() / scale[:, None]).clamp(-_FLOAT8_MAX, _FLOAT8_MAX)
        # Written as bytes, because few devices index float8.
        data = scaled.to(stored.dtype).view(torch.uint8)
        stored = stored.view(torch.uint8)
    if data.dtype != stored.dtype:
        data = data.to(stored.dtype)
    stored.transpose(1, 2).index_put_(slots, data)


def _write_integers(
    stored: torch.Tensor, scales: torch.Tensor, slots: tuple[torch.Tensor, torch.Tensor], data: torch.Tensor
) -> None:
    """Stores float32 `data [T, kv_heads, head_dim]` at (page, offset) in int8, with a scale for each token and head.
    Data that is not finite gets a scale of NaN, so that reads of it are not finite either."""
    scale = (data.abs().amax(-1) + 0.0 * data.sum(-1)) / LARGEST_INT8
    levels = torch.round(data / torch.where(scale == 0.0, 1.0, scale)[..., None])
    stored.transpose(1, 2).index_put_(slots, levels.nan_to_num(0.0).to(torch.int8))
    scales.transpose(1, 2).index_put_(slots, scale)
