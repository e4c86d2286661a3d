"""Attention over pages: the interface of all implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from torch_backend.batch import ForwardBatch
from torch_backend.kv_pages import KVPages


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """Projections from cached latent vectors, each followed by a rotated key for all heads, to keys `[heads, key_dim,
    latent]` and values `[heads, value_dim, latent]`. `expands_from`: see `LatentAttentionConfig`, None for never;
    `tile`: number of rows of every product, None for any."""

    key_up: torch.Tensor
    value_up: torch.Tensor
    expands_from: int | None
    tile: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of a layer's attention. Query i of a sequence, at position p, sees key j iff `j <= p` and, with a window,
    `p - j < window`; or every key, if the batch is not causal. That excludes windows.

    - `scale`: multiplies the scores. `window`: maximum keys that a query sees; None for all before it.
    - `soft_cap`: scores become `soft_cap * tanh(score / soft_cap)` before the mask; None for no cap.
    - `sinks`: float32 `[heads]`, for each head the score of an additional key without a value; None for no sinks.
    - `latents`: if pages hold latent vectors. Queries are then `[T, heads, key_dim + rotary_dim]`, and outputs `[T,
      heads, value_dim]`.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    latents: LatentHeads | None = None


@dataclass(frozen=True, slots=True)
class HeadForm:
    """Sizes of a layer's heads for which kernels are compiled; `group`: query heads per kv head."""

    head_dim: int
    group: int


@dataclass(frozen=True, slots=True)
class LatentForm:
    """Sizes of a layer's latent attention for which kernels are compiled: `heads` of queries, and numbers of a cached
    vector, `latent` and those of a rotated key."""

    heads: int
    latent: int
    rotary: int

    @property
    def width(self) -> int:
        return self.latent + self.rotary


class StepAttention(Protocol):
    """Attention of one step, for every layer."""

    def __call__(self, queries: torch.Tensor, kv: KVPages, options: AttentionOptions) -> torch.Tensor:
        """Attends over pages that already contain the step's own keys and values. `queries` `[T, heads, head_dim]`,
        heads that share a kv head adjacent, → `[T, heads, head_dim]` in their dtype, contiguous; 0 for padding. Scores,
        softmax and sums are float32. Unused slots of pages have no effect, even if they hold NaN."""
        ...


class AttentionImplementation(Protocol):
    """Prepares once per step what all its layers share."""

    def prepare(self, batch: ForwardBatch) -> StepAttention:
        """Returns the attention of a step. In a captured step this is captured too, and may not read tensors on the
        host."""
        ...
