"""Parameters that know their axes, and the one matrix product that all layers use."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from sglang_jax.layers.sharding import Axis

_LEAST_ROWS = 2
"""XLA's CPU backend multiplies one bfloat16 row by widening the whole matrix first: ten times the time of two rows."""


class Parameter(nnx.Param[jax.Array]):
    """A weight with the meaning of each of its axes. It is a shape until weights are loaded."""

    axes: tuple[Axis, ...]


Sizes = Sequence[tuple[Axis, int]]


def parameter(sizes: Sizes, dtype: jnp.dtype) -> Parameter:
    """A parameter yet without a value."""
    axes, shape = zip(*sizes, strict=True)
    return Parameter(jax.ShapeDtypeStruct(shape, dtype), axes=axes)


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x [T, *in]` by `kernel [*in, *out]` → float32 `[T, *out]`; sums are float32 whatever the inputs.

    float32 inputs are multiplied exactly, not in the accelerator's reduced precision.
    """
    inputs = x.ndim - 1
    if x.dtype == jnp.float32:
        return jnp.tensordot(x, kernel, axes=inputs, precision=jax.lax.Precision.HIGHEST)
    rows = x.shape[0]
    if rows < _LEAST_ROWS:
        x = jnp.pad(x, ((0, _LEAST_ROWS - rows), *[(0, 0)] * inputs))
    return jnp.tensordot(x, kernel, axes=inputs, preferred_element_type=jnp.float32)[:rows]
