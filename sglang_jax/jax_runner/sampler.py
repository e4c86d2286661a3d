"""Samples one token for each row of logits.

Everything is an array indexed by row: a new mix of sampling parameters compiles nothing. What costs time runs under a
`lax.cond` on "some row of this batch needs it", so that a greedy batch pays for one maximum over the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sglang_jax.jax_runner.filters import Filters, Near, has_near, largest_kept, largest_kept_on_tpu
from sglang_jax.jax_runner.noise import gumbel_noise
from sglang_jax.jax_runner.sampling_state import SamplingState
from sglang_jax.kernels.kept_distance_pallas import fits
from sglang_jax.runner.plan import INVALID_TOKEN
from sglang_jax.runner.row_updates import ONE_OUTPUT

_LEAST_TEMPERATURE = np.float32(1e-20)
_LARGEST_BLOCK, _LEAST_BLOCK = 256, 16
"""Tokens of a block of `first_argmax`. With fewer, the largest values of all blocks would be nearly a vocabulary."""


def sample(
    logits: jax.Array,
    state: SamplingState,
    rows: jax.Array,
    kv_lens: jax.Array,
    active: jax.Array,
    masked: Masked | None = None,
) -> jax.Array:
    """Samples tokens, int32 `[n]`; `INVALID_TOKEN` for a row with a logit that is not finite.

    Order: mask of tokens, logit bias, mask of stop ids, penalties, temperature, top-k, top-p, min-p, Gumbel-max. Each
    filter works on what the one before it kept, renormalised. Tokens that tie with the least likely one kept are kept
    as well, so that no filter depends on an order of equal logits; of tokens that tie at the end the lowest id wins.

    **Arguments:**

    - `logits`: float32 `[n, vocab]`.
    - `state`: of all rows; `rows` int32 `[n]` says which row each line of logits belongs to.
    - `kv_lens`: int32 `[n]`, position of the token to be sampled; with the row's seed it keys the noise.
    - `active`: bool `[n]`. What other lines ask for is not computed, and their tokens mean nothing.
    - `masked`: which tokens may be sampled; None for all.
    """
    if masked is None:
        finite = are_finite(largest_logit(logits), jnp.min(logits, axis=-1))
    else:
        finite = masked.finite
        logits = jnp.where(masked.allowed, logits, -jnp.inf)
    own = state.select(rows)
    asked = Asked.of(own, kv_lens, active, logits.shape[1])
    # Around all the rest: whatever may change logits has them copied first, needed or not.
    tokens = lax.cond(
        asked.anything(),
        lambda: adjust_and_sample(logits, own, asked, rows, kv_lens),
        lambda: first_argmax(logits),
    )
    return only_finite(tokens, finite, logits.shape[1])


class Masked(NamedTuple):
    """What the second part of a step knows of its logits.

    - `allowed`: bool `[n, vocab]`, tokens that may be sampled, one at least of each active line.
    - `finite`: bool `[n]`, whether all logits of a line are: the first part has looked at each.
    """

    allowed: jax.Array
    finite: jax.Array


def largest_logit(logits: jax.Array) -> jax.Array:
    """The largest of each line `[n, vocab]`, infinity where one is NaN: reductions do not keep NaN everywhere."""
    return jnp.max(jnp.where(jnp.isnan(logits), jnp.inf, logits), axis=-1)


def are_finite(largest: jax.Array, least: jax.Array) -> jax.Array:
    """Whether all logits of lines are, by the largest and the least of each: bool `[n]`."""
    return jnp.isfinite(largest) & jnp.isfinite(least)


def only_finite(tokens: jax.Array, finite: jax.Array, vocab_size: int) -> jax.Array:
    """The tokens `[n]` of lines whose logits are finite, `INVALID_TOKEN` for others."""
    # Beyond the vocabulary: finite logits that overflowed under a bias or a penalty.
    return jnp.where(finite & (tokens < vocab_size), tokens, INVALID_TOKEN)


class Asked(NamedTuple):
    """Which active lines of logits ask for what: bool `[n]` each."""

    biased: jax.Array
    masked: jax.Array
    """Too short yet to stop."""
    penalised: jax.Array
    random: jax.Array

    @classmethod
    def of(cls, own: SamplingState, kv_lens: jax.Array, active: jax.Array, vocab_size: int) -> Asked:
        return cls(
            biased=active & (own.bias_ids[:, 0] < vocab_size),
            masked=active & (kv_lens - own.prompt_len < own.min_new_tokens),
            penalised=active & own.penalised,
            random=active & (own.temperature > 0.0),
        )

    def anything(self) -> jax.Array:
        """bool scalar: some line asks for more than its largest logit."""
        return jnp.any(self.biased | self.masked | self.penalised | self.random)


def adjust_and_sample(
    logits: jax.Array, own: SamplingState, asked: Asked, rows: jax.Array, kv_lens: jax.Array
) -> jax.Array:
    """What `sample` does for lines of which some ask for something: int32 `[n]`, the vocabulary's size or more where
    no token has the largest logit."""
    logits = _add_bias(logits, own, asked.biased)
    logits = _mask_stop_ids(logits, own, rows, asked.masked)
    logits = _penalise(logits, own, rows, asked.penalised)
    # Read by several reductions: without the barrier each would compute the whole chain again.
    logits = lax.optimization_barrier(logits)
    greedy_tokens = first_argmax(logits)
    return lax.cond(
        jnp.any(asked.random),
        lambda: jnp.where(asked.random, _gumbel_argmax(logits, own, kv_lens, asked.random), greedy_tokens),
        lambda: greedy_tokens,
    )


def first_argmax(values: jax.Array) -> jax.Array:
    """Index of the largest value of each row `[n, vocab]`, the lowest of equals: int32 `[n]`.

    A row with a NaN gives an index outside the vocabulary.
    """
    return lax.platform_dependent(values, cpu=_first_argmax_by_blocks, default=_first_argmax)


def _first_argmax(values: jax.Array) -> jax.Array:
    """By two plain reductions, which compilers vectorise; `jnp.argmax` is one over pairs."""
    largest = jnp.max(values, axis=-1, keepdims=True)
    places = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    return jnp.min(jnp.where(values == largest, places, values.shape[-1]), axis=-1)


def _first_argmax_by_blocks(values: jax.Array) -> jax.Array:
    """Reads the values once: XLA's CPU backend would write a second reduction's operands out first.

    Finds each block's largest value, the first block that holds the row's largest, and the place in that block. A
    vocabulary that no block size divides goes through the plain reductions.
    """
    rows, vocab_size = values.shape
    block_size = math.gcd(vocab_size, _LARGEST_BLOCK)
    if block_size < _LEAST_BLOCK:
        return _first_argmax(values)
    blocks = values.reshape(rows, vocab_size // block_size, block_size)
    block = _first_argmax(jnp.max(blocks, axis=-1))
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1, mode="clip")[:, 0]
    return block * block_size + _first_argmax(inside)


def _when(predicate: jax.Array, change: Callable[[jax.Array], jax.Array], values: jax.Array) -> jax.Array:
    """`change(values)` if the scalar `predicate` holds, else `values`."""
    return lax.cond(predicate, change, lambda unchanged: unchanged, values)


def _add_bias(logits: jax.Array, own: SamplingState, biased: jax.Array) -> jax.Array:
    lines = jnp.arange(logits.shape[0])[:, None]
    # A line that is not active has what it asks for added as well: its token means nothing.
    return _when(jnp.any(biased), lambda x: x.at[lines, own.bias_ids].add(own.bias_values, mode="drop"), logits)


def _mask_stop_ids(logits: jax.Array, own: SamplingState, rows: jax.Array, masked: jax.Array) -> jax.Array:
    def mask(x: jax.Array) -> jax.Array:
        # Not outside the condition, where every step would read the table of all rows.
        stop_ids = jnp.where(masked[:, None], own.stop_ids[rows], x.shape[1])
        return x.at[jnp.arange(x.shape[0])[:, None], stop_ids].set(-jnp.inf, mode="drop")

    return _when(jnp.any(masked), mask, logits)


def _penalise(logits: jax.Array, own: SamplingState, rows: jax.Array, penalised: jax.Array) -> jax.Array:
    """Repetition penalty of CTRL (Keskar et al. 2019), then OpenAI's frequency and presence penalties."""

    def penalise(x: jax.Array) -> jax.Array:
        occurrences = own.occurrences[rows]
        outputs = occurrences // ONE_OUTPUT
        repetition = jnp.where(occurrences > 0, own.repetition_penalty[:, None], 1.0)
        x = jnp.where(x > 0, x / repetition, x * repetition)
        x = x - own.frequency_penalty[:, None] * outputs
        return x - jnp.where(outputs > 0, own.presence_penalty[:, None], 0.0)

    return _when(jnp.any(penalised), penalise, logits)


def _gumbel_argmax(logits: jax.Array, own: SamplingState, kv_lens: jax.Array, random: jax.Array) -> jax.Array:
    """Samples by the Gumbel-max trick among the tokens that the filters keep: int32 `[n]`."""
    vocab_size = logits.shape[1]
    temperature = jnp.maximum(jnp.where(random, own.temperature, 1.0), _LEAST_TEMPERATURE)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    distances = lax.optimization_barrier((largest - logits) / temperature[:, None])
    filters = Filters(own.top_k, own.top_p, own.min_p, random)

    def among_all(kept: jax.Array) -> jax.Array:
        noise = gumbel_noise(own.seed, kv_lens, lax.broadcasted_iota(jnp.int32, (1, vocab_size), 1))
        return first_argmax(jnp.where(distances <= kept[:, None], noise - distances, -jnp.inf))

    def search_all() -> jax.Array:
        return among_all(largest_kept(distances, None, filters))

    def search_near() -> jax.Array:
        near = lax.cond(jnp.any(filters.cut(vocab_size)), lambda: Near.of(distances), lambda: Near.none(len(distances)))
        kept = largest_kept(distances, near, filters)

        def among_near() -> jax.Array:
            noise = gumbel_noise(own.seed, kv_lens, near.tokens)
            values = jnp.where(near.distances <= kept[:, None], noise - near.distances, -jnp.inf)
            best = jnp.max(values, axis=-1, keepdims=True)
            return jnp.min(jnp.where(values == best, near.tokens, vocab_size), axis=-1)

        return lax.cond(jnp.all(~random | near.has_all(kept)), among_near, lambda: among_all(kept))

    def search_in_vector_memory() -> jax.Array:
        return among_all(largest_kept_on_tpu(distances, filters)) if fits(vocab_size) else search_all()

    on_cpu = search_near if has_near(vocab_size) else search_all
    return lax.platform_dependent(cpu=on_cpu, tpu=search_in_vector_memory, default=search_all)
