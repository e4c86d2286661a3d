"""Compiles attention for CPUs, registers it with XLA's CPU backend, and compares its results."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sglang_jax.errors import how_to_install
from sglang_jax.jax_runner.parallel import TensorParallel
from sglang_jax.jax_runner.xla_targets import register
from sglang_jax.kernels.ragged_paged_attention import AttentionOptions
from sglang_jax.kernels.ragged_paged_attention.cpu import (
    CpuAttention,
    CpuKernel,
    CpuLatents,
    CpuPrompts,
    HeadForm,
    LatentForm,
)
from sglang_jax.layers.batch import ForwardBatch
from sglang_jax.layers.platform import PlatformLayout
from sglang_jax.runner.this_machine import cpu_cores

logger = logging.getLogger(__name__)

_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))
_QUERY_WIDTH = 4
_MAX_ERROR = {2: 2e-2, 4: 1e-5}
"""Of results whose largest are about 1, by the width of keys: products of prompts take bfloat16."""
_DECODED, _MIXED = ((1, 300, 70), (1, 1, 1)), ((200, 100, 150), (1, 83, 150))
"""Lengths, and numbers of queries, with work for several threads; the first are decode rows."""
_LATENTS = ((70, 9, 40), (1, 9, 7))
_PAGE_SIZE = 16


def missing_for_kernels(kv_dtype: jnp.dtype, parallel: TensorParallel, *, fixed: bool) -> str | None:
    """What kernels of attention need on a CPU and do not have; None if nothing. `fixed`: a token's result must be the
    same bits, whether it is decoded or in a chunk."""
    if kv_dtype not in _DTYPES:
        return f"keys and values in bfloat16 or float32, got {kv_dtype.name}"
    if parallel.size > 1:
        return f"one device, got tp_size {parallel.size}"
    if fixed or parallel.num_shards is not None:
        return "a model without options for equal results in any step"
    if find_spec("numba") is None:
        return f"numba, which is not installed: {how_to_install('jax', 'cpu')}"
    return None


@functools.cache
def cpu_attention(
    form: HeadForm | LatentForm, *, kv_dtype: jnp.dtype, cache_folder: Path | None
) -> CpuAttention | CpuLatents | None:
    """The kernels for attention of a form, and keys and values of `kv_dtype`, bfloat16 or float32; compiled, or loaded
    from `cache_folder` if given. None, with a log line, if they do not support the form, cannot be compiled, if this
    jaxlib does not accept them, or if their results are wrong."""
    from numba.core.errors import NumbaError

    from sglang_jax.cpu_kernels.prompt_attention import supported_head_dim

    start = time.perf_counter()
    what = f"{form} and {kv_dtype.name}"
    if isinstance(form, LatentForm) and not (supported_head_dim(form.width) and supported_head_dim(form.latent)):
        logger.info("XLA's operations compute attention of %s: kernels take multiples of 32 numbers", what)
        return None
    try:
        kernels, error = _checked(form, kv_dtype, cache_folder)
    except (NumbaError, OSError, RuntimeError) as failed:  # LLVM and XLA raise RuntimeError
        logger.warning("XLA's operations compute attention of %s: XLA cannot call kernels (%s)", what, failed)
        return None
    if not error <= _MAX_ERROR[kv_dtype.itemsize]:
        logger.warning(
            "XLA's operations compute attention of %s: the kernels compute wrong results on this machine", what
        )
        return None
    logger.info("CPU kernels of attention for %s ready after %.1f s", what, time.perf_counter() - start)
    return kernels


def _checked(
    form: HeadForm | LatentForm, kv_dtype: jnp.dtype, cache_folder: Path | None
) -> tuple[CpuAttention | CpuLatents, float]:
    """Registered kernels, and the largest error of small steps."""
    if isinstance(form, LatentForm):
        latents = _register_latents(form, kv_dtype.itemsize, cache_folder)
        return latents, _error_of_latents(latents, form, kv_dtype)
    kernels = _register(form.head_dim, form.group, kv_dtype.itemsize, cache_folder)
    steps = (_DECODED,) if kernels.prompts is None else (_DECODED, _MIXED)
    return kernels, max(_error(kernels, form.head_dim, form.group, kv_dtype, *step) for step in steps)


def _register_latents(form: LatentForm, width: int, cache_folder: Path | None) -> CpuLatents:
    """See `_register`."""
    from sglang_jax.cpu_kernels.compiling import CompiledKernel, KernelCompiler, version_of_kernels
    from sglang_jax.cpu_kernels.prompt_attention import (
        build_prompt_attention,
        heads_of_item,
        scratch_bytes,
        tokens_of_item,
    )
    from sglang_jax.cpu_kernels.prompt_tiles import Products
    from sglang_jax.cpu_kernels.xla_attention import build_latent_call

    compiler = KernelCompiler(None) if cache_folder is None else KernelCompiler.keeping(cache_folder)
    products, groups = Products.of(width), heads_of_item(form.heads)
    sizes = f"{form.heads}_{form.latent}_{form.rotary}_{width}_{version_of_kernels()}"
    name, names = f"latent_attention_{sizes}", tuple(f"latent_attention_{group}_of_{sizes}" for group in groups)

    def build() -> CompiledKernel:
        kernels = tuple(
            build_prompt_attention(compiler, products, width, form.width, group, _QUERY_WIDTH, form.latent)
            for group in groups
        )
        return build_latent_call(compiler, names, kernels, groups)

    register(name, build)
    words = max(-(-scratch_bytes(products, form.width, group, form.latent) // 4) for group in groups)
    return CpuLatents(CpuKernel(name, words), tokens_of_item(groups[0]), form.heads // groups[-1], len(cpu_cores()))


def _error_of_latents(kernels: CpuLatents, form: LatentForm, kv_dtype: jnp.dtype) -> float:
    """The largest error of a step with decode rows and chunks, against float64."""
    generator, (lens, counts) = np.random.default_rng(0), _LATENTS
    batch = _batch(lens, counts, generator)
    pages = generator.standard_normal((1 + batch.page_table.size, 1, 1, _PAGE_SIZE, form.width)).astype(kv_dtype)
    queries = generator.standard_normal((sum(counts), form.heads, form.width)).astype(kv_dtype)
    stored, scale = pages.view(PlatformLayout.of("cpu").kv_storage(kv_dtype)), form.width**-0.5
    run = jax.jit(partial(kernels, scale=scale, options=AttentionOptions(value_dim=form.latent)))
    with jax.default_device(jax.devices("cpu")[0]):
        found = np.asarray(run(queries.astype(np.float32), stored, batch))
    exact, asked, errors = pages[:, 0, 0].astype(np.float64), queries.astype(np.float64), []
    for length, count, start, own in zip(lens, counts, batch.query_starts, batch.page_table, strict=False):
        keys, mine = exact[own].reshape(-1, form.width)[:length], slice(start, start + count)
        scores = np.einsum("qhd,kd->hqk", asked[mine], keys) * scale
        scores[:, np.arange(length) > np.arange(length - count, length)[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        expected = np.einsum("hqk,kd->qhd", weights, keys[:, : form.latent])
        errors.append(np.abs(found[mine] - expected).max())
    return float(np.max(errors))


def _register(head_dim: int, group: int, width: int, cache_folder: Path | None) -> CpuAttention:
    """Registers the kernels with XLA, by names that contain the version of all kernels."""
    from sglang_jax.cpu_kernels.compiling import CompiledKernel, KernelCompiler, version_of_kernels
    from sglang_jax.cpu_kernels.decode_attention import build_decode_attention, scratch_floats
    from sglang_jax.cpu_kernels.prompt_attention import (
        build_prompt_attention,
        scratch_bytes,
        supported_head_dim,
        tokens_of_item,
    )
    from sglang_jax.cpu_kernels.prompt_tiles import Products
    from sglang_jax.cpu_kernels.xla_attention import build_decode_call, build_prompt_call

    compiler = KernelCompiler(None) if cache_folder is None else KernelCompiler.keeping(cache_folder)
    form = f"{head_dim}_{group}_{width}_{version_of_kernels()}"
    decode, prompt, products = f"decode_attention_{form}", f"prompt_attention_{form}", Products.of(width)

    def build_decode() -> CompiledKernel:
        kernel = build_decode_attention(compiler, width, head_dim, group, _QUERY_WIDTH)
        return build_decode_call(compiler, decode, kernel, width)

    def build_prompt() -> CompiledKernel:
        kernel = build_prompt_attention(compiler, products, width, head_dim, group, _QUERY_WIDTH)
        return build_prompt_call(compiler, prompt, kernel, width, group)

    register(decode, build_decode)
    prompts = None
    if supported_head_dim(head_dim):
        register(prompt, build_prompt)
        words = -(-scratch_bytes(products, head_dim, group) // 4)
        prompts = CpuPrompts(CpuKernel(prompt, words), tokens_of_item(group))
    return CpuAttention(CpuKernel(decode, scratch_floats(head_dim, group)), prompts, len(cpu_cores()))


def _error(
    kernels: CpuAttention,
    head_dim: int,
    group: int,
    kv_dtype: jnp.dtype,
    lens: Sequence[int],
    counts: Sequence[int],
) -> float:
    """The largest error of a step with sequences of `lens` keys and `counts` queries, the first ones decode rows,
    against float64."""
    generator, kv_heads = np.random.default_rng(0), 2
    batch = _batch(lens, counts, generator)
    table, starts = batch.page_table, batch.query_starts
    shape = (1 + table.size, kv_heads, 2, _PAGE_SIZE, head_dim)
    pages = generator.standard_normal(shape).astype(kv_dtype)
    queries = generator.standard_normal((starts[-1], kv_heads * group, head_dim)).astype(kv_dtype)
    stored = pages.view(PlatformLayout.of("cpu").kv_storage(kv_dtype))
    run = jax.jit(partial(kernels, scale=head_dim**-0.5, options=AttentionOptions()))
    with jax.default_device(jax.devices("cpu")[0]):
        found = np.asarray(run(queries.astype(np.float32), stored, batch))
    exact, asked = pages.astype(np.float64), queries.astype(np.float64)
    errors = [
        np.abs(found[start : start + count] - _attention(asked[start : start + count], exact[own], length)).max()
        for start, count, length, own in zip(starts, counts, lens, table, strict=False)
    ]
    return float(np.max(errors))  # NaN if any is


def _batch(lens: Sequence[int], counts: Sequence[int], generator: np.random.Generator) -> ForwardBatch:
    """Sequences of `lens` keys and `counts` queries in pages of `_PAGE_SIZE`, in any order; in arrays of numpy."""
    columns = -(-max(lens) // _PAGE_SIZE)
    unread = np.zeros(sum(counts), np.int32)
    return ForwardBatch(
        tokens=unread,
        positions=unread,
        write_slots=unread,
        page_table=1 + generator.permutation(len(lens) * columns).astype(np.int32).reshape(len(lens), columns),
        kv_lens=np.array(lens, np.int32),
        query_starts=np.cumsum([0, *counts]).astype(np.int32),
        num_decode=np.int32(list(counts).count(1)),
    )


def _attention(queries: np.ndarray, pages: np.ndarray, length: int) -> np.ndarray:
    """Attention of the last queries `[q, heads, head_dim]` of a sequence of `length` keys, from its pages."""
    kv_heads, head_dim = pages.shape[1], pages.shape[4]
    keys, values = pages.transpose(2, 1, 0, 3, 4).reshape(2, kv_heads, 1, -1, head_dim)[:, :, :, :length]
    grouped = queries.reshape(len(queries), kv_heads, -1, head_dim).transpose(1, 2, 0, 3)
    scores = grouped @ keys.swapaxes(-1, -2) * head_dim**-0.5
    scores[..., np.arange(length) > np.arange(length - len(queries), length)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    attended = (weights / weights.sum(-1, keepdims=True)) @ values
    return np.asarray(attended.transpose(2, 0, 1, 3).reshape(queries.shape))
