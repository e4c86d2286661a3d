"""Attention by kernels for CPUs over pages in place, called from XLA's programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from sglang_jax.kernels.ragged_paged_attention.options import AttentionOptions, Sequences
from sglang_jax.kernels.ragged_paged_attention.xla import xla_prompts


@dataclass(frozen=True, slots=True)
class CpuKernel:
    """A kernel's name in XLA's CPU backend, and the float32 words of scratch memory of each thread."""

    target: str
    scratch: int


@dataclass(frozen=True, slots=True)
class CpuPrompts:
    """The kernel of sequences of several tokens; `tokens`: the most of a work item."""

    kernel: CpuKernel
    tokens: int


@dataclass(frozen=True, slots=True)
class CpuAttention:
    """Kernels for heads of one size, and one number of query heads to a kv head, on at most `threads` threads. Without
    one for prompts, XLA's operations compute these. A decode row's result is the same bits in any batch."""

    decode: CpuKernel
    prompts: CpuPrompts | None
    threads: int

    def __call__(
        self, queries: jax.Array, kv_pages: jax.Array, batch: Sequences, *, scale: float, options: AttentionOptions
    ) -> jax.Array:
        """See `ragged_paged_attention`. `kv_pages`: plain, of float32 or of the bits of bfloat16, as the kernels were
        built for, without scales."""
        wide = queries.astype(jnp.float32)
        output = self._decode(wide, kv_pages, batch, scale, options)
        if len(queries) > len(batch.kv_lens):
            if self.prompts is None:
                output = _without_others(output, batch.num_decode)
                output = xla_prompts(output, wide, kv_pages, batch, scale=scale, options=options)
            else:
                output = self._prompts(self.prompts, output, wide, kv_pages, batch, scale, options)
        return output.astype(queries.dtype)

    def _decode(
        self, queries: jax.Array, kv_pages: jax.Array, batch: Sequences, scale: float, options: AttentionOptions
    ) -> jax.Array:
        found = jax.ffi.ffi_call(self.decode.target, (_like(queries), self._scratch(self.decode)))
        operands = (queries, kv_pages, batch.page_table, batch.kv_lens, _sinks(options), batch.num_decode)
        output, _ = found(*operands, constants=_constants(scale, options))
        return output

    def _prompts(
        self,
        prompts: CpuPrompts,
        output: jax.Array,
        queries: jax.Array,
        kv_pages: jax.Array,
        batch: Sequences,
        scale: float,
        options: AttentionOptions,
    ) -> jax.Array:
        """Adds the sequences that are not decode rows to `output`."""
        # Each sequence has at most one item that is not full.
        blocks = len(queries) // prompts.tokens + len(batch.kv_lens)
        items = jax.ShapeDtypeStruct((blocks * kv_pages.shape[1], 4), jnp.int32)
        results = (_like(queries), self._scratch(prompts.kernel), items)
        found = jax.ffi.ffi_call(prompts.kernel.target, results, input_output_aliases={0: 0})
        places = (batch.page_table, batch.kv_lens, batch.query_starts)
        operands = (output, queries, kv_pages, *places, _sinks(options), batch.num_decode)
        output, *_ = found(*operands, constants=_constants(scale, options))
        return output

    def _scratch(self, kernel: CpuKernel) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.threads, kernel.scratch), jnp.float32)


@dataclass(frozen=True, slots=True)
class CpuLatents:
    """The kernel of decode rows and chunks over latent vectors, on at most `threads` threads. `items`: the most that it
    has for `tokens` tokens of a sequence."""

    kernel: CpuKernel
    tokens: int
    items: int
    threads: int

    def __call__(
        self, queries: jax.Array, kv_pages: jax.Array, batch: Sequences, *, scale: float, options: AttentionOptions
    ) -> jax.Array:
        """See `ragged_paged_attention`. `kv_pages`: plain pages of latent vectors, as `CpuAttention` takes; `options`
        have `value_dim`, and `unread` at most. A token's result is the same bits in any chunk and batch."""
        (tokens, heads, _), rows = queries.shape, len(batch.kv_lens)
        items = jax.ShapeDtypeStruct(((tokens // self.tokens + rows) * self.items, 4), jnp.int32)
        output = jax.ShapeDtypeStruct((tokens, heads, options.value_dim), jnp.float32)
        scratch = jax.ShapeDtypeStruct((self.threads, self.kernel.scratch), jnp.float32)
        found = jax.ffi.ffi_call(self.kernel.target, (output, scratch, items))
        left_out = jnp.zeros(rows, jnp.int32) if options.unread is None else options.unread.astype(jnp.int32)
        places = (batch.page_table, batch.kv_lens, batch.query_starts, left_out)
        attended, *_ = found(queries.astype(jnp.float32), kv_pages, *places, constants=_constants(scale, options))
        return attended.astype(queries.dtype)


@dataclass(frozen=True, slots=True)
class HeadForm:
    """Heads of `head_dim` numbers, `group` of queries to a kv head."""

    head_dim: int
    group: int

    def __str__(self) -> str:
        return f"heads of {self.head_dim} numbers"


@dataclass(frozen=True, slots=True)
class LatentForm:
    """`heads` of queries over cached vectors of `latent` numbers and `rotary` of a rotated key."""

    heads: int
    latent: int
    rotary: int

    def __str__(self) -> str:
        return f"latent vectors of {self.latent} + {self.rotary} numbers"

    @property
    def width(self) -> int:
        return self.latent + self.rotary


CpuAttentions = Callable[[HeadForm | LatentForm], CpuAttention | CpuLatents | None]
"""From the form of a layer's attention to its kernels; None if it has none."""


def no_cpu_attention(form: HeadForm | LatentForm) -> None:
    """For devices without such kernels, and where XLA's operations are asked for."""


def _like(queries: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(queries.shape, queries.dtype)


def _sinks(options: AttentionOptions) -> jax.Array:
    return jnp.zeros(0, jnp.float32) if options.sinks is None else options.sinks.astype(jnp.float32)


def _constants(scale: float, options: AttentionOptions) -> np.ndarray:
    """As `cpu_kernels.xla_attention` reads them."""
    numbers = np.array([scale, options.soft_cap or 0.0], np.float64)
    return np.array([options.window or 0, *numbers.view(np.int64), not options.causal], np.int64)


def _without_others(output: jax.Array, num_decode: jax.Array) -> jax.Array:
    """The output of decode rows, and 0 for other tokens."""
    return jnp.where((jnp.arange(len(output)) < num_decode)[:, None, None], output, 0.0)
