"""Attention of a step's tokens over the pages of their sequences, decode rows and prefill chunks in one call."""

from __future__ import annotations

from enum import StrEnum

import jax

from sglang_jax.kernels import kv_storage
from sglang_jax.kernels.kv_write import find_runs, write_kv_on_tpu
from sglang_jax.kernels.ragged_paged_attention.expanded import expanded_attention
from sglang_jax.kernels.ragged_paged_attention.options import AttentionOptions, Sequences
from sglang_jax.kernels.ragged_paged_attention.pallas import pallas_attention
from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import current_vmem_limit
from sglang_jax.kernels.ragged_paged_attention.reference import reference_attention
from sglang_jax.kernels.ragged_paged_attention.xla import xla_attention, xla_attention_in_fixed_blocks
from sglang_jax.kernels.row_tiles import TILE_ROWS, TILE_ROWS_ON_TPU

__all__ = [
    "AttentionImplementation",
    "AttentionOptions",
    "Sequences",
    "expanded_attention",
    "plan_writes",
    "ragged_paged_attention",
    "write_kv",
]

_NO_OPTIONS = AttentionOptions()


class AttentionImplementation(StrEnum):
    """`REFERENCE` reads every slot of the page table; `XLA` reads only slots that sequences use; `PALLAS` too, with
    kernels for TPU, and only from tiled pages (`kernels.kv_storage`).

    - Checked, for debugging: a check of each address is compiled in, and an address outside its array stops the core
      with an error that names the copy. Starting a copy then takes 2.5 times as many instructions.
    - Fixed: a token's result depends on its own sequence up to that token, bit for bit. Every row is computed as a
      chunk, in blocks of one shape.
    """

    REFERENCE = "reference"
    XLA = "xla"
    PALLAS = "pallas"
    PALLAS_CHECKED = "pallas_checked"
    XLA_FIXED = "xla_fixed"
    PALLAS_FIXED = "pallas_fixed"
    PALLAS_FIXED_CHECKED = "pallas_fixed_checked"

    @property
    def for_tpu(self) -> bool:
        return self in (
            AttentionImplementation.PALLAS,
            AttentionImplementation.PALLAS_CHECKED,
            AttentionImplementation.PALLAS_FIXED,
            AttentionImplementation.PALLAS_FIXED_CHECKED,
        )

    @property
    def fixed(self) -> bool:
        return self in (
            AttentionImplementation.XLA_FIXED,
            AttentionImplementation.PALLAS_FIXED,
            AttentionImplementation.PALLAS_FIXED_CHECKED,
        )

    @property
    def tile_rows(self) -> int | None:
        """Rows of products (see `kernels.row_tiles`); None for any number."""
        if not self.fixed:
            return None
        return TILE_ROWS_ON_TPU if self.for_tpu else TILE_ROWS

    @property
    def checked(self) -> bool:
        return self in (AttentionImplementation.PALLAS_CHECKED, AttentionImplementation.PALLAS_FIXED_CHECKED)


def ragged_paged_attention(
    implementation: AttentionImplementation,
    queries: jax.Array,
    kv_pages: jax.Array,
    batch: Sequences,
    *,
    scale: float,
    options: AttentionOptions = _NO_OPTIONS,
) -> jax.Array:
    """Softmax attention of each query over the keys at or before its own position, or over all keys of its sequence
    (see `AttentionOptions.causal`). The keys and values of the step's tokens must be in the pages already; unused slots
    may hold anything. Scores, softmax and sums are float32.

    `queries` `[T, heads, head_dim]`: heads that share a kv head are adjacent; `kv_pages` `[num_pages, kv_heads, parts,
    page_size, lanes]`: see `kernels.kv_storage`; `scale` multiplies the scores. Returns `[T, heads, value_dim or
    head_dim]` in the type of `queries`, 0 for padding. Raises as `pallas_attention`.
    """
    match implementation:
        case AttentionImplementation.REFERENCE:
            return reference_attention(queries, kv_pages, batch, scale=scale, options=options)
        case AttentionImplementation.XLA:
            return xla_attention(queries, kv_pages, batch, scale=scale, options=options)
        case AttentionImplementation.XLA_FIXED:
            return xla_attention_in_fixed_blocks(queries, kv_pages, batch, scale=scale, options=options)
        case _:
            checked, fixed = implementation.checked, implementation.fixed
            return pallas_attention(
                queries, kv_pages, batch, scale=scale, options=options, checked=checked, fixed=fixed
            )


def plan_writes(
    implementation: AttentionImplementation, kv_pages: jax.Array, write_slots: jax.Array
) -> jax.Array | None:
    """The part of `write_kv` that layers with the same page ids share, computed once a step; None if there is none.
    `kv_pages`: the pages of one of the layers; `write_slots`: as in `write_kv`."""
    if not implementation.for_tpu:
        return None
    return find_runs(kv_pages, write_slots, implementation.checked, current_vmem_limit())


def write_kv(
    implementation: AttentionImplementation,
    kv_pages: jax.Array,
    keys: jax.Array,
    values: jax.Array | None,
    write_slots: jax.Array,
    *,
    plan: jax.Array | None = None,
    options: AttentionOptions = _NO_OPTIONS,
) -> jax.Array:
    """See `kv_storage.write_kv`. Kernels for TPU do not write page 0, the padding page, and require tokens that share a
    page to be consecutive. `plan`: the result of `plan_writes`; None to compute it here."""
    if implementation.for_tpu:
        checked, limit = implementation.checked, current_vmem_limit()
        runs = find_runs(kv_pages, write_slots, checked, limit) if plan is None else plan
        return write_kv_on_tpu(kv_pages, keys, values, runs, options.kv_scales, checked=checked, vmem_limit=limit)
    return kv_storage.write_kv(kv_pages, keys, values, write_slots, options.kv_scales, options.value_dim)
