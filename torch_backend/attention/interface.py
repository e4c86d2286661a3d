"""Causal attention over pages: one signature, several implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from torch_backend.batch import ForwardBatch
from torch_backend.kv_pages import KVPages


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """What makes keys and values of heads from cached latent vectors, behind which lies a rotated key for all heads.

    - `key_up` `[heads, key_dim, latent]`, `value_up` `[heads, value_dim, latent]`.
    - `expands_from`: see `LatentAttentionConfig`.
    """

    key_up: torch.Tensor
    value_up: torch.Tensor
    expands_from: int | None


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer's attention computes. Query i of a sequence, at position p, sees key j iff `j <= p` and, with a
    window, `p - j < window`.

    - `scale`: multiplies the scores.
    - `window`: keys that a query sees at most; None for all before it.
    - `soft_cap`: scores become `soft_cap * tanh(score / soft_cap)` before the mask; None for none.
    - `sinks`: float32 `[heads]`, a score of each head that joins the softmax's sum and has no value; None for none.
    - `latents`: where pages hold latent vectors. Queries are `[T, heads, key_dim + rotary_dim]` then, and outputs
      `[T, heads, value_dim]`.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    latents: LatentHeads | None = None


@dataclass(frozen=True, slots=True)
class HeadForm:
    """The heads of a layer as kernels know them: the size of each, and the query heads of a kv head (`group`)."""

    head_dim: int
    group: int


class StepAttention(Protocol):
    """Attention of one step, for every layer."""

    def __call__(self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions) -> torch.Tensor:
        """Attends over pages that already hold the step's own keys and values.

        **Arguments:** `queries` `[T, heads, head_dim]`, heads that share a kv head side by side.

        **Returns:** `[T, heads, head_dim]` in the type of `queries`, contiguous; 0 for padding. Scores, softmax and
        sums are float32. What unused slots of pages hold does not matter, NaN included.
        """
        ...


class AttentionImplementation(Protocol):
    """Prepares once for each step what all its layers share."""

    def prepare(self, batch: ForwardBatch) -> StepAttention:
        """Attention of the step `batch`. In a captured step this runs inside the capture, so that it may not read
        values of tensors on the host there."""
        ...
