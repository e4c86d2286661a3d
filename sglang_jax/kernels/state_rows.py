"""Which states the sequences of a step begin with, and where they leave their own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateRows:
    """Of a step of T tokens in R sequences, whose tokens are those of its `ForwardBatch`.

    - `begin`: int32 `[R]`, the slot with the state before a sequence's first token; `fresh`: bool `[R]`, there is none,
      whatever the slot holds.
    - `own`: int32 `[R]`, the slot that takes the state after its last token; slot 0 for padding. No other sequence of
      the step begins with it.
    - `sequences`, `offsets`: int32 `[T]`, the sequence that a token belongs to, and how many tokens of the step it has
      before that one; those of padding are of no account.
    - `query_starts`, `num_decode`: as in `ForwardBatch`.
    - `decode_only`: every sequence has one token: token i belongs to sequence i.
    - `drafts`: int32 `[R]`, given for decode steps of runners that draft: which of its row's drafts a sequence stands
      for, 0 for none. A draft stands behind the sequence before it, goes on from the state that this one leaves, and
      has a slot of its own to leave one; its `begin` is what the first sequence of its row begins with.
    """

    begin: jax.Array
    fresh: jax.Array
    own: jax.Array
    sequences: jax.Array
    offsets: jax.Array
    query_starts: jax.Array
    num_decode: jax.Array
    decode_only: bool = field(metadata={"static": True})
    drafts: jax.Array | None = None

    def read(self, pool: jax.Array) -> jax.Array:
        """What the sequences begin with, `[R, ...]` of `pool` `[slots, ...]`; zeros where that is nothing."""
        fresh = self.fresh.reshape(-1, *[1] * (pool.ndim - 1))
        return jnp.where(fresh, jnp.zeros((), pool.dtype), pool[self.begin])

    def write(self, pool: jax.Array, states: jax.Array) -> jax.Array:
        """The pool with what the sequences leave."""
        return pool.at[self.own].set(states.astype(pool.dtype))

    def without_drafts(self) -> StateRows:
        """The same, with sequences that stand for drafts in the place of padding."""
        if self.drafts is None:
            return self
        first = self.drafts == 0
        return replace(self, begin=jnp.where(first, self.begin, 0), own=jnp.where(first, self.own, 0), drafts=None)

    def of_draft(self, number: jax.Array) -> DraftStep:
        """What the drafts with this number, from 1, of all rows are as a decode step of their own."""
        assert self.drafts is not None
        wanted = self.drafts == number
        ends = jnp.cumsum(wanted)
        places = jnp.searchsorted(ends, 1 + jnp.arange(len(ends)), method="compare_all")
        real = places < len(ends)
        places = jnp.where(real, places, 0)
        step = replace(
            self,
            begin=jnp.where(real, self.own[places - 1], 0),
            fresh=~real,
            own=jnp.where(real, self.own[places], 0),
            num_decode=ends[-1].astype(jnp.int32),
            drafts=None,
        )
        return DraftStep(step, places, wanted, ends - 1)


class DraftStep(NamedTuple):
    """Some drafts of a step with R sequences as a step of their own: `rows`, with padding behind the drafts. They begin
    with what the sequences before them have left in slots.

    - `places`: int32 `[R]`, the sequence that each of `rows` is; of padding of no account.
    - `wanted`: bool `[R]`, the sequences that are such drafts; `numbers`: int32 `[R]`, which of `rows` each of them is.
    """

    rows: StateRows
    places: jax.Array
    wanted: jax.Array
    numbers: jax.Array
