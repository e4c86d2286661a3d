"""Root-mean-square normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from sglang_jax.layers.parameter import parameter
from sglang_jax.layers.sharding import Axis


class RMSNorm(nnx.Module):
    """RMSNorm (Zhang & Sennrich 2019) over the last axis, computed in float32."""

    def __init__(self, axis: Axis, size: int, epsilon: float, dtype: jnp.dtype) -> None:
        self.scale = parameter([(axis, size)], dtype)
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., size]` → the same shape and type."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return self.scale[...] * wide.astype(x.dtype)

    def add(self, x: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Adds x to the residual stream; returns (the sum normalised, the sum)."""
        total = x + residual
        return self(total), total
