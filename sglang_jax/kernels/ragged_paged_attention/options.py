"""Arguments of attention other than queries and pages: the step's sequences, and options of models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import jax


class Sequences(Protocol):
    """The fields of `ForwardBatch` that attention reads; see there."""

    @property
    def page_table(self) -> jax.Array: ...

    @property
    def kv_lens(self) -> jax.Array: ...

    @property
    def query_starts(self) -> jax.Array: ...

    @property
    def num_decode(self) -> jax.Array: ...


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionOptions:
    """Options of models. Absent ones cost nothing: all but the values of arrays is static.

    - `causal`: a query sees keys up to its own. Otherwise it sees all of its sequence, which has no keys of earlier
      steps; kernels for TPU do not support that (see `ForwardBatch.seeing_all`).
    - `window`: a query sees the last `window` keys up to its own, itself included.
    - `soft_cap`: scores become `soft_cap * tanh(score / soft_cap)` (Gemma 2).
    - `sinks`: float32 `[heads]`, a score per head that joins the softmax without a value (gpt-oss).
    - `kv_scales`: float32 `[kv_heads, 2]`, the factors of stored keys (0) and values (1).
    - `value_dim`: the values are the first numbers of the keys, as many as this (latent attention); None: pages hold
      values of the size of keys.
    - `unread`: bool `[R]`, rows of several tokens that XLA attention skips; their output is 0.
    """

    causal: bool = field(default=True, metadata={"static": True})
    window: int | None = field(default=None, metadata={"static": True})
    soft_cap: float | None = field(default=None, metadata={"static": True})
    value_dim: int | None = field(default=None, metadata={"static": True})
    sinks: jax.Array | None = None
    kv_scales: jax.Array | None = None
    unread: jax.Array | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")
        if self.window is not None and not self.causal:
            raise ValueError(f"attention that is not causal has no window, got {self.window}")
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ValueError(f"soft_cap must be positive, got {self.soft_cap}")
