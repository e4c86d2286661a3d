"""The cut-offs of top-k and top-p on TPUs, as distances from the most likely token's logit, in one kernel.

A filter is a bisection over the bits of a float: 31 passes over a vocabulary. A program loads eight rows of logits into
vector memory once, and keeps them there with the weights of their tokens for all passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import MIB, current_vmem_limit

Ref = Any
"""A Pallas reference to memory; its type is not public."""

LINES = 8
"""Rows of logits per program: the lines of a tile."""
COLUMNS = 1024
"""Columns that are added at once, to this many partial sums: eight registers."""

_INFINITY_BITS = 0x7F800000
_BY_RANK, _BY_MASS = 1, 2
UNROLLED = 4


def fits(vocab_size: int) -> bool:
    """Whether the target is a TPU whose vector memory has room for eight rows of `vocab_size` tokens."""
    limit = current_vmem_limit()
    return limit is not None and _vmem_bytes(_padded(vocab_size)) <= limit


def kept_distance(
    distances: jax.Array, top_k: jax.Array, top_p: jax.Array, by_rank: jax.Array, by_mass: jax.Array
) -> jax.Array:
    """The largest distance that top-k and then top-p keep, float32 `[n]`; infinity for rows without a filter. Top-k
    takes the smallest distance that includes `top_k` tokens; top-p then the smallest one that includes `top_p` of the
    probability of the remaining tokens (Holtzman et al. 2019).

    `distances`: float32 `[n, vocab]`, `(largest logit - logit) / temperature`; `top_k` int32, `top_p` float32, `[n]`;
    `by_rank`, `by_mass`, bool `[n]`: whether a row has that filter.
    """
    lines, vocab_size = distances.shape
    programs, width = pl.cdiv(lines, LINES), _padded(vocab_size)
    filled = jnp.pad(distances, ((0, programs * LINES - lines), (0, width - vocab_size)), constant_values=jnp.inf)

    def of_lines(values: jax.Array) -> jax.Array:
        return jnp.pad(values, (0, programs * LINES - lines))[:, None]

    # 0 turns a filter off.
    ranks = of_lines(jnp.where(by_rank, top_k, 0).astype(jnp.int32))
    shares = of_lines(jnp.where(by_mass, top_p, 0.0).astype(jnp.float32))
    filters = jnp.where(ranks > 0, _BY_RANK, 0) | jnp.where(shares > 0.0, _BY_MASS, 0)
    filters_of_programs = lax.reduce(filters.reshape(programs, LINES), jnp.int32(0), lax.bitwise_or, (1,))
    column = pl.BlockSpec((LINES, 1), lambda program, *_: (program, 0))
    kept = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(programs,),
            in_specs=[pl.BlockSpec((LINES, width), lambda program, *_: (program, 0)), column, column],
            out_specs=column,
            scratch_shapes=[pltpu.VMEM((LINES, width), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((programs * LINES, 1), jnp.float32),
        # Addresses depend only on the program's number, so there is nothing to check.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=_vmem_bytes(width), disable_bounds_checks=True
        ),
        name="kept_distance",
    )(filters_of_programs, filled, ranks, shares)
    return kept[:lines, 0]


def _padded(vocab_size: int) -> int:
    step = COLUMNS * UNROLLED
    return pl.cdiv(vocab_size, step) * step


def _vmem_bytes(width: int) -> int:
    """For the distances of two programs, for weights, and for the rest."""
    return 3 * LINES * width * 4 + MIB


def _kernel(filters_of_programs: Ref, distances: Ref, ranks: Ref, shares: Ref, kept: Ref, weights: Ref) -> None:
    filters = filters_of_programs[pl.program_id(0)]
    kept[...] = jnp.full(kept.shape, jnp.inf, jnp.float32)

    @pl.when(filters & _BY_RANK != 0)
    def _() -> None:
        def amount(limits: jax.Array) -> jax.Array:
            return _sum(distances.shape[1], jnp.int32, lambda at: (distances[:, at] <= limits).astype(jnp.int32))

        rank = ranks[...]
        kept[...] = jnp.where(rank > 0, _smallest_distance(lambda limits: amount(limits) >= rank), jnp.inf)

    @pl.when(filters & _BY_MASS != 0)
    def _() -> None:
        most = kept[...]

        def weigh(at: pl.Slice) -> jax.Array:
            values = distances[:, at]
            weights[:, at] = weight = jnp.where(values <= most, jnp.exp(-values), 0.0)
            return weight

        wanted = shares[...] * _sum(distances.shape[1], jnp.float32, weigh)

        def amount(limits: jax.Array) -> jax.Array:
            return _sum(
                distances.shape[1], jnp.float32, lambda at: jnp.where(distances[:, at] <= limits, weights[:, at], 0.0)
            )

        found = jnp.minimum(_smallest_distance(lambda limits: amount(limits) >= wanted), most)
        kept[...] = jnp.where(shares[...] > 0.0, found, most)


def _sum(width: int, dtype: Any, part: Callable[[pl.Slice], jax.Array]) -> jax.Array:

    def add(number: jax.Array, total: jax.Array) -> jax.Array:
        for place in range(UNROLLED):
            first = pl.multiple_of((number * UNROLLED + place) * COLUMNS, COLUMNS)
            total = total + part(pl.ds(first, COLUMNS))
        return total

    zeros = jnp.zeros((LINES, COLUMNS), dtype)
    return jnp.sum(lax.fori_loop(0, width // (COLUMNS * UNROLLED), add, zeros), axis=1, keepdims=True)


def _smallest_distance(enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The smallest float32 in [0, infinity], `[8, 1]`, for which the monotone `enough` holds."""

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        holds = enough(lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(holds, low, middle + 1), jnp.where(holds, middle, high)

    bounds = (jnp.zeros((LINES, 1), jnp.int32), jnp.full((LINES, 1), _INFINITY_BITS, jnp.int32))
    _, least = lax.fori_loop(0, 31, halve, bounds)
    return lax.bitcast_convert_type(least, jnp.float32)
