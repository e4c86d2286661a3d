"""Causal attention of a step's tokens over the pages of their sequences, decode rows and prefill chunks in one call."""

from __future__ import annotations

from enum import StrEnum

import jax

from sglang_jax.kernels.kv_storage import write_kv
from sglang_jax.kernels.ragged_paged_attention.reference import reference_attention
from sglang_jax.kernels.ragged_paged_attention.sequences import Sequences
from sglang_jax.kernels.ragged_paged_attention.xla import xla_attention

__all__ = ["AttentionImplementation", "Sequences", "ragged_paged_attention", "write_kv"]


class AttentionImplementation(StrEnum):
    """`REFERENCE` looks at every slot that a sequence could have; `XLA` at those that it has."""

    REFERENCE = "reference"
    XLA = "xla"


def ragged_paged_attention(
    implementation: AttentionImplementation,
    queries: jax.Array,
    kv_pages: jax.Array,
    batch: Sequences,
    *,
    scale: float,
) -> jax.Array:
    """Softmax attention of each query over the keys at or before its own position.

    Keys and values of the step's own tokens are in the pages already. What unused slots hold does not matter.

    **Arguments:** `queries` `[T, heads, head_dim]`, heads that share a kv head side by side; `kv_pages`
    `[num_pages, kv_heads, 2, page_size, head_dim]`; `scale` multiplies the scores.

    **Returns:** `[T, heads, head_dim]` in the type of `queries`; 0 for padding. Scores, softmax and sums are float32.
    """
    match implementation:
        case AttentionImplementation.REFERENCE:
            return reference_attention(queries, kv_pages, batch, scale=scale)
        case AttentionImplementation.XLA:
            return xla_attention(queries, kv_pages, batch, scale=scale)
