"""Parameters that know their axes, and the matrix products that all layers use."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.tensor_names import Kind, Part
from sglang_jax.checkpoint.reader import Role

_LEAST_ROWS = 2
"""XLA's CPU backend multiplies one bfloat16 row by widening the whole matrix first: ten times the time of two rows."""

_MOST_ROWS_ON_THE_RIGHT = 32
"""Of how many rows `matmul_outputs_first` still makes the right side of the product. Measured: all products of
SmolLM2-135M take 16 ms in place of 20 at 16 rows, as long at 32, and 43 in place of 35 at 64."""


class Parameter(nnx.Param[jax.Array]):
    """A weight with the meaning of each of its axes, and the parts of the model that it is made of, as the manifest
    calls them: none where it is not read from a checkpoint's tensors. It is a shape until weights are loaded.

    `role`: which of the arrays of a stored matrix it is; None for plain numbers."""

    axes: tuple[Axis, ...]
    parts: tuple[Part, ...]
    kind: Kind
    role: Role | None


Sizes = Sequence[tuple[Axis, int]]


def parameter(
    sizes: Sizes, dtype: jnp.dtype, *parts: Part, kind: Kind = Kind.WEIGHT, role: Role | None = None
) -> Parameter:
    """A parameter yet without a value."""
    axes, shape = zip(*sizes, strict=True)
    return Parameter(jax.ShapeDtypeStruct(shape, dtype), axes=axes, parts=parts, kind=kind, role=role)


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


def matmul_outputs_first(x: jax.Array, kernel: jax.Array, *, of_outputs: bool = False) -> jax.Array:
    """`matmul` by a kernel `[*out, *in]`, in the form that XLA's CPU backend reads at the speed of memory.

    That backend packs the right side of every product into its kernels' order first, and reads the left side as it
    lies. A step of few rows reads each weight once, so that packing weights costs more than the product: the weights
    are on the left. Of many rows packing costs little, and the kernels like more rows on the left.

    `of_outputs`: x comes, element by element, from another such product. With weights on the left that lies in memory
    as `[out, T]`, and what comes of it is left so: of 32 rows, reading it the other way took 105 us in place of 61.
    """
    inputs = x.ndim - 1
    rows, outputs = x.shape[0], kernel.shape[: kernel.ndim - inputs]
    # Matrices: of a kernel of several axes the compiler would make a transposed copy.
    x, kernel = x.reshape(rows, -1), kernel.reshape(math.prod(outputs), -1)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    if rows < _LEAST_ROWS and x.dtype != jnp.float32:
        x = jnp.pad(x, ((0, _LEAST_ROWS - rows), (0, 0)))
    if x.shape[0] > _MOST_ROWS_ON_THE_RIGHT:
        left, right = x, kernel
    else:
        left, right = kernel, jax.lax.optimization_barrier(x.T).T if of_outputs else x
    product = jax.lax.dot_general(
        left, right, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    if left is kernel:
        # Without the barrier the compiler takes away the transposition, and exchanges the sides for it.
        product = jax.lax.optimization_barrier(product).T
    return product[:rows].reshape(rows, *outputs)
