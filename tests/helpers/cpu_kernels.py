"""CPU kernels for tests, compiled once for each form and kept from run to run as a server's are."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_jax.config import EngineConfig
from sglang_jax.cpu_kernels.bfloat16_tiles import FloatVectors
from sglang_jax.cpu_kernels.byte_units import best_unit
from sglang_jax.cpu_kernels.compiling import KernelCompiler
from sglang_jax.cpu_kernels.prompt_tiles import Products
from torch_backend.attention.cpu import CpuAttention
from torch_backend.attention.cpu_latents import CpuLatents
from torch_backend.attention.cpu_prompts import CpuPrompts
from torch_backend.attention.interface import HeadForm, LatentForm
from torch_backend.cpu_kernels.bfloat16_matrix import CpuBfloat16Products
from torch_backend.cpu_kernels.block_matrix import BlockProducts
from torch_backend.cpu_kernels.compiling import caching_compiler
from torch_backend.cpu_kernels.operations import CpuOperations
from torch_backend.cpu_kernels.recording import RecordedLayers
from torch_backend.cpu_kernels.threads import OwnThreads


@functools.cache
def cpu_attention(
    dtype: torch.dtype,
    *forms: HeadForm,
    prompts: Products | None = None,
    kv_dtype: torch.dtype | None = None,
    latents: tuple[LatentForm, ...] = (),
) -> CpuAttention:
    """`prompts`: how a kernel for prompts multiplies; without it, torch computes them."""
    vectors = cpu_latents(dtype, *latents) if latents else None
    kernel = None if prompts is None else CpuPrompts(_compiler(), dtype, forms, prompts, kv_dtype=kv_dtype)
    return CpuAttention(_compiler(), dtype, forms, kernel, kv_dtype=kv_dtype, latents=vectors)


@functools.cache
def cpu_latents(dtype: torch.dtype, *forms: LatentForm, products: Products | None = None) -> CpuLatents:
    return CpuLatents(_compiler(), dtype, forms, products)


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


@functools.cache
def bfloat16_products(vectors: FloatVectors | None = None) -> CpuBfloat16Products:
    """Products with matrices of bfloat16. `vectors`: by default those of this processor."""
    return CpuBfloat16Products(_compiler(), vectors=vectors)


@dataclass(frozen=True, slots=True)
class ThreadedKernels:
    """All kernels of a model in blocks, with separate threads, as the Torch backend builds them."""

    attention: CpuAttention
    operations: CpuOperations
    block_matrices: BlockProducts
    recordings: RecordedLayers | None

    @classmethod
    def of(cls, dtype: torch.dtype, forms: Sequence[HeadForm], *, recorded: bool) -> ThreadedKernels:
        compiler, threads = _compiler(), OwnThreads(_compiler(), 2)
        head_dims = dict.fromkeys(form.head_dim for form in forms)
        return cls(
            CpuAttention(compiler, dtype, forms, CpuPrompts(compiler, dtype, forms, threads=threads), threads),
            CpuOperations(compiler, dtype, head_dims, threads),
            BlockProducts(compiler, unit=best_unit(), dtype=dtype, threads=threads),
            RecordedLayers(threads) if recorded else None,
        )


def _compiler() -> KernelCompiler:
    return caching_compiler(EngineConfig().cache_folder())
