"""What one forward step computes, as arrays on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax

from sglang_jax.kernels.state_rows import StateRows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GroupPages:
    """Where the tokens of a step lie in the pages of one cache group: see `ForwardBatch`."""

    write_slots: jax.Array
    page_table: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ForwardBatch:
    """Tokens of one step, the sequences they belong to, and where their keys and values lie.

    T is the token bucket, R the row bucket, P the page-table columns; all are static, everything else is data.
    Sequence s holds the tokens `query_starts[s] : query_starts[s + 1]`, which are the last ones of its
    `kv_lens[s]` keys. Decode sequences come first and have exactly one token: token i belongs to sequence i.
    A program with T == R is a decode program: all its sequences are decode sequences and no prefill part is traced.

    - `tokens`: int32 `[T]`.
    - `positions`: int32 `[T]`, 0 for padding.
    - `write_slots`: int32 `[T]`, `page * page_size + offset`; padding writes into page 0.
    - `page_table`: int32 `[R, P]`, 0 where unused. Of layers with a window, entries before it may name any page.
    - `kv_lens`: int32 `[R]`, length after this step's writes; 0 for padding.
    - `query_starts`: int32 `[R + 1]`; padding repeats the number of tokens, so that its sequences are empty.
    - `num_decode`: int32 scalar.
    - `write_plan`: what layers of one cache group have in common as they write (see `plan_writes`), if it was made.
    - `further`: pages of the cache groups after the first, whose are `write_slots` and `page_table`. Groups that keep
      states are not among them.
    - `states`: of a model that keeps states, where its sequences have them.
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

    def of_group(self, group: int) -> ForwardBatch:
        """The batch as layers of one cache group see it."""
        if group == 0:
            return replace(self, further=())
        pages = self.further[group - 1]
        return replace(self, write_slots=pages.write_slots, page_table=pages.page_table, further=())
