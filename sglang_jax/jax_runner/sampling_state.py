"""What the sampler knows of each row: arrays on the device, replaced row by row as requests come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sglang_jax.runner.plan import Int32, RowUpdate
from sglang_jax.sampling.params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS

IN_PROMPT = 1
"""Bit of `SamplingState.occurrences` that says that the prompt holds the token."""

ONE_OUTPUT = 2
"""What one output token adds to `SamplingState.occurrences`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """Sampling parameters of every row; `SamplingParams` says what they mean.

    - `top_k`: int32, the vocabulary's size where all tokens are kept.
    - `bias_ids`, `stop_ids`: unused entries hold the vocabulary's size, which every scatter drops.
    - `seed`: uint32 `[rows, 2]`, low word first.
    - `occurrences`: int32 `[rows, vocab]`, twice the number of times that the output holds the token, plus one where
      the prompt holds it. Kept up to date for rows with a penalty alone.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    frequency_penalty: jax.Array
    presence_penalty: jax.Array
    repetition_penalty: jax.Array
    min_new_tokens: jax.Array
    prompt_len: jax.Array
    seed: jax.Array
    stop_ids: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    occurrences: jax.Array

    @classmethod
    def empty(cls, rows: int, vocab_size: int) -> SamplingState:
        """Greedy rows without any penalty, bias or mask."""
        return cls(
            temperature=jnp.zeros(rows, jnp.float32),
            top_k=jnp.full(rows, vocab_size, jnp.int32),
            top_p=jnp.ones(rows, jnp.float32),
            min_p=jnp.zeros(rows, jnp.float32),
            frequency_penalty=jnp.zeros(rows, jnp.float32),
            presence_penalty=jnp.zeros(rows, jnp.float32),
            repetition_penalty=jnp.ones(rows, jnp.float32),
            min_new_tokens=jnp.zeros(rows, jnp.int32),
            prompt_len=jnp.zeros(rows, jnp.int32),
            seed=jnp.zeros((rows, 2), jnp.uint32),
            stop_ids=jnp.full((rows, MAX_STOP_TOKEN_IDS), vocab_size, jnp.int32),
            bias_ids=jnp.full((rows, MAX_LOGIT_BIAS), vocab_size, jnp.int32),
            bias_values=jnp.zeros((rows, MAX_LOGIT_BIAS), jnp.float32),
            occurrences=jnp.zeros((rows, vocab_size), jnp.int32),
        )

    @property
    def penalised(self) -> jax.Array:
        """bool `[rows]`: a penalty is set, so that the row's tokens are counted."""
        return (self.repetition_penalty != 1.0) | (self.frequency_penalty != 0.0) | (self.presence_penalty != 0.0)

    def select(self, rows: jax.Array) -> SamplingState:
        """The parameters of `rows` int32 `[n]`. `occurrences`, which is large, stays that of all rows."""
        small = replace(self, occurrences=self.temperature)
        return replace(jax.tree.map(lambda values: values[rows], small), occurrences=self.occurrences)

    def count(self, rows: jax.Array, tokens: jax.Array, counted: jax.Array) -> SamplingState:
        """Counts a drawn token in each of `rows` for which `counted` (all three `[n]`) holds."""
        amounts = jnp.where(counted, ONE_OUTPUT, 0)
        occurrences = self.occurrences.at[rows, jnp.where(counted, tokens, 0)].add(amounts)
        return replace(self, occurrences=occurrences)


_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
_INTEGERS = ("top_k", "min_new_tokens", "prompt_len")
_SEED = 1 + len(_FLOATS) + len(_INTEGERS)
_STOP_IDS = _SEED + 2
_BIAS_IDS = _STOP_IDS + MAX_STOP_TOKEN_IDS
_BIAS_VALUES = _BIAS_IDS + MAX_LOGIT_BIAS
PACKED_ROW = _BIAS_VALUES + MAX_LOGIT_BIAS
"""int32 words of one packed row update."""


def pack_row_updates(updates: Sequence[RowUpdate], size: int, pad_row: int, vocab_size: int) -> Int32:
    """Packs up to `size` updates into one int32 `[size, PACKED_ROW]` array, floats as their bits.

    Unused entries replace row `pad_row` by greedy sampling.

    **Raises:** `ValueError` if a request has more than `MAX_STOP_TOKEN_IDS` stop ids.
    """
    packed = np.zeros((size, PACKED_ROW), np.int32)
    floats = packed[:, 1 : 1 + len(_FLOATS)].view(np.float32)
    integers = packed[:, 1 + len(_FLOATS) : _SEED]
    packed[:, 0] = pad_row
    packed[:, _STOP_IDS:_BIAS_VALUES] = vocab_size
    floats[:] = (0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
    integers[:, 0] = vocab_size
    for entry, update in enumerate(updates):
        sampling = update.sampling
        if len(update.stop_ids) > MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"row {update.row} has {len(update.stop_ids)} stop ids, the sampler holds {MAX_STOP_TOKEN_IDS}"
            )
        packed[entry, 0] = update.row
        floats[entry] = (
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.frequency_penalty,
            sampling.presence_penalty,
            sampling.repetition_penalty,
        )
        top_k = vocab_size if sampling.top_k == -1 else min(sampling.top_k, vocab_size)
        integers[entry] = (top_k, sampling.min_new_tokens, update.prompt_len)
        packed[entry, _SEED:_STOP_IDS].view(np.uint32)[:] = (update.seed & 0xFFFFFFFF, update.seed >> 32)
        packed[entry, _STOP_IDS : _STOP_IDS + len(update.stop_ids)] = update.stop_ids
        if sampling.logit_bias:
            biases = len(sampling.logit_bias)
            packed[entry, _BIAS_IDS : _BIAS_IDS + biases] = tuple(sampling.logit_bias)
            values = packed[entry, _BIAS_VALUES : _BIAS_VALUES + biases].view(np.float32)
            values[:] = tuple(sampling.logit_bias.values())
    return packed


def apply_row_updates(state: SamplingState, packed: jax.Array) -> SamplingState:
    """Replaces the parameters of the rows that `packed` (see `pack_row_updates`) names."""

    def as_float(words: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(words, jnp.float32)

    rows = packed[:, 0]
    columns = dict(zip((*_FLOATS, *_INTEGERS), packed[:, 1:_SEED].T, strict=True))
    new = {name: as_float(columns[name]) for name in _FLOATS} | {name: columns[name] for name in _INTEGERS}
    new["seed"] = lax.bitcast_convert_type(packed[:, _SEED:_STOP_IDS], jnp.uint32)
    new["stop_ids"] = packed[:, _STOP_IDS:_BIAS_IDS]
    new["bias_ids"] = packed[:, _BIAS_IDS:_BIAS_VALUES]
    new["bias_values"] = as_float(packed[:, _BIAS_VALUES:])
    old = {name: state.__dict__[name] for name in new}
    return replace(state, **{name: old[name].at[rows].set(new[name]) for name in new})


def count_history(update: RowUpdate, vocab_size: int) -> Int32:
    """The row's entry of `SamplingState.occurrences`, int32 `[vocab]`, from `update.history`."""
    assert update.history is not None
    prompt, output = update.history[: update.prompt_len], update.history[update.prompt_len :]
    occurrences = np.bincount(output, minlength=vocab_size).astype(np.int32) * ONE_OUTPUT
    occurrences[prompt] += IN_PROMPT  # buffered: a repeated id adds once
    return occurrences


def set_occurrences(state: SamplingState, row: jax.Array, occurrences: jax.Array) -> SamplingState:
    """Replaces what row `row` (int32 scalar) has counted so far."""
    return replace(state, occurrences=state.occurrences.at[row].set(occurrences))
