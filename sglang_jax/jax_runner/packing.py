"""Packs a plan's integers into one int32 array, so that a step needs one transfer; unpacks it on the device."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from sglang_jax.jax_runner.buckets import Bucket
from sglang_jax.runner.packing import PlanFields, field_places, flags_of, write_plan
from sglang_jax.runner.plan import MASK_WORD, NO_LOGPROBS, Int32, PageDeltas, StepPlan, TokenMasks

NO_TARGET = -1
_SCALARS = 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs(PlanFields[jax.Array]):
    """A plan in the shape of its bucket, on the device; padding is after the plan's sequences, without tokens.

    - `prompt_targets`: `[T]`, the token whose logprob is wanted, or `NO_TARGET`; empty for a decode bucket.
    - `num_decode`, `num_tokens`: scalars, without padding. `top_logprobs`, `prompt_top_logprobs`: as in the plan.
    """

    prompt_targets: jax.Array
    num_decode: jax.Array
    num_tokens: jax.Array
    top_logprobs: jax.Array
    prompt_top_logprobs: jax.Array


class StepLayout:
    """The places of the fields of `StepInputs` in a bucket's packed array. `states`: whether the model keeps states."""

    def __init__(self, bucket: Bucket, dump_row: int, *, states: bool = False) -> None:
        tokens = 0 if bucket.decode_only else bucket.tokens
        self.bucket = bucket
        self.dump_row = dump_row
        self._places = field_places(bucket.rows, bucket.deltas, tokens, tokens, _SCALARS, states=states)
        self.size: int = self._places[-1].stop

    def unpack(self, packed: jax.Array) -> StepInputs:
        *fields, scalars = (packed[place] for place in self._places)
        return StepInputs(*fields, *(scalars[index] for index in range(_SCALARS)))

    def pack(self, plan: StepPlan, deltas: PageDeltas, draft_numbers: Int32 | None = None) -> Int32:
        """Packs a plan that fits the bucket, as int32 `[size]`. `deltas`: the page deltas that the program applies;
        `draft_numbers`: as in `FlatPlan`. In a plan with masked sequences, none samples: the second part of the step
        does that."""
        packed = np.zeros(self.size, np.int32)
        one_part = plan.masked is None
        *fields, targets, scalars = [packed[place] for place in self._places]
        flags = flags_of(plan, plan.samples if one_part else None, draft_numbers)
        write_plan(fields, plan, deltas, self.dump_row, plan.num_decode, flags)
        targets[:] = NO_TARGET
        for wanted in plan.prompt_logprobs:
            start = plan.place_of(wanted)
            targets[start : start + len(wanted.targets)] = wanted.targets
        top_logprobs = plan.top_logprobs if one_part else NO_LOGPROBS
        scalars[:] = (plan.num_decode, plan.num_tokens, top_logprobs, plan.prompt_top_logprobs)
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
        fields[:, :count] = (plan.rows, plan.kv_lens, flags_of(plan, plan.samples, draft_numbers))
        words = packed[1 + 3 * self._rows :].reshape(-1, self._words)
        words[:] = -1
        assert plan.masked is not None
        words[np.flatnonzero(plan.masked)] = masks.words
        return packed


def unpack_masks(words: jax.Array, columns: jax.Array) -> jax.Array:
    """Whether masks `[n, words]` allow tokens `columns` int32 `[c]`: bool `[n, c]`."""
    return (jnp.take(words, columns // MASK_WORD, axis=1, mode="clip") >> (columns % MASK_WORD)) & 1 != 0


def unpack_all(words: jax.Array, vocab_size: int) -> jax.Array:
    """`unpack_masks` for all tokens, without gathering words: bool `[n, vocab_size]`."""
    bits = (words[:, :, None] >> jnp.arange(MASK_WORD, dtype=jnp.int32)) & 1
    return bits.reshape(len(words), -1)[:, :vocab_size] != 0
