"""Packs a plan's integers into one int32 array, so that a step needs one transfer; unpacks it on the device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import jax
import jax.numpy as jnp
import numpy as np

from sglang_jax.jax_runner.buckets import Bucket
from sglang_jax.runner.page_tables import pack_copies
from sglang_jax.runner.plan import MASK_WORD, NO_LOGPROBS, Bool, Int32, PageDeltas, StepPlan, TokenMasks

NO_TARGET = -1

SAMPLES, LENGTH_ON_DEVICE, DRAFT_NUMBER = 1, 2, 4
"""The flags of a sequence: two bits, and from `DRAFT_NUMBER` up the number of its draft."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """A plan in the shape of its bucket (T tokens, R rows, D deltas), on the device.

    - `num_decode`, `num_tokens`: scalars, without padding. `top_logprobs`, `prompt_top_logprobs`: as in the plan.
    - `rows`, `kv_lens`, `flags`: `[R]`; padding has the dump row, length 0 and no flags.
    - `query_starts`: `[R + 1]`; padding repeats the number of tokens.
    - `delta_rows`, `delta_columns`, `delta_pages`: `[D]`; padding writes page 0 into the dump row.
    - `tokens`: `[T]`, as in the plan, 0 for padding. `prompt_targets`: `[T]`, the token whose logprob is wanted, or
      `NO_TARGET`. Both are empty for a decode bucket, whose rows all compute their last token.
    - `copy_sources`, `copy_targets`: `[R]`, slots that sequences start with instead of their own (the targets); unused
      targets are -1. Empty for a model without states.
    """

    num_decode: jax.Array
    num_tokens: jax.Array
    top_logprobs: jax.Array
    prompt_top_logprobs: jax.Array
    rows: jax.Array
    kv_lens: jax.Array
    flags: jax.Array
    query_starts: jax.Array
    delta_rows: jax.Array
    delta_columns: jax.Array
    delta_pages: jax.Array
    tokens: jax.Array
    prompt_targets: jax.Array
    copy_sources: jax.Array
    copy_targets: jax.Array


_SCALARS = 4


class StepLayout:
    """The places of the fields of `StepInputs` in a bucket's packed array. `states`: whether the model keeps states."""

    def __init__(self, bucket: Bucket, dump_row: int, *, states: bool = False) -> None:
        rows, deltas = bucket.rows, bucket.deltas
        tokens = 0 if bucket.decode_only else bucket.tokens
        copies = rows if states else 0
        lengths = (rows, rows, rows, rows + 1, deltas, deltas, deltas, tokens, tokens, copies, copies)
        ends = list(accumulate(lengths, initial=_SCALARS))
        self.bucket = bucket
        self.dump_row = dump_row
        self.size = ends[-1]
        self._slices = [slice(start, end) for start, end in pairwise(ends)]

    def unpack(self, packed: jax.Array) -> StepInputs:
        return StepInputs(packed[0], packed[1], packed[2], packed[3], *(packed[part] for part in self._slices))

    def pack(self, plan: StepPlan, deltas: PageDeltas, draft_numbers: Int32 | None = None) -> Int32:
        """Packs a plan that fits the bucket, as int32 `[size]`. `deltas`: the page deltas that the program applies;
        `draft_numbers`: as in `FlatPlan`. In a plan with masked sequences, none samples: the second part of the step
        does that."""
        packed = np.zeros(self.size, np.int32)
        one_part = plan.masked is None
        top_logprobs = plan.top_logprobs if one_part else NO_LOGPROBS
        packed[:_SCALARS] = (plan.num_decode, plan.num_tokens, top_logprobs, plan.prompt_top_logprobs)
        rows, kv_lens, flags, query_starts, delta_rows, delta_columns, delta_pages, tokens, targets, *copied = (
            packed[part] for part in self._slices
        )
        sequences = len(plan.rows)
        rows[:sequences] = plan.rows
        rows[sequences:] = self.dump_row
        kv_lens[:sequences] = plan.kv_lens
        flags[:sequences] = _flags(plan, plan.samples if one_part else None, draft_numbers)
        np.cumsum(plan.query_lens, out=query_starts[1 : sequences + 1])
        query_starts[sequences + 1 :] = plan.num_tokens
        delta_rows[: len(deltas.rows)] = deltas.rows
        delta_rows[len(deltas.rows) :] = self.dump_row
        delta_columns[: len(deltas.rows)] = deltas.columns
        delta_pages[: len(deltas.rows)] = deltas.pages
        if not self.bucket.decode_only:
            tokens[: plan.num_tokens] = plan.tokens
            targets[:] = NO_TARGET
            for wanted in plan.prompt_logprobs:
                start = query_starts[wanted.sequence] + wanted.first
                targets[start : start + len(wanted.targets)] = wanted.targets
        pack_copies(plan.copies, *copied)
        return packed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleInputs:
    """The inputs of the second part of a step, on the device: fields as in `StepInputs`, and `masks` int32 `[R, words]`
    (see `TokenMasks`), which allow all tokens for sequences without a mask."""

    top_logprobs: jax.Array
    rows: jax.Array
    kv_lens: jax.Array
    flags: jax.Array
    masks: jax.Array


class SampleLayout:
    """The places of the fields of `SampleInputs` in the packed array for a number of rows."""

    def __init__(self, rows: int, words: int, dump_row: int) -> None:
        self._rows = rows
        self._words = words
        self._dump_row = dump_row
        self.size = 1 + rows * (3 + words)

    def unpack(self, packed: jax.Array) -> SampleInputs:
        rows, kv_lens, flags = packed[1 : 1 + 3 * self._rows].reshape(3, self._rows)
        return SampleInputs(packed[0], rows, kv_lens, flags, packed[1 + 3 * self._rows :].reshape(-1, self._words))

    def pack(self, plan: StepPlan, masks: TokenMasks, draft_numbers: Int32 | None = None) -> Int32:
        """Packs a plan with at most this number of rows, and the masks of its masked sequences, as int32 `[size]`.
        `draft_numbers`: as in `FlatPlan`."""
        packed = np.zeros(self.size, np.int32)
        packed[0] = plan.top_logprobs
        count = len(plan.rows)
        fields = packed[1 : 1 + 3 * self._rows].reshape(3, self._rows)
        fields[0, count:] = self._dump_row
        fields[:, :count] = (plan.rows, plan.kv_lens, _flags(plan, plan.samples, draft_numbers))
        words = packed[1 + 3 * self._rows :].reshape(-1, self._words)
        words[:] = -1
        assert plan.masked is not None
        words[np.flatnonzero(plan.masked)] = masks.words
        return packed


def _flags(plan: StepPlan, samples: Bool | None, draft_numbers: Int32 | None) -> Int32:
    flags = np.zeros(len(plan.rows), np.int32)
    if samples is not None:
        flags += SAMPLES * samples
    if plan.length_on_device is not None:
        flags += LENGTH_ON_DEVICE * plan.length_on_device
    if draft_numbers is not None:
        flags += DRAFT_NUMBER * draft_numbers
    return flags


def unpack_masks(words: jax.Array, columns: jax.Array) -> jax.Array:
    """Whether masks `[n, words]` allow tokens `columns` int32 `[c]`: bool `[n, c]`."""
    return (jnp.take(words, columns // MASK_WORD, axis=1, mode="clip") >> (columns % MASK_WORD)) & 1 != 0


def unpack_all(words: jax.Array, vocab_size: int) -> jax.Array:
    """`unpack_masks` for all tokens, without gathering words: bool `[n, vocab_size]`."""
    bits = (words[:, :, None] >> jnp.arange(MASK_WORD, dtype=jnp.int32)) & 1
    return bits.reshape(len(words), -1)[:, :vocab_size] != 0
