"""The sampler's parameters and counts of each row: device arrays, replaced row by row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from sglang_jax.runner.row_updates import FIELDS, ONE_OUTPUT, FieldKind
from sglang_jax.sampling.params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingState:
    """Sampling parameters of every row; see `SamplingParams` for their meaning.

    - `top_k`: int32, the vocabulary size if all tokens are kept.
    - `bias_ids`, `stop_ids`: unused entries are the vocabulary size, which scatters drop.
    - `seed_low`, `seed_high`: uint32, the words of the seed. In each step, a TPU would copy an array `[rows, 2]` to
      another layout before it reads some of its rows.
    - `occurrences`: int32 `[rows, vocab]`, twice the token's count in the output, plus one if the prompt contains it.
      Only up to date for rows with a penalty.
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
    seed_low: jax.Array
    seed_high: jax.Array
    stop_ids: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    occurrences: jax.Array

    @classmethod
    def empty(cls, rows: int, vocab_size: int) -> SamplingState:
        """Greedy rows without penalties, bias or mask."""
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
            seed_low=jnp.zeros(rows, jnp.uint32),
            seed_high=jnp.zeros(rows, jnp.uint32),
            stop_ids=jnp.full((rows, MAX_STOP_TOKEN_IDS), vocab_size, jnp.int32),
            bias_ids=jnp.full((rows, MAX_LOGIT_BIAS), vocab_size, jnp.int32),
            bias_values=jnp.zeros((rows, MAX_LOGIT_BIAS), jnp.float32),
            occurrences=jnp.zeros((rows, vocab_size), jnp.int32),
        )

    @property
    def vocab_size(self) -> int:
        return self.occurrences.shape[1]

    @property
    def seed(self) -> jax.Array:
        """The seeds, uint32 `[rows, 2]`, low word first."""
        return jnp.stack((self.seed_low, self.seed_high), axis=-1)

    @property
    def penalised(self) -> jax.Array:
        """Rows with a penalty, whose tokens are counted: bool `[rows]`."""
        return (self.repetition_penalty != 1.0) | (self.frequency_penalty != 0.0) | (self.presence_penalty != 0.0)

    def select(self, rows: jax.Array) -> SamplingState:
        """The parameters of `rows` int32 `[n]`, except `occurrences`, which is large, and `stop_ids`, which few steps
        read: these stay those of all rows."""
        small = replace(self, occurrences=self.temperature, stop_ids=self.temperature)
        selected = jax.tree.map(lambda values: values[rows], small)
        return replace(selected, occurrences=self.occurrences, stop_ids=self.stop_ids)

    def count(self, rows: jax.Array, tokens: jax.Array, counted: jax.Array) -> SamplingState:
        """Counts a sampled token in each of `rows` that is `counted`: all `[n]`."""

        def add(occurrences: jax.Array) -> jax.Array:
            amounts = jnp.where(counted, ONE_OUTPUT, 0)
            return occurrences.at[rows, jnp.where(counted, tokens, 0)].add(amounts)

        # Without the condition, every step would sort and scatter, and read the whole table before that.
        occurrences = lax.cond(jnp.any(counted), add, lambda unchanged: unchanged, self.occurrences)
        return replace(self, occurrences=occurrences)


def apply_row_updates(state: SamplingState, packed: jax.Array) -> SamplingState:
    """Replaces the parameters of the rows in `packed`, see `pack_row_updates`."""

    def unpack(words: jax.Array, kind: FieldKind) -> jax.Array:
        match kind:
            case FieldKind.INT32:
                return words
            case FieldKind.FLOAT32:
                return lax.bitcast_convert_type(words, jnp.float32)
            case FieldKind.UINT32:
                return lax.bitcast_convert_type(words, jnp.uint32)

    rows = packed[:, 0]
    new = {field.name: unpack(packed[:, field.words], field.kind) for field in FIELDS}
    new["seed_low"], new["seed_high"] = new.pop("seed").T
    old = {name: state.__dict__[name] for name in new}
    return replace(state, **{name: old[name].at[rows].set(new[name].reshape(-1, *old[name].shape[1:])) for name in new})


def set_occurrences(state: SamplingState, row: jax.Array, occurrences: jax.Array) -> SamplingState:
    return replace(state, occurrences=state.occurrences.at[row].set(occurrences))
