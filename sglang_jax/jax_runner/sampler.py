"""Samples one token for each row of logits. All parameters are arrays indexed by row, so no mix of them compiles a
program. Expensive parts run only if some row of the batch needs them, so a greedy batch only computes a maximum."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sglang_jax.jax_runner.filters import Filters, Near, has_near, largest_kept, largest_kept_on_tpu
from sglang_jax.jax_runner.sampling_state import SamplingState
from sglang_jax.kernels.kept_distance_pallas import fits
from sglang_jax.runner.plan import INVALID_TOKEN
from sglang_jax.runner.row_updates import ONE_OUTPUT

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)

_MIN_TEMPERATURE = np.float32(1e-20)
_LARGEST_BLOCK, _MIN_BLOCK = 256, 16
"""Maximum and minimum tokens of a block of `first_argmax`. Smaller ones would be nearly as many as the tokens."""


def sample(
    logits: jax.Array,
    state: SamplingState,
    rows: jax.Array,
    kv_lens: jax.Array,
    active: jax.Array,
    masked: LineMasks | None = None,
) -> jax.Array:
    """Samples tokens, int32 `[n]`; `INVALID_TOKEN` for a row with a logit that is not finite.

    Order: mask of tokens, logit bias, mask of stop ids, penalties, temperature, top-k, top-p, min-p, Gumbel-max. Each
    filter applies to the tokens that the previous one kept, renormalised. Tokens that tie with the least likely kept
    one are kept, too, so filters do not depend on the order of equal logits; among tokens that tie at the end, the
    lowest id wins.

    - `logits`: float32 `[n, vocab]`; `state`: of all rows; `rows`: int32 `[n]`, the row of each line of logits.
    - `kv_lens`: int32 `[n]`, position of the token to sample, which keys the noise together with the row's seed.
    - `active`: bool `[n]`. The parameters of other lines are ignored, and their tokens are arbitrary.
    """
    if masked is None:
        finite = are_finite(largest_logit(logits), jnp.min(logits, axis=-1))
    else:
        finite = masked.finite
        logits = jnp.where(masked.allowed, logits, -jnp.inf)
    own = state.select(rows)
    needs = LineNeeds.of(own, kv_lens, active, logits.shape[1])
    # One condition around all the rest, since operations that may change logits copy them first, needed or not.
    tokens = lax.cond(
        needs.anything(),
        lambda: adjust_and_sample(logits, own, needs, rows, kv_lens),
        lambda: first_argmax(logits),
    )
    return only_finite(tokens, finite, logits.shape[1])


class LineMasks(NamedTuple):
    """Masks for the second part of a step: the tokens that may be sampled, bool `[n, vocab]`, at least one per active
    line; and whether all logits of a line are finite, bool `[n]`, which the first part has checked."""

    allowed: jax.Array
    finite: jax.Array


def largest_logit(logits: jax.Array) -> jax.Array:
    """The largest logit of each line `[n, vocab]`; infinity if one is NaN, which reductions drop on some platforms."""
    return jnp.max(jnp.where(jnp.isnan(logits), jnp.inf, logits), axis=-1)


def are_finite(largest: jax.Array, least: jax.Array) -> jax.Array:
    """Whether all logits of each line are finite, by its largest and smallest: bool `[n]`."""
    return jnp.isfinite(largest) & jnp.isfinite(least)


def only_finite(tokens: jax.Array, finite: jax.Array, vocab_size: int) -> jax.Array:
    # A token beyond the vocabulary: finite logits overflowed under a bias or a penalty.
    return jnp.where(finite & (tokens < vocab_size), tokens, INVALID_TOKEN)


class LineNeeds(NamedTuple):
    """The active lines that need each operation: bool `[n]` each."""

    biased: jax.Array
    masked: jax.Array
    """Lines that are too short to stop."""
    penalised: jax.Array
    random: jax.Array

    @classmethod
    def of(cls, own: SamplingState, kv_lens: jax.Array, active: jax.Array, vocab_size: int) -> LineNeeds:
        return cls(
            biased=active & (own.bias_ids[:, 0] < vocab_size),
            masked=active & (kv_lens - own.prompt_len < own.min_new_tokens),
            penalised=active & own.penalised,
            random=active & (own.temperature > 0.0),
        )

    def anything(self) -> jax.Array:
        """Whether some line needs more than its largest logit, bool scalar."""
        return jnp.any(self.biased | self.masked | self.penalised | self.random)


def adjust_and_sample(
    logits: jax.Array, own: SamplingState, needs: LineNeeds, rows: jax.Array, kv_lens: jax.Array
) -> jax.Array:
    """`sample` for lines of which some need an operation: int32 `[n]`, at least the vocabulary size if no token has the
    largest logit."""
    logits = _add_bias(logits, own, needs.biased)
    logits = _mask_stop_ids(logits, own, rows, needs.masked)
    logits = _penalise(logits, own, rows, needs.penalised)
    # Several reductions read it: without the barrier, each would recompute the whole chain.
    logits = lax.optimization_barrier(logits)
    greedy_tokens = first_argmax(logits)
    return lax.cond(
        jnp.any(needs.random),
        lambda: jnp.where(needs.random, _gumbel_argmax(logits, own, kv_lens, needs.random), greedy_tokens),
        lambda: greedy_tokens,
    )


def first_argmax(values: jax.Array) -> jax.Array:
    """Index of the largest value of each row `[n, vocab]`, the lowest one of equal values: int32 `[n]`. Outside the
    vocabulary for a row with a NaN."""
    return lax.platform_dependent(values, cpu=_first_argmax_by_blocks, default=_first_argmax)


def _first_argmax(values: jax.Array) -> jax.Array:
    """`first_argmax` by two plain reductions, which compilers vectorise, while `jnp.argmax` is one over pairs."""
    largest = jnp.max(values, axis=-1, keepdims=True)
    places = lax.broadcasted_iota(jnp.int32, values.shape, values.ndim - 1)
    return jnp.min(jnp.where(values == largest, places, values.shape[-1]), axis=-1)


def _first_argmax_by_blocks(values: jax.Array) -> jax.Array:
    """`first_argmax` that reads the values once: it finds each block's largest value, the first block with the row's
    largest, and the place in that block. For a second reduction, XLA's CPU backend would write its operands to memory
    first. If no block size divides the vocabulary, it uses the plain reductions."""
    rows, vocab_size = values.shape
    block_size = math.gcd(vocab_size, _LARGEST_BLOCK)
    if block_size < _MIN_BLOCK:
        return _first_argmax(values)
    blocks = values.reshape(rows, vocab_size // block_size, block_size)
    block = _first_argmax(jnp.max(blocks, axis=-1))
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1, mode="clip")[:, 0]
    return block * block_size + _first_argmax(inside)


def _when(predicate: jax.Array, change: Callable[[jax.Array], jax.Array], values: jax.Array) -> jax.Array:
    return lax.cond(predicate, change, lambda unchanged: unchanged, values)


def _add_bias(logits: jax.Array, own: SamplingState, biased: jax.Array) -> jax.Array:
    lines = jnp.arange(logits.shape[0])[:, None]
    # Lines that are not active get their bias, too, as their tokens are arbitrary.
    return _when(jnp.any(biased), lambda x: x.at[lines, own.bias_ids].add(own.bias_values, mode="drop"), logits)


def _mask_stop_ids(logits: jax.Array, own: SamplingState, rows: jax.Array, masked: jax.Array) -> jax.Array:
    def mask(x: jax.Array) -> jax.Array:
        # Within the condition, so that not every step reads the table of all rows.
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
    """Samples among the tokens that the filters keep, by the Gumbel-max trick: int32 `[n]`."""
    vocab_size = logits.shape[1]
    temperature = jnp.maximum(jnp.where(random, own.temperature, 1.0), _MIN_TEMPERATURE)
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


def threefry_2x32(
    key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), of uint32 that
    broadcast together. Not that of `jax.random`, which puts the rounds into a loop on the CPU and first derives a key
    per row."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    left, right = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            left = left + right
            right = ((right << rotation) | (right >> (32 - rotation))) ^ left
        left = left + keys[(group + 1) % 3]
        right = right + keys[(group + 2) % 3] + np.uint32(group + 1)
    return left, right


def gumbel_noise(seeds: jax.Array, positions: jax.Array, tokens: jax.Array) -> jax.Array:
    """Standard Gumbel variates, float32 `[rows, m]`. The key is the request's seed, and the counter is (position, token
    id), so a row's noise depends neither on other rows nor on its place in the batch.

    `seeds` uint32 `[rows, 2]`, low word first; `positions` int32 `[rows]`; `tokens` int32 `[rows, m]`, or `[1, m]` for
    all.
    """
    shape = (positions.shape[0], tokens.shape[1])
    token_ids = jnp.broadcast_to(tokens.astype(jnp.uint32), shape)
    position_words = jnp.broadcast_to(positions.astype(jnp.uint32)[:, None], shape)
    bits, _ = threefry_2x32((seeds[:, :1], seeds[:, 1:]), (position_words, token_ids))
    # 23 bits plus a half step are strictly inside (0, 1), so both logarithms are finite.
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * np.float32(2.0**-23)
    return -jnp.log(-jnp.log(uniform))
