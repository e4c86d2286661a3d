"""Layouts of loaded matrices in memory, each with its product. Layers do not depend on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, Sharding

from sglang_jax.architectures.axes import Axis
from sglang_jax.layers.parameter import Parameter, matmul, matmul_outputs_first
from sglang_jax.layers.sharding import named_sharding


class Layout(Protocol):
    """The layout of a matrix in memory. Layouts are compared by value, so that layers with equal ones share a trace."""

    def repack(self, kernel: Parameter, inputs: int) -> None:
        """Changes a loaded kernel `[*in, *out]`, with `inputs` input axes, or its shape, to this layout."""
        ...

    def repack_rows(self, rows: Parameter) -> None:
        """Changes values per output, loaded as `[*out]`, to the layout of the result of `multiply`."""
        ...

    def multiply(self, x: jax.Array, kernel: jax.Array, *, of_outputs: bool = False) -> jax.Array:
        """`x [T, *in]` times a kernel in this layout → float32 `[T, *out]`, or int32 of int8. Output axes may be
        merged. `of_outputs`: see `matmul_outputs_first`."""
        ...


@dataclass(frozen=True, slots=True)
class InOutLayout:
    """`[*in, *out]`, the layout of loading and storing."""

    def repack(self, kernel: Parameter, inputs: int) -> None:
        pass

    def repack_rows(self, rows: Parameter) -> None:
        pass

    def multiply(self, x: jax.Array, kernel: jax.Array, *, of_outputs: bool = False) -> jax.Array:
        return matmul(x, kernel)


@dataclass(frozen=True, slots=True)
class Table:
    """Embeddings `[out, in]` that are also the head."""

    def repack(self, kernel: Parameter, inputs: int) -> None:
        pass

    def repack_rows(self, rows: Parameter) -> None:
        pass

    def multiply(self, x: jax.Array, kernel: jax.Array, *, of_outputs: bool = False) -> jax.Array:
        return matmul(x, kernel.T)


@dataclass(frozen=True, slots=True)
class OutInLayout:
    """`[*out, *in]`, which XLA's CPU backend reads at memory speed: see `PlatformLayout`."""

    def repack(self, kernel: Parameter, inputs: int) -> None:
        order = (*range(inputs, len(kernel.axes)), *range(inputs))
        _rewrite(kernel, order, [(axis,) for axis in order])

    def repack_rows(self, rows: Parameter) -> None:
        pass

    def multiply(self, x: jax.Array, kernel: jax.Array, *, of_outputs: bool = False) -> jax.Array:
        return matmul_outputs_first(x, kernel, of_outputs=of_outputs)


@dataclass(frozen=True, slots=True)
class TwoAxisLayout:
    """`[in, out]`, or gate and up as `[2, in, out]`: the last two axes, which a TPU stores in tiles, are those of a
    product. The compiler would copy a kernel with more axes on one side, in each step, to the tiles of a product.

    Outputs become one axis, in which those of a device are adjacent. Gate and up keep a separate axis, since each
    device has a part of both. They stay one product: of two, the compiler would compute one within the product that
    reads it, which at 256 rows costs more than it saves.
    """

    def repack(self, kernel: Parameter, inputs: int) -> None:
        outer, columns = _outputs(kernel, inputs)
        rows = range(inputs)
        _rewrite(kernel, (*outer, *rows, *columns), [*[(axis,) for axis in outer], tuple(rows), tuple(columns)])

    def repack_rows(self, rows: Parameter) -> None:
        outer, columns = _outputs(rows, 0)
        _rewrite(rows, (*outer, *columns), [*[(axis,) for axis in outer], tuple(columns)])

    def multiply(self, x: jax.Array, kernel: jax.Array, *, of_outputs: bool = False) -> jax.Array:
        return matmul(x.reshape(x.shape[0], -1), jnp.moveaxis(kernel, -2, 0))


def fill_up_columns(table: Parameter, multiple: int) -> None:
    """Fills up the last axis of a loaded table, or of its shape, with zeros to a multiple."""
    value = table.get_value()
    missing = -value.shape[-1] % multiple
    if not missing:
        return
    if isinstance(value, jax.ShapeDtypeStruct):
        table.set_value(jax.ShapeDtypeStruct((*value.shape[:-1], value.shape[-1] + missing), value.dtype))
    else:
        table.set_value(_filled_up(value, missing, value.sharding))


@partial(jax.jit, static_argnums=(1, 2))
def _filled_up(array: jax.Array, missing: int, placed: Sharding) -> jax.Array:
    filled = jnp.pad(array, (*[(0, 0)] * (array.ndim - 1), (0, missing)))
    return jax.lax.with_sharding_constraint(filled, placed)


def _outputs(kernel: Parameter, inputs: int) -> tuple[list[int], list[int]]:
    """The output axes of a kernel with `inputs` input axes that stay separate, and those that are merged."""
    outer = [axis for axis, meaning in enumerate(kernel.axes) if meaning is Axis.GATE_OR_UP]
    return outer, [axis for axis in range(inputs, len(kernel.axes)) if axis not in outer]


def _rewrite(kernel: Parameter, order: tuple[int, ...], groups: Sequence[tuple[int, ...]]) -> None:
    """Reorders a kernel's axes and merges each group into one axis, which is sharded like the group's first axis."""
    value = kernel.get_value()
    axes = tuple(kernel.axes[group[0]] for group in groups)
    shape = tuple(math.prod(value.shape[axis] for axis in group) for group in groups)
    if isinstance(value, jax.ShapeDtypeStruct):
        kernel.set_value(jax.ShapeDtypeStruct(shape, value.dtype))
    else:
        sharding = value.sharding
        placed = named_sharding(sharding.mesh, axes) if isinstance(sharding, NamedSharding) else sharding
        kernel.set_value(_rewritten(value, order, shape, placed))
    kernel.set_metadata(axes=axes)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _rewritten(array: jax.Array, order: tuple[int, ...], shape: tuple[int, ...], placed: Sharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(array.transpose(order).reshape(shape), placed)
