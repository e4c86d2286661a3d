"""Compiles CPU kernels for a model and checks their results before they are used."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sglang_jax.errors import how_to_install
from torch_backend.attention.fixed import ChunksOnly, DecodeRowsOnly
from torch_backend.attention.interface import (
    AttentionImplementation,
    AttentionOptions,
    HeadForm,
    LatentForm,
    LatentHeads,
)
from torch_backend.attention.reference import ReferenceAttention
from torch_backend.batch import ForwardBatch
from torch_backend.kv_pages import LARGEST_INT8, KVForm, KVPages
from torch_backend.layers.bfloat16 import Bfloat16Products
from torch_backend.layers.blocks import BlockMatrices
from torch_backend.native_operations import NativeOperations
from torch_backend.operations import Operations, Rotation

if TYPE_CHECKING:
    from torch_backend.cpu_kernels.threads import OwnThreads

logger = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class CpuForm:
    """The dtypes and head sizes for which CPU kernels are compiled: `dtype` of activations, `kv_dtype` of keys and
    values, the heads of each kind of layer, and `latents` of those with latent attention. `int8_activations`: of
    products with matrices in blocks. `bfloat16_weights`: some matrices should stay in bfloat16, although activations
    are float32. `own_threads`: kernels compute nearly all, so torch's threads, which a second team would disturb, have
    little to do.
    """

    dtype: torch.dtype
    kv_dtype: torch.dtype
    heads: tuple[HeadForm, ...]
    int8_activations: bool = False
    bfloat16_weights: bool = False
    own_threads: bool = False
    latents: tuple[LatentForm, ...] = ()


@dataclass(frozen=True, slots=True)
class CpuKernels:
    """Operations and attention on a CPU, for use by one thread at a time."""

    operations: Operations
    attention: AttentionImplementation
    prompts: bool
    """Whether chunks have kernels too."""

    @property
    def fixed_attention(self) -> AttentionImplementation:
        """Attention in which a token's result does not depend on the other tokens of a step."""
        return ChunksOnly(self.attention) if self.prompts else DecodeRowsOnly(self.attention)


class CpuKernelsError(Exception):
    """CPU kernels are not available; the message gives the reason."""


def make_cpu_kernels(form: CpuForm, cache_folder: Path, threads: OwnThreads | None = None) -> CpuKernels:
    """Compiles the kernels, or loads them from `cache_folder`, and compares them with torch on a small step. To be
    called on the thread that will run the kernels. Raises `CpuKernelsError` if the form is not supported, or kernels
    cannot be compiled or compute wrong results."""
    sizes = sorted({heads.head_dim for heads in form.heads})
    if form.dtype not in _DTYPES or form.kv_dtype not in (form.dtype, torch.int8) or any(size % 2 for size in sizes):
        raise CpuKernelsError(
            "they support bfloat16 or float32, keys and values in the same type or int8, and heads of an even size, "
            f"not {form.dtype}, {form.kv_dtype} and {', '.join(map(str, sizes))}"
        )
    wrong = [f"{each.latent} + {each.rotary}" for each in form.latents if each.width % 32 or each.latent % 32]
    if wrong or (form.latents and form.kv_dtype is not form.dtype):
        vectors = f"latent vectors of {', '.join(wrong)} numbers" if wrong else f"latent vectors in {form.kv_dtype}"
        raise CpuKernelsError(f"they support latent vectors of multiples of 32 numbers in {form.dtype}, not {vectors}")
    if find_spec("numba") is None:
        raise CpuKernelsError(f"they need numba, which is not installed: {how_to_install('torch')}")
    start = time.perf_counter()
    kernels = _compile(form, cache_folder, threads)
    for what, found, expected in _results(kernels, form):
        allowed = 4 * torch.finfo(form.dtype).eps * (1 + float(expected.double().abs().max()))
        if not bool((found.double() - expected.double()).abs().max() <= allowed):
            raise CpuKernelsError(f"they compute wrong results on this machine ({what})")
    logger.info("CPU kernels for %s ready after %.1f s", form.dtype, time.perf_counter() - start)
    return kernels


def make_threads(form: CpuForm, cache_folder: Path) -> OwnThreads | None:
    """Threads for the kernels of a model, for use by one thread at a time; None to use those of torch's operations."""
    if not form.own_threads or torch.get_num_threads() == 1 or find_spec("numba") is None:
        return None
    from torch_backend.cpu_kernels.compiling import caching_compiler
    from torch_backend.cpu_kernels.threads import OwnThreads

    return OwnThreads(caching_compiler(cache_folder), torch.get_num_threads())


def make_block_matrices(form: CpuForm, cache_folder: Path, threads: OwnThreads | None = None) -> BlockMatrices | None:
    """The kernels of products with matrices in GGUF blocks, compiled at first use; None without numba, for other dtypes
    than bfloat16 and float32, and for activations as they are on a processor that does not multiply bfloat16."""
    if form.dtype not in _DTYPES or find_spec("numba") is None:
        return None
    # Imported here, because a machine with a GPU needs no numba.
    from sglang_jax.cpu_kernels import vectors
    from sglang_jax.cpu_kernels.byte_units import best_unit
    from torch_backend.cpu_kernels.block_matrix import BlockProducts
    from torch_backend.cpu_kernels.compiling import caching_compiler

    if form.int8_activations:
        return BlockProducts(caching_compiler(cache_folder), unit=best_unit(), dtype=form.dtype, threads=threads)
    if form.dtype is torch.bfloat16 and vectors.supported():
        return BlockProducts(caching_compiler(cache_folder), threads=threads)
    return None


def make_bfloat16_products(
    form: CpuForm, cache_folder: Path, threads: OwnThreads | None = None
) -> Bfloat16Products | None:
    """The products of matrices that stay in bfloat16; None if the form has none, without numba, and, with a log line,
    if they cannot be compiled or are wrong."""
    if not form.bfloat16_weights or find_spec("numba") is None:
        return None
    # Imported here, because a machine with a GPU needs no numba.
    from torch_backend.cpu_kernels.bfloat16_matrix import bfloat16_products
    from torch_backend.cpu_kernels.compiling import caching_compiler

    return bfloat16_products(caching_compiler(cache_folder), threads)


def _compile(form: CpuForm, cache_folder: Path, threads: OwnThreads | None) -> CpuKernels:
    # Imported here, because a machine with a GPU needs no numba.
    from numba.core.errors import NumbaError

    from torch_backend.attention.cpu import CpuAttention
    from torch_backend.attention.cpu_latents import CpuLatents
    from torch_backend.attention.cpu_prompts import CpuPrompts
    from torch_backend.cpu_kernels.compiling import caching_compiler
    from torch_backend.cpu_kernels.operations import CpuOperations

    compiler = caching_compiler(cache_folder)
    try:
        prompts = None
        if CpuPrompts.take(form.heads):
            prompts = CpuPrompts(compiler, form.dtype, form.heads, threads=threads, kv_dtype=form.kv_dtype)
        latents = CpuLatents(compiler, form.dtype, form.latents, threads=threads) if form.latents else None
        return CpuKernels(
            CpuOperations(compiler, form.dtype, {heads.head_dim for heads in form.heads}, threads),
            CpuAttention(compiler, form.dtype, form.heads, prompts, threads, form.kv_dtype, latents),
            prompts is not None,
        )
    except (NumbaError, OSError, RuntimeError) as error:  # LLVM fails with RuntimeError
        raise CpuKernelsError(f"numba cannot compile them ({error})") from error


def _results(kernels: CpuKernels, form: CpuForm) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yields the name of each comparison, the kernels' result and torch's. Inputs are large enough for threads."""
    generator = torch.Generator().manual_seed(0)
    native = NativeOperations()

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(form.dtype)

    x, residual, weight = numbers(64, 1024), numbers(64, 1024), numbers(1024)
    expected = native.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    found = kernels.operations.add_rms_norm(x, residual, weight, 1e-5)
    yield from zip(("norm", "sum"), found, expected, strict=True)
    for heads in form.heads:
        yield from _results_of_attention(kernels, form, heads, generator)
    for latents in form.latents:
        yield from _results_of_latents(kernels, form, latents, generator)


def _results_of_latents(
    kernels: CpuKernels, form: CpuForm, sizes: LatentForm, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Of a step with a decode row, and chunks."""
    page_size, lens, counts = 4, [70, 9, 30], [1, 9, 7]
    columns = -(-max(lens) // page_size)
    table = 1 + torch.randperm(len(lens) * columns, generator=generator).int().view(len(lens), columns)
    pages = KVPages.allocate(1 + table.numel(), 1, page_size, sizes.width, form.dtype, torch.device("cpu"), shared=True)
    pages.keys.copy_(torch.randn(pages.keys.shape, generator=generator))
    tokens = torch.zeros(sum(counts), dtype=torch.int32)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    batch = ForwardBatch(tokens, tokens, tokens.long(), table, torch.tensor(lens, dtype=torch.int32), starts, 1)
    up = (torch.randn(2, sizes.heads, 32, sizes.latent, generator=generator) * sizes.latent**-0.5).to(form.dtype)
    queries = torch.randn(len(tokens), sizes.heads, 32 + sizes.rotary, generator=generator).to(form.dtype)
    options = AttentionOptions(sizes.width**-0.5, latents=LatentHeads(up[0], up[1], None))
    found, expected = (
        each.prepare(batch)(queries, pages, options) for each in (kernels.attention, ReferenceAttention())
    )
    yield "latent attention", found, expected


def _random_pages(shape: tuple[int, int, int, int], form: CpuForm, generator: torch.Generator) -> list[KVPages]:
    """The same pages twice."""
    found = [KVPages.allocate(*shape, KVForm(form.kv_dtype, form.kv_dtype), torch.device("cpu")) for _ in range(2)]
    for side in range(2):
        numbers = torch.randn(shape, generator=generator)
        for pages in found:
            stored = pages.values if side else pages.keys
            if pages.token_scales is None:
                stored.copy_(numbers)
            else:
                of_tokens = pages.token_scales.values if side else pages.token_scales.keys
                assert of_tokens is not None
                of_tokens.copy_(numbers.abs().amax(-1) / LARGEST_INT8)
                stored.copy_((numbers / of_tokens[..., None]).round())
                pages.token_scales.key_mean.copy_(numbers[0, :, 0])
    return found


def _results_of_attention(
    kernels: CpuKernels, form: CpuForm, heads: HeadForm, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    native, head_dim = NativeOperations(), heads.head_dim

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(form.dtype)

    kv_heads, page_size = 2, 4
    lens = [1, 2**15 // (kv_heads * head_dim) + 5, 30]
    columns = -(-max(lens) // page_size)
    shape = (1 + len(lens) * columns, kv_heads, page_size, head_dim)
    kv, copy = _random_pages(shape, form, generator)
    pages = 1 + torch.randperm(len(lens) * columns, generator=generator).int().view(len(lens), columns)
    positions = torch.tensor(lens) - 1
    slots = pages.gather(1, (positions // page_size)[:, None])[:, 0].long() * page_size + positions % page_size
    angles = torch.rand((len(lens), head_dim // 2), generator=generator)
    rotation = Rotation(angles.cos(), angles.sin())
    qkv = numbers(len(lens), (heads.group + 2) * kv_heads * head_dim)
    queries = kernels.operations.rotate_and_write(qkv, rotation, None, kv, slots)
    yield "queries", queries, native.rotate_and_write(qkv, rotation, None, copy, slots)
    yield "keys", kv.keys, copy.keys
    yield "values", kv.values, copy.values

    options = AttentionOptions(scale=head_dim**-0.5)
    for what, counts in (("attention", [1] * len(lens)), ("attention of prompts", [1, 83, 30])):
        starts = [sum(counts[:number]) for number in range(len(counts) + 1)]
        batch = ForwardBatch(
            tokens=torch.zeros(starts[-1], dtype=torch.int32),
            positions=positions.int(),
            write_slots=slots,
            page_table=pages,
            kv_lens=torch.tensor(lens, dtype=torch.int32),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            num_decode=counts.count(1) if starts[-1] == len(lens) else 0,
        )
        queried = queries if batch.decode_only else numbers(starts[-1], *queries.shape[1:])
        attended = kernels.attention.prepare(batch)(queried, kv, options)
        yield what, attended, ReferenceAttention().prepare(batch)(queried, kv, options)
