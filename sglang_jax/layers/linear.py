"""Linear layers: a matrix and a bias."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from sglang_jax.architectures.tensor_names import ParameterKind, Part
from sglang_jax.layers.matrix import matrix_for
from sglang_jax.layers.parameter import Sizes, parameter
from sglang_jax.layers.part import PartOptions
from sglang_jax.layers.sharding import MESH_AXIS


class Linear(nnx.Module):
    """`x [T, *inputs]` → `[T, *outputs]` in the dtype of x, rounded once, after the bias. The product rounds x to the
    dtype of the weights. Several output axes join several matrices (`parts`) in one product: (gate or up,
    intermediate), or (KV head, its queries + key + value, head_dim), so that a cut along one of them is a
    tensor-parallel shard."""

    def __init__(
        self, inputs: Sizes, outputs: Sizes, parts: Sequence[Part], options: PartOptions, *, bias: bool = False
    ) -> None:
        self.matrix = matrix_for(inputs, outputs, parts, options)
        self.bias = parameter(outputs, options.dtype, *parts, kind=ParameterKind.BIAS) if bias else None
        # A shard has fewer outputs.
        self.outputs = tuple(-1 if MESH_AXIS[axis] else size for axis, size in outputs)

    def __call__(self, x: jax.Array, *, of_outputs: bool = False) -> jax.Array:
        """`of_outputs`: see `Matrix.multiply`."""
        product = self.matrix.multiply(x, of_outputs=of_outputs).reshape(x.shape[0], *self.outputs)
        if self.bias is not None:
            product = product + self.bias[...].astype(jnp.float32)
        return product.astype(x.dtype)
