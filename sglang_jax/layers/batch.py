"""The batch of one forward step, as arrays on the device."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from sglang_jax.kernels.state_rows import StateRows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GroupPages:
    """The places of a step's tokens in the pages of one cache group: see `ForwardBatch`."""

    write_slots: jax.Array
    page_table: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SequenceRanks:
    """`of`: int32 `[R]`, the rank of each sequence, none's number for padding; `rows`, `tokens`: maximum sequences and
    tokens of a step on one rank."""

    of: jax.Array
    rows: int = field(metadata={"static": True})
    tokens: int = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RankBatch:
    """The sequences of each rank, with an axis of ranks before those of every array.

    - `tokens`: int32 `[ranks, T of a rank]`, the indices of its tokens among all, any for padding.
    - `places`: int32 `[ranks, T]`, where each token is among those of the rank; T of a rank if it is another's.
    - `batch`: with T and R of a rank.
    """

    tokens: jax.Array
    places: jax.Array
    batch: ForwardBatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ForwardBatch:
    """The tokens of one step, their sequences, and the places of their keys and values.

    T is the token bucket, R the row bucket, P the page-table columns; these are static, everything else is data.
    Sequence s has tokens `query_starts[s] : query_starts[s + 1]`, the last of its `kv_lens[s]` keys. Decode sequences
    are first and have exactly one token: token i belongs to sequence i. A program with T == R is a decode program, with
    decode sequences only.

    - `tokens`: int32 `[T]`. `positions`: int32 `[T]`, 0 for padding.
    - `write_slots`: int32 `[T]`, `page * page_size + offset`; padding writes into page 0.
    - `page_table`: int32 `[R, P]`, 0 where unused. With a window, entries before it may name any page.
    - `kv_lens`: int32 `[R]`, length after this step's writes; 0 for padding.
    - `query_starts`: int32 `[R + 1]`; padding repeats the number of tokens, so that its sequences are empty.
    - `num_decode`: int32 scalar.
    - `write_plan`: the part of writing that layers of one cache group share (see `plan_writes`), if there is one.
    - `further`: pages of the cache groups after the first, to which `write_slots` and `page_table` belong, without
      groups of states.
    - `states`: the places of the sequences' states, if the model has any.
    - `ranks`: int32 `[R]`, the rank of each sequence, if ranks divide them; `own`: the parts of all ranks (see
      `layers.ranks`).
    """

    tokens: jax.Array
    positions: jax.Array
    write_slots: jax.Array
    page_table: jax.Array
    kv_lens: jax.Array
    query_starts: jax.Array
    num_decode: jax.Array
    write_plan: jax.Array | None = None
    further: tuple[GroupPages, ...] = ()
    states: StateRows | None = None
    ranks: SequenceRanks | None = None
    own: RankBatch | None = None

    def of_group(self, group: int) -> ForwardBatch:
        if group == 0:
            return replace(self, further=())
        pages = self.further[group - 1]
        return replace(self, write_slots=pages.write_slots, page_table=pages.page_table, further=())

    def seeing_all(self) -> ForwardBatch:
        """The batch for causal attention in place of attention that is not: each token is a sequence, which sees all
        keys of its text. These are written before."""
        places, total = jnp.arange(len(self.tokens), dtype=jnp.int32), self.query_starts[-1]
        ends = self.query_starts[1:]
        sequences = jnp.searchsorted(ends, places, side="right", method="compare_all").astype(jnp.int32)
        sequences = jnp.minimum(sequences, len(ends) - 1)
        return replace(
            self,
            page_table=self.page_table[sequences],
            kv_lens=jnp.where(places < total, self.kv_lens[sequences], 0),
            query_starts=jnp.minimum(jnp.arange(len(places) + 1, dtype=jnp.int32), total),
            num_decode=total,
        )
