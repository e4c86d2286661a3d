"""The online softmax of both attention kernels (Milakov & Gimelshein 2018; FlashAttention, Dao et al. 2022).

Exponentials are powers of two. One float32 factor, applied to raw products of query and key, includes the score's
scale, the change of base and the scale of quantised keys; queries are not scaled, which would round them again. The
running maximum is that of raw products. Sums of weights are kept per lane and added up last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from sglang_jax.kernels.ragged_paged_attention.options import AttentionOptions
from sglang_jax.kernels.ragged_paged_attention.pallas.pages import Ref

LANES = 128
LOG2_E = 1.4426950408889634
MASKED = -1e30
"""Score of a key that a query must not see: finite, since infinities subtracted from each other are NaN."""

SCORE_UNIT, SOFT_CAP_FACTOR, OUTPUT_FACTOR, SINK = range(4)
"""Rows of `constants_per_head`."""

Softmax = tuple[jax.Array, jax.Array, jax.Array]
"""Over the keys so far: the largest score `[rows, 128]`, equal in all lanes; the sum of weights `[rows, 128]`, per
lane; the weighted sum of values `[rows, lanes]`."""


@dataclass(frozen=True, slots=True)
class StaticOptions:
    """The options that are compiled into the kernel."""

    window: int | None
    soft_cap: float | None
    sinks: bool


def static_options(options: AttentionOptions) -> StaticOptions:
    return StaticOptions(options.window, options.soft_cap, options.sinks is not None)


def lanes_of_values(lanes: int, options: AttentionOptions) -> int:
    """The lanes of pages of `lanes` that a weighted sum of values takes, in whole tiles."""
    return lanes if options.value_dim is None else -(-options.value_dim // LANES) * LANES


def type_of_products(storage: jnp.dtype) -> jnp.dtype:
    """The type of the factors of products. bfloat16 represents 8-bit keys and values exactly."""
    return jnp.dtype(jnp.float32) if storage == jnp.float32 else jnp.dtype(jnp.bfloat16)


def constants_per_head(heads: int, kv_heads: int, scale: float, options: AttentionOptions) -> jax.Array:
    """Factors, float32 `[4, heads, 128]`, equal in all lanes. `SCORE_UNIT` turns a score into an exponent of two;
    `SOFT_CAP_FACTOR` multiplies a raw product before `tanh`, if scores are capped; `OUTPUT_FACTOR` is the scale of
    quantised values; `SINK` is the sink in units of a score."""
    if options.kv_scales is None:
        key_scales = value_scales = jnp.ones(heads, jnp.float32)
    else:
        key_scales, value_scales = jnp.repeat(options.kv_scales.astype(jnp.float32), heads // kv_heads, axis=0).T
    capped = options.soft_cap is not None
    unit = jnp.full(heads, LOG2_E) if capped else key_scales * (scale * LOG2_E)
    factor = key_scales * (scale / options.soft_cap) if options.soft_cap is not None else jnp.ones(heads)
    sinks = jnp.zeros(heads) if options.sinks is None else options.sinks.astype(jnp.float32) * LOG2_E / unit
    constants = jnp.stack([unit, factor, value_scales, sinks]).astype(jnp.float32)
    return jnp.broadcast_to(constants[:, :, None], (4, heads, LANES))


def start_softmax(per_head: Ref, shape: tuple[int, int], options: StaticOptions) -> Softmax:
    """A softmax over no keys, or only over the sink, for a weighted sum of values `[rows, lanes]`."""
    rows, lanes = shape
    if options.sinks:
        largest, total = per_head[SINK], jnp.full((rows, LANES), 1 / LANES, jnp.float32)
    else:
        largest, total = jnp.full((rows, LANES), MASKED, jnp.float32), jnp.zeros((rows, LANES), jnp.float32)
    return largest, total, jnp.zeros((rows, lanes), jnp.float32)


def finish_softmax(total: jax.Array, weighted: jax.Array, output_factor: jax.Array) -> jax.Array:
    """The attention output `[rows, lanes]`; 0 for a query that saw no key."""
    total = total.sum(axis=1, keepdims=True)
    return lanewise(jnp.multiply, weighted, output_factor / jnp.where(total > 0, total, 1.0))


def lanewise(function: Callable[..., jax.Array], matrix: jax.Array, *columns: jax.Array) -> jax.Array:
    """Applies a function to each 128 columns of `[rows, n * 128]` and to `columns`, which are `[rows, 128]`."""
    tiles = [function(matrix[:, start : start + LANES], *columns) for start in range(0, matrix.shape[1], LANES)]
    return jnp.concatenate(tiles, axis=1)


def largest_of_rows(matrix: jax.Array) -> jax.Array:
    """The maximum of each row: `[rows, n * 128]` → `[rows, 1]`."""
    tiles = [matrix[:, start : start + LANES] for start in range(0, matrix.shape[1], LANES)]
    return functools.reduce(jnp.maximum, tiles).max(axis=1, keepdims=True)


def sum_of_lane_tiles(matrix: jax.Array) -> jax.Array:
    """The sum of tiles of 128 lanes: `[rows, n * 128]` → `[rows, 128]`."""
    return sum(matrix[:, start : start + LANES] for start in range(0, matrix.shape[1], LANES))


def matmul_nt(left: jax.Array, right: jax.Array) -> jax.Array:
    """float32 `left [m, k] @ right [n, k].T`."""
    return _dot(left, right, 1)


def matmul(left: jax.Array, right: jax.Array) -> jax.Array:
    """float32 `left [m, k] @ right [k, n]`."""
    return _dot(left, right, 0)


def _dot(left: jax.Array, right: jax.Array, contracted: int) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dimensions = (((1,), (contracted,)), ((), ()))
    return jax.lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)
