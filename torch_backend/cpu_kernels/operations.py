"""The fused operations of a decoder layer as CPU kernels."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sglang_jax.cpu_kernels import rms_norm, rotate_and_write
from sglang_jax.cpu_kernels.compiling import KernelCompiler
from torch_backend.cpu_kernels.team import Launcher
from torch_backend.cpu_kernels.threads import OwnThreads
from torch_backend.kv_pages import KVPages
from torch_backend.native_operations import NativeOperations
from torch_backend.operations import HeadNorms, Rotation
from torch_backend.parallel import TensorParallel


class CpuOperations:
    """Implements `torch_backend.operations.Operations` with compiled CPU kernels, for use by one thread at a time.
    `dtype`, bfloat16 or float32, of activations, weights and pages; `head_dims` of all layers, even; `threads`: see
    `Launcher`."""

    def __init__(
        self,
        compiler: KernelCompiler,
        dtype: torch.dtype,
        head_dims: Iterable[int],
        threads: OwnThreads | None = None,
    ) -> None:
        width = dtype.itemsize
        self._norm = Launcher(rms_norm.build_rms_norm(compiler, width), rms_norm.FIELDS, threads)
        self._rotate = {
            head_dim: Launcher(
                rotate_and_write.build_rotate_and_write(compiler, width, head_dim), rotate_and_write.FIELDS, threads
            )
            for head_dim in head_dims
        }
        self._dtype = dtype
        # For operations that are rarely called, because packed matrices fuse the activation; and for weights in another
        # dtype.
        self._native = NativeOperations()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = self._own(x)
        if weight.dtype is not self._dtype:
            return self._native.rms_norm(x, weight, eps)
        output = torch.empty_like(x)
        self._normalise(x, 0, weight, output, eps)
        return output

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Operations`; writes the norm into `x` and the sum into `residual`."""
        x, residual = self._own(x), self._own(residual)
        if weight.dtype is not self._dtype:
            return self._native.add_rms_norm(x, residual, weight, eps)
        self._normalise(x, residual.data_ptr(), weight, x, eps)
        return x, residual

    def all_reduce_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, parallel: TensorParallel
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.add_rms_norm(parallel.all_reduce(x), residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._native.silu_mul(gate_up)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._native.gelu_mul(gate_up)

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        kv: KVPages,
        write_slots: torch.Tensor,
    ) -> torch.Tensor:
        """See `Operations`. The pages have the dtype of `qkv`, or are int8, to which torch's operations round."""
        if kv.token_scales is not None:
            return self._native.rotate_and_write(qkv, rotation, norms, kv, write_slots)
        if not (kv.keys.is_contiguous() and kv.values.is_contiguous()):
            raise ValueError("pages must be contiguous: writes to a copy of them would be lost")
        qkv, keys, values = self._own(qkv), self._own(kv.keys), self._own(kv.values)
        if norms is not None and norms.query.dtype is not self._dtype:
            return self._native.rotate_and_write(qkv, rotation, norms, kv, write_slots)
        _, kv_heads, page_size, head_dim = keys.shape
        tokens, size = qkv.shape
        heads = size // head_dim - 2 * kv_heads
        queries = torch.empty((tokens, heads, head_dim), dtype=self._dtype)
        self._rotate[head_dim](
            tokens * size,
            tokens,
            qkv.data_ptr(),
            rotation.cosines.data_ptr(),
            rotation.sines.data_ptr(),
            queries.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            write_slots.data_ptr(),
            0 if norms is None else norms.query.data_ptr(),
            0 if norms is None else norms.key.data_ptr(),
            heads,
            kv_heads,
            page_size,
            0.0 if norms is None else norms.eps,
        )
        return queries

    def _normalise(
        self, x: torch.Tensor, residual: int, weight: torch.Tensor, output: torch.Tensor, eps: float
    ) -> None:
        size, hidden = x.numel(), weight.numel()
        rows = size // hidden
        items = -(-rows // rms_norm.ROWS)
        self._norm(size, items, x.data_ptr(), residual, weight.data_ptr(), output.data_ptr(), rows, hidden, eps)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The contiguous tensor. Raises `TypeError` for another dtype than the kernels'."""
        if tensor.dtype is not self._dtype:
            raise TypeError(f"CPU kernels made for {self._dtype} were given {tensor.dtype}")
        return tensor.contiguous()
