"""Forms that a loaded matrix may have, each with the product that reads it. Linear layers know no form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax

from sglang_jax.layers.parameter import Parameter, matmul, matmul_outputs_first


class WeightFormat(Protocol):
    """How a matrix lies in memory. Formats are compared by value: layers of equal formats share a trace."""

    def arrange(self, kernel: Parameter, inputs: int) -> None:
        """Changes a loaded kernel `[*in, *out]`, with `inputs` axes of input, on its one device, to this format."""
        ...

    def multiply(self, x: jax.Array, kernel: jax.Array, *, of_outputs: bool = False) -> jax.Array:
        """`x [T, *in]` by a kernel in this format → float32 `[T, *out]`. `of_outputs`: see `matmul_outputs_first`."""
        ...


@dataclass(frozen=True, slots=True)
class InputsFirst:
    """`[*in, *out]`, in which kernels are loaded and stored."""

    def arrange(self, kernel: Parameter, inputs: int) -> None:
        """It is in this format."""

    def multiply(self, x: jax.Array, kernel: jax.Array, *, of_outputs: bool = False) -> jax.Array:
        """See `matmul`."""
        return matmul(x, kernel)


@dataclass(frozen=True, slots=True)
class OutputsFirst:
    """`[*out, *in]`, which XLA's CPU backend reads at the speed of memory: see `PlatformForm`."""

    def arrange(self, kernel: Parameter, inputs: int) -> None:
        """Exchanges the sides."""
        order = (*range(inputs, len(kernel.axes)), *range(inputs))
        kernel.set_value(_reordered(kernel.get_value(), order))
        kernel.set_metadata(axes=tuple(kernel.axes[axis] for axis in order))

    def multiply(self, x: jax.Array, kernel: jax.Array, *, of_outputs: bool = False) -> jax.Array:
        """See `matmul_outputs_first`."""
        return matmul_outputs_first(x, kernel, of_outputs=of_outputs)


@partial(jax.jit, static_argnums=1)
def _reordered(array: jax.Array, order: tuple[int, ...]) -> jax.Array:
    return array.transpose(order)
