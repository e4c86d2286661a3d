"""CPU kernels for tests, compiled once for each form and kept from run to run as a server's are."""

from __future__ import annotations

import functools

import torch

from sglang_jax.config import EngineConfig
from sglang_jax.cpu_kernels.byte_units import best_unit
from sglang_jax.cpu_kernels.compiling import KernelCompiler
from torch_backend.attention.cpu import CpuAttention
from torch_backend.attention.cpu_prompts import CpuPrompts
from torch_backend.attention.interface import HeadForm
from torch_backend.cpu_kernels.block_matrix import BlockProducts
from torch_backend.cpu_kernels.compiling import caching_compiler
from torch_backend.cpu_kernels.operations import CpuOperations
from torch_backend.cpu_kernels.prompt_tiles import Products


@functools.cache
def cpu_attention(dtype: torch.dtype, *forms: HeadForm, prompts: Products | None = None) -> CpuAttention:
    """`prompts`: how a kernel for prompts multiplies; without it, torch computes them."""
    kernel = None if prompts is None else CpuPrompts(_compiler(), dtype, forms, prompts)
    return CpuAttention(_compiler(), dtype, forms, kernel)


@functools.cache
def cpu_operations(dtype: torch.dtype, *head_dims: int) -> CpuOperations:
    return CpuOperations(_compiler(), dtype, head_dims)


@functools.cache
def block_products() -> BlockProducts:
    return BlockProducts(_compiler())


@functools.cache
def integer_products(unit: int | None = None, dtype: torch.dtype = torch.bfloat16) -> BlockProducts:
    """Products of rows rounded to int8. `unit`: an index of `byte_units.UNITS`; None: the fastest of this processor."""
    return BlockProducts(_compiler(), unit=best_unit() if unit is None else unit, dtype=dtype)


def _compiler() -> KernelCompiler:
    return caching_compiler(EngineConfig().cache_folder())
