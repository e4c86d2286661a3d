"""Where the sequences of a step read their states and where they write them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateRows:
    """The state slots of a step of T tokens in R sequences, in the order of its `ForwardBatch`.

    - `begin`: int32 `[R]`, the slot with the state before a sequence's first token; `fresh`: bool `[R]`, the sequence
      starts from zeros, whatever the slot holds.
    - `own`: int32 `[R]`, the slot for the state after its last token, 0 for padding. No other sequence of the step
      reads it.
    - `sequences`, `offsets`: int32 `[T]`, a token's sequence, and its index among that sequence's tokens of the step;
      undefined for padding.
    - `query_starts`, `num_decode`: as in `ForwardBatch`. `decode_only`: token i is the only one of sequence i.
    - `drafts`: int32 `[R]`, in decode steps of runners that draft: a sequence's draft number in its row, 0 for the
      row's first token. A draft follows the sequence before it, starts from the state that it writes, and writes its
      own slot; its `begin` is that of its row's first sequence.
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
        """The states before the step, `[R, ...]` of `pool` `[slots, ...]`; zeros for fresh sequences."""
        fresh = self.fresh.reshape(-1, *[1] * (pool.ndim - 1))
        return jnp.where(fresh, jnp.zeros((), pool.dtype), pool[self.begin])

    def write(self, pool: jax.Array, states: jax.Array) -> jax.Array:
        return pool.at[self.own].set(states.astype(pool.dtype))

    def without_drafts(self) -> StateRows:
        """The same step with drafts turned into padding."""
        if self.drafts is None:
            return self
        first = self.drafts == 0
        return replace(self, begin=jnp.where(first, self.begin, 0), own=jnp.where(first, self.own, 0), drafts=None)

    def of_draft(self, number: jax.Array) -> DraftStep:
        """The drafts with this number (from 1) of all rows, as a separate decode step."""
        assert self.drafts is not None
        wanted = self.drafts == number
        places, numbers, count = _first_places(wanted)
        return DraftStep(self._decode_step(places, self.own[places - 1], count), places, wanted, numbers)

    def as_chunks(self) -> StateRows:
        """The same step with its decode rows as chunks of one token, and without drafts."""
        used = self.num_decode if self.decode_only else self.query_starts[-1]
        none, starts = jnp.zeros_like(self.num_decode), jnp.minimum(self.query_starts, used)
        return replace(self.without_drafts(), query_starts=starts, num_decode=none, decode_only=False)

    def of_token(self, number: jax.Array) -> tuple[StateRows, jax.Array]:
        """The tokens with this number (from 0) of all sequences, as a separate decode step, and their places in this
        step, int32 `[R]`, undefined for padding. Earlier tokens must have been computed."""
        starts, ends = self.query_starts[:-1], self.query_starts[1:]
        places, _, count = _first_places(starts + number < ends)
        step = self._decode_step(places, jnp.where(number == 0, self.begin, self.own)[places], count)
        return replace(step, fresh=step.fresh | (self.fresh[places] & (number == 0))), starts[places] + number

    def _decode_step(self, places: jax.Array, begin: jax.Array, count: jax.Array) -> StateRows:
        """A decode step of the sequences `places[:count]`, from the states in the slots `begin`. Both int32 `[R]`."""
        rows = jnp.arange(len(places))
        real = rows < count
        return StateRows(
            begin=jnp.where(real, begin, 0),
            fresh=~real,
            own=jnp.where(real, self.own[places], 0),
            sequences=rows,
            offsets=jnp.zeros_like(rows),
            query_starts=jnp.minimum(jnp.arange(len(places) + 1), count),
            num_decode=count,
            decode_only=True,
        )


def _first_places(wanted: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The places of true values in bool `[R]`, in order and 0 after them, int32 `[R]`; the number of true values before
    each; and their count."""
    ends = jnp.cumsum(wanted)
    places = jnp.searchsorted(ends, 1 + jnp.arange(len(ends)), method="compare_all")
    return jnp.where(places < len(ends), places, 0), ends - 1, ends[-1].astype(jnp.int32)


class DraftStep(NamedTuple):
    """Some drafts of a step with R sequences, as a separate step: `rows`, drafts first and padding after them. Each
    starts from the state that the sequence before it has written. `places`: int32 `[R]`, the sequence of each of
    `rows`; undefined for padding. `wanted`: bool `[R]`, the sequences that are such drafts; `numbers`: int32 `[R]`,
    their index in `rows`."""

    rows: StateRows
    places: jax.Array
    wanted: jax.Array
    numbers: jax.Array
