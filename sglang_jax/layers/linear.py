"""Linear layers: kernels are loaded as [in, out], and either side may have several axes."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from sglang_jax.architectures.tensor_names import Kind, Part
from sglang_jax.layers.block_matrix import BlockMatrix
from sglang_jax.layers.parameter import Sizes, parameter
from sglang_jax.layers.weight_format import InputsFirst, WeightFormat


class Linear(nnx.Module):
    """`x [T, *inputs]` → `[T, *outputs]` of x's type, rounded to it once, after the bias.

    The product rounds x to the type of the weights.

    Several output axes make one product of several matrices: (gate or up, intermediate), or
    (kv head, its queries + key + value, head_dim), laid out so that a cut along one axis is a tensor-parallel shard.
    `parts` are those matrices.

    `blocks` is the same matrix in blocks, outputs in the order of the kernel's, where it is kept so too.
    """

    def __init__(self, inputs: Sizes, outputs: Sizes, parts: Sequence[Part], *, bias: bool, dtype: jnp.dtype) -> None:
        self.kernel = parameter([*inputs, *outputs], dtype, *parts)
        self.bias = parameter(outputs, dtype, *parts, kind=Kind.BIAS) if bias else None
        self.inputs = len(inputs)
        self.outputs = tuple(size for _, size in outputs)
        self.format: WeightFormat = InputsFirst()
        self.blocks: BlockMatrix | None = nnx.data(None)

    def arrange(self, wanted: WeightFormat) -> None:
        """Changes the kernel, once loaded, to another format."""
        wanted.arrange(self.kernel, self.inputs)
        self.format = wanted

    def __call__(self, x: jax.Array, *, of_outputs: bool = False) -> jax.Array:
        """`of_outputs`: see `WeightFormat.multiply`."""
        kernel = self.kernel[...]
        rounded = x.astype(kernel.dtype)
        if self.blocks is not None and self.blocks.serves(len(x)):
            product = self.blocks.multiply(rounded)
        else:
            product = self.format.multiply(rounded, kernel, of_outputs=of_outputs)
        product = product.reshape(x.shape[0], *self.outputs)
        if self.bias is not None:
            product = product + self.bias[...].astype(jnp.float32)
        return product.astype(x.dtype)
