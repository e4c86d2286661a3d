"""Rotary position embedding (Su et al. 2021); frequencies come from `checkpoint.rotary`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sglang_jax.checkpoint.rotary import DynamicStretch, RotaryScaling


def rotary_tables(scaling: RotaryScaling, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32 `[T, head_dim / 2]`, of positions int32 `[T]`."""
    frequencies: jax.Array | NDArray[np.float32] = scaling.frequencies().astype(np.float32)
    stretch = scaling.dynamic_stretch()
    if stretch is not None:
        frequencies = frequencies * _multipliers(stretch, positions)
    angles = positions[:, None].astype(jnp.float32) * frequencies
    factor = scaling.attention_factor()
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotary_tables_once(scaling: RotaryScaling, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`rotary_tables` within a branch, which a compiler that recomputes values for each reader does not fuse. It is
    always taken, since no position is negative, but the compiler cannot know that."""
    found = jax.eval_shape(lambda: rotary_tables(scaling, positions))
    nothing = jax.tree.map(lambda table: jnp.zeros(table.shape, table.dtype), found)
    return jax.lax.cond(positions[0] >= 0, lambda: rotary_tables(scaling, positions), lambda: nothing)


def _multipliers(stretch: DynamicStretch, positions: jax.Array) -> jax.Array:
    """Multipliers of frequencies `[T, head_dim / 2]`: 1 within the original context."""
    excess = jnp.maximum(positions + 1 - stretch.original_max_position, 0).astype(jnp.float32)
    return jnp.exp(jnp.log1p(stretch.growth * excess)[:, None] * stretch.exponents.astype(np.float32))


def apply_rotary(x: jax.Array, cosines: jax.Array, sines: jax.Array) -> jax.Array:
    """Rotates `x [T, ..., head_dim]`, whose pairs are (i, i + head_dim / 2), by tables `[T, head_dim / 2]`."""
    middle = (1,) * (x.ndim - 2)
    cosines = cosines.reshape(cosines.shape[0], *middle, -1)
    sines = sines.reshape(sines.shape[0], *middle, -1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)
    return rotated.astype(x.dtype)


def apply_rotary_by_product(x: jax.Array, cosines: jax.Array, sines: jax.Array) -> jax.Array:
    """`apply_rotary` by a product, which on a TPU costs less than splitting and joining halves. A matrix of zeros, ones
    and minus ones moves each number's partner to its place, without changing a bit."""
    middle = (1,) * (x.ndim - 2)
    cosines, sines = (
        jnp.concatenate([table, table], axis=-1).reshape(len(table), *middle, x.shape[-1]) for table in (cosines, sines)
    )
    half = x.shape[-1] // 2
    partner = np.zeros((2 * half, 2 * half), np.float32)
    partner[np.arange(half) + half, np.arange(half)] = -1.0
    partner[np.arange(half), np.arange(half) + half] = 1.0
    others = jax.lax.dot_general(
        x,
        jnp.asarray(partner, x.dtype),
        (((x.ndim - 1,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return (x.astype(jnp.float32) * cosines + others * sines).astype(x.dtype)
