"""Linear layers: kernels are [in, out], or [out, in] once changed to it, and either side may have several axes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from sglang_jax.layers.parameter import Sizes, matmul, matmul_outputs_first, parameter, put_outputs_first


class Linear(nnx.Module):
    """`x [T, *inputs]` → `[T, *outputs]`, rounded to the type of the weights once, after the bias.

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

    def __call__(self, x: jax.Array) -> jax.Array:
        product = (matmul_outputs_first if self.outputs_first else matmul)(x, self.kernel[...])
        if self.bias is not None:
            product = product + self.bias[...].astype(jnp.float32)
        return product.astype(x.dtype)
