"""Parameters that know their axes, and the matrix products that all layers use."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.tensor_names import ParameterKind, Part
from sglang_jax.checkpoint.reader import Role

_MIN_ROWS = 2
"""Minimum rows of a bfloat16 product. XLA's CPU backend widens the whole matrix for one row, which takes ten times as
long as two rows."""

_MAX_ROWS_ON_THE_RIGHT = 32
"""Maximum rows that `matmul_outputs_first` puts on the right side of the product. Measured: then all products of
SmolLM2-135M take 16 ms instead of 20 at 16 rows, as long at 32, and 43 ms instead of 35 at 64."""


class Parameter(nnx.Param[jax.Array]):
    """A weight with named axes, which is a shape until weights are loaded. `parts`: the manifest's names of the parts
    that it consists of; none if no tensor of a checkpoint fills it. `role`: which array of a stored matrix it is; None
    for plain numbers."""

    axes: tuple[Axis, ...]
    parts: tuple[Part, ...]
    kind: ParameterKind
    role: Role | None


Sizes = Sequence[tuple[Axis, int]]


def parameter(
    sizes: Sizes, dtype: jnp.dtype, *parts: Part, kind: ParameterKind = ParameterKind.WEIGHT, role: Role | None = None
) -> Parameter:
    axes, shape = zip(*sizes, strict=True)
    return Parameter(jax.ShapeDtypeStruct(shape, dtype), axes=axes, parts=parts, kind=kind, role=role)


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x [T, *in]` times `kernel [*in, *out]` → float32 `[T, *out]`; sums are always float32, or int32 of int8. float32
    inputs are multiplied exactly, not in the accelerator's reduced precision."""
    inputs = x.ndim - 1
    if x.dtype == jnp.float32:
        return jnp.tensordot(x, kernel, axes=inputs, precision=jax.lax.Precision.HIGHEST)
    rows = x.shape[0]
    if rows < _MIN_ROWS:
        x = jnp.pad(x, ((0, _MIN_ROWS - rows), *[(0, 0)] * inputs))
    sums = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    return jnp.tensordot(x, kernel, axes=inputs, preferred_element_type=sums)[:rows]


def matmul_outputs_first(x: jax.Array, kernel: jax.Array, *, of_outputs: bool = False) -> jax.Array:
    """`matmul` with a kernel `[*out, *in]`, in the order that XLA's CPU backend reads at memory speed.

    That backend first packs the right side of every product into its kernels' order, and reads the left side in place.
    A step of few rows reads each weight once, so packing weights would cost more than the product: the weights are on
    the left. With many rows, packing costs little, and the kernels prefer the larger side on the left.

    `of_outputs`: x is an elementwise function of the result of another such product. With weights on the left, that is
    in memory as `[out, T]`, and so is x: for 32 rows, reading it the other way took 105 us instead of 61.
    """
    inputs = x.ndim - 1
    rows, outputs = x.shape[0], kernel.shape[: kernel.ndim - inputs]
    # Merged axes: the compiler would make a transposed copy of a kernel with several axes.
    x, kernel = x.reshape(rows, -1), kernel.reshape(math.prod(outputs), -1)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    if rows < _MIN_ROWS and x.dtype != jnp.float32:
        x = jnp.pad(x, ((0, _MIN_ROWS - rows), (0, 0)))
    if x.shape[0] > _MAX_ROWS_ON_THE_RIGHT:
        left, right = x, kernel
    else:
        left, right = kernel, jax.lax.optimization_barrier(x.T).T if of_outputs else x
    product = jax.lax.dot_general(
        left, right, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    if left is kernel:
        # Without the barrier, the compiler removes the transposition and exchanges the sides.
        product = jax.lax.optimization_barrier(product).T
    return product[:rows].reshape(rows, *outputs)
