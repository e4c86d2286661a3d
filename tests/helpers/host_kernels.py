"""Host kernels for tests, compiled once for each form and kept from run to run as a server's are."""

from __future__ import annotations

import functools

import torch

from sglang_jax.config import EngineConfig
from torch_backend.attention.host import HostAttention
from torch_backend.host_kernels.compiling import KernelCompiler
from torch_backend.host_kernels.operations import HostOperations


@functools.cache
def host_attention(dtype: torch.dtype, head_dim: int, group: int) -> HostAttention:
    return HostAttention(_compiler(), dtype, head_dim, group)


@functools.cache
def host_operations(dtype: torch.dtype, head_dim: int) -> HostOperations:
    return HostOperations(_compiler(), dtype, head_dim)


def _compiler() -> KernelCompiler:
    return KernelCompiler.keeping(EngineConfig().cache_folder())
