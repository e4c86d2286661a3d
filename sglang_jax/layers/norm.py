"""Norms: RMS norm and layer norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from sglang_jax.architectures.kinds.norm import NormConfig, NormKind
from sglang_jax.architectures.tensor_names import ParameterKind, Part
from sglang_jax.layers.parameter import Sizes, parameter


def divide_by_rms(x: jax.Array, eps: float) -> jax.Array:
    """float32 x divided by the root mean square of its last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


class Norm(nnx.Module):
    """A norm over the last axes, computed in float32: see `NormConfig`. `part`: None for a norm without a weight."""

    def __init__(self, sizes: Sizes, config: NormConfig, dtype: jnp.dtype, part: Part | None) -> None:
        dtype = jnp.dtype(jnp.float32) if config.weight_in_float32 else dtype
        self.scale = None if part is None else parameter(sizes, dtype, part)
        has_bias = part is not None and config.bias
        self.bias = parameter(sizes, dtype, part, kind=ParameterKind.BIAS) if has_bias else None
        self.shape, self.dtype = tuple(size for _, size in sizes), dtype
        self.kind = config.kind
        self.epsilon = config.eps
        self.weight_in_float32 = config.weight_in_float32
        self.replaces_sum = config.replaces_sum

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.weight
        found = self.scaled_by(scale, x, axes=tuple(range(-scale.ndim, 0)))
        return found if self.bias is None else (found + self.bias[...]).astype(x.dtype)

    @property
    def weight(self) -> jax.Array:
        """The weight, or ones."""
        return jnp.ones(self.shape, self.dtype) if self.scale is None else self.scale[...]

    def scaled_by(self, scale: jax.Array, x: jax.Array, *, axes: tuple[int, ...]) -> jax.Array:
        """The norm over `axes` with another scale, which broadcasts to the last axes of x."""
        wide = x.astype(jnp.float32)
        if self.kind is NormKind.LAYER:
            wide = wide - jnp.mean(wide, axis=axes, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=axes, keepdims=True) + self.epsilon)
        return (scale * wide).astype(x.dtype) if self.weight_in_float32 else scale * wide.astype(x.dtype)

    def add(self, x: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Adds x to the residual stream. Returns the normalised sum, and the stream: see `NormConfig`."""
        total = x + residual
        normed = self(total)
        return normed, normed if self.replaces_sum else total
