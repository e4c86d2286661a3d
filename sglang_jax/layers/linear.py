"""Linear layers: kernels are [in, out], or [out, in] once changed to it, and either side may have several axes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from sglang_jax.layers.parameter import Sizes, matmul, matmul_outputs_first, parameter, put_outputs_first


class Linear(nnx.Module):
    """`x [T, *inputs]` → `[T, *outputs]` of x's type, rounded to it once, after the bias.

    The product rounds x to the type of the weights.

    Several output axes make one product of several matrices: (gate or up, intermediate), or
    (kv head, its queries + key + value, head_dim), laid out so that a cut along one axis is a tensor-parallel shard.
    """

    def __init__(self, inputs: Sizes, outputs: Sizes, *, bias: bool, dtype: jnp.dtype) -> None:
        self.kernel = parameter([*inputs, *outputs], dtype)
        self.bias = parameter(outputs, dtype) if bias else None
        self.inputs = len(inputs)
        self.outputs_first = False

    def put_outputs_first(self) -> None:
        """Changes the kernel, once loaded, to `[*outputs, *inputs]`."""
        put_outputs_first(self.kernel, self.inputs)
        self.outputs_first = True

    def __call__(self, x: jax.Array, *, of_outputs: bool = False) -> jax.Array:
        """`of_outputs`: see `matmul_outputs_first`."""
        kernel = self.kernel[...]
        rounded = x.astype(kernel.dtype)
        if self.outputs_first:
            product = matmul_outputs_first(rounded, kernel, of_outputs=of_outputs)
        else:
            product = matmul(rounded, kernel)
        if self.bias is not None:
            product = product + self.bias[...].astype(jnp.float32)
        return product.astype(x.dtype)
