"""How a loaded matrix may lie in memory, each way with the product that reads it. Layers know none of them."""

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
    """How a matrix lies in memory. Layouts are compared by value: layers of equal ones share a trace."""

    def arrange(self, kernel: Parameter, inputs: int) -> None:
        """Changes a loaded kernel `[*in, *out]`, with `inputs` axes of input, to this layout; a shape that stands for a
        kernel becomes that of the other layout."""
        ...

    def arrange_rows(self, rows: Parameter) -> None:
        """Changes what each output has, loaded as `[*out]`, so that it lies as what `multiply` returns."""
        ...

    def multiply(self, x: jax.Array, kernel: jax.Array, *, of_outputs: bool = False) -> jax.Array:
        """`x [T, *in]` by a kernel in this layout → float32 `[T, *out]`, or the same with axes of out made one.
        `of_outputs`: see `matmul_outputs_first`."""
        ...


@dataclass(frozen=True, slots=True)
class InputsFirst:
    """`[*in, *out]`, in which kernels are loaded and stored."""

    def arrange(self, kernel: Parameter, inputs: int) -> None:
        """It is in this layout."""

    def arrange_rows(self, rows: Parameter) -> None:
        """It lies so."""

    def multiply(self, x: jax.Array, kernel: jax.Array, *, of_outputs: bool = False) -> jax.Array:
        """See `matmul`."""
        return matmul(x, kernel)


@dataclass(frozen=True, slots=True)
class Table:
    """Embeddings `[out, in]` that are the head too."""

    def arrange(self, kernel: Parameter, inputs: int) -> None:
        """Embeddings are in this layout."""

    def arrange_rows(self, rows: Parameter) -> None:
        """It lies so."""

    def multiply(self, x: jax.Array, kernel: jax.Array, *, of_outputs: bool = False) -> jax.Array:
        """See `matmul`."""
        return matmul(x, kernel.T)


@dataclass(frozen=True, slots=True)
class OutputsFirst:
    """`[*out, *in]`, which XLA's CPU backend reads at the speed of memory: see `PlatformForm`."""

    def arrange(self, kernel: Parameter, inputs: int) -> None:
        """Exchanges the sides."""
        order = (*range(inputs, len(kernel.axes)), *range(inputs))
        _rewrite(kernel, order, [(axis,) for axis in order])

    def arrange_rows(self, rows: Parameter) -> None:
        """It lies so."""

    def multiply(self, x: jax.Array, kernel: jax.Array, *, of_outputs: bool = False) -> jax.Array:
        """See `matmul_outputs_first`."""
        return matmul_outputs_first(x, kernel, of_outputs=of_outputs)


@dataclass(frozen=True, slots=True)
class Matrices:
    """`[in, out]`, or gate and up as `[2, in, out]`: the last two axes, which a TPU keeps in tiles, are those of a
    product.

    Of a kernel with more axes on one side the compiler makes a copy, at each step, in the tiles that a product wants.
    Outputs become one axis, in which those of one device lie together. Of gate and up each device has a part, so that
    they stay apart; but they are one product still: of two the compiler computes one within the product that reads it,
    which at 256 rows costs more than it saves.
    """

    def arrange(self, kernel: Parameter, inputs: int) -> None:
        """Makes one axis of the inputs and one of the outputs."""
        outer, columns = _outputs(kernel, inputs)
        rows = range(inputs)
        _rewrite(kernel, (*outer, *rows, *columns), [*[(axis,) for axis in outer], tuple(rows), tuple(columns)])

    def arrange_rows(self, rows: Parameter) -> None:
        """Makes one axis of the outputs of each matrix."""
        outer, columns = _outputs(rows, 0)
        _rewrite(rows, (*outer, *columns), [*[(axis,) for axis in outer], tuple(columns)])

    def multiply(self, x: jax.Array, kernel: jax.Array, *, of_outputs: bool = False) -> jax.Array:
        """See `matmul`."""
        return matmul(x.reshape(x.shape[0], -1), jnp.moveaxis(kernel, -2, 0))


def _outputs(kernel: Parameter, inputs: int) -> tuple[list[int], list[int]]:
    """Which axes of a kernel with so many of inputs stay apart, and which become one."""
    outer = [axis for axis, meaning in enumerate(kernel.axes) if meaning is Axis.GATE_OR_UP]
    return outer, [axis for axis in range(inputs, len(kernel.axes)) if axis not in outer]


def _rewrite(kernel: Parameter, order: tuple[int, ...], groups: Sequence[tuple[int, ...]]) -> None:
    """Puts a kernel's axes in another order, with those of a group made one, which is spread as the first of them."""
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
