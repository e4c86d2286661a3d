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
from sglang_jax.kernels.ragged_paged_attention.cpu import CpuAttention, CpuKernel, CpuPrompts
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
_PAGE_SIZE = 16


def missing_for_kernels(kv_dtype: jnp.dtype, parallel: TensorParallel, *, fixed: bool) -> str | None:
    """What kernels of attention need on a CPU and do not have; None if nothing. `fixed`: a token's result must be the
    same bits, whether it is decoded or in a chunk."""
    if not parallel.config.kv_attention:
        return "keys and values of heads, got latent attention"
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
def cpu_attention(head_dim: int, group: int, *, kv_dtype: jnp.dtype, cache_folder: Path | None) -> CpuAttention | None:
    """The kernels for heads of `head_dim` numbers, `group` query heads to a kv head, and keys and values of `kv_dtype`,
    bfloat16 or float32; compiled, or loaded from `cache_folder` if given. None, with a log line, if they cannot be
    compiled, if this jaxlib does not accept them, or if their results are wrong."""
    from numba.core.errors import NumbaError

    start = time.perf_counter()
    form = f"heads of {head_dim} numbers and {kv_dtype.name}"
    try:
        kernels = _register(head_dim, group, kv_dtype.itemsize, cache_folder)
        steps = (_DECODED,) if kernels.prompts is None else (_DECODED, _MIXED)
        error = max(_error(kernels, head_dim, group, kv_dtype, *step) for step in steps)
    except (NumbaError, OSError, RuntimeError) as failed:  # LLVM and XLA raise RuntimeError
        logger.warning("XLA's operations compute attention of %s: XLA cannot call kernels (%s)", form, failed)
        return None
    if not error <= _MAX_ERROR[kv_dtype.itemsize]:
        logger.warning(
            "XLA's operations compute attention of %s: the kernels compute wrong results on this machine", form
        )
        return None
    logger.info("CPU kernels of attention for %s ready after %.1f s", form, time.perf_counter() - start)
    return kernels


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
    columns = -(-max(lens) // _PAGE_SIZE)
    table = 1 + generator.permutation(len(lens) * columns).astype(np.int32).reshape(len(lens), columns)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    shape = (1 + table.size, kv_heads, 2, _PAGE_SIZE, head_dim)
    pages = generator.standard_normal(shape).astype(kv_dtype)
    queries = generator.standard_normal((starts[-1], kv_heads * group, head_dim)).astype(kv_dtype)
    unread = np.zeros(len(queries), np.int32)
    batch = ForwardBatch(
        tokens=unread,
        positions=unread,
        write_slots=unread,
        page_table=table,
        kv_lens=np.array(lens, np.int32),
        query_starts=starts,
        num_decode=np.int32(list(counts).count(1)),
    )
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
