"""Matrices that are also held in the blocks in which a checkpoint stores them, for steps of few rows on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from sglang_jax.architectures.axes import Axis
from sglang_jax.checkpoint.encoding import BLOCK, Q4, Encoding
from sglang_jax.cpu_kernels.block_layout import OUTPUTS, scratch_floats
from sglang_jax.layers.parameter import Parameter


@dataclass(frozen=True, slots=True)
class BlockProduct:
    """The kernel of products with matrices of one encoding.

    - `target`: as XLA's CPU backend knows it.
    - `threads`: on so many it works at most.
    - `most_rows`: it serves products of so many rows at most.
    """

    encoding: Encoding
    target: str
    threads: int
    most_rows: int

    def multiply(self, x: jax.Array, levels: jax.Array, scales: jax.Array) -> jax.Array:
        """bfloat16 `x [T, inputs]` by a matrix as `cpu_kernels.block_layout` has it → float32 `[T, outputs]`."""
        rows, inputs = x.shape
        found = jax.ShapeDtypeStruct((rows, len(levels) * OUTPUTS), jnp.float32)
        scratch = jax.ShapeDtypeStruct((self.threads, scratch_floats(inputs)), jnp.float32)
        product, _ = jax.ffi.ffi_call(self.target, (found, scratch))(x, levels, scales)
        return product


class BlockMatrix(nnx.Module):
    """A matrix `[outputs, inputs]` in blocks, yet without values. Its weights are those of the matrix in bfloat16, bit
    for bit, so that a product differs by the order of its float32 sums alone. That order is the same for any number of
    rows."""

    def __init__(self, product: BlockProduct, outputs: int, inputs: int) -> None:
        tiles, blocks = outputs // OUTPUTS, inputs // BLOCK
        # Sizes as `cpu_kernels.block_layout.PackedBlocks` has them.
        if product.encoding == Q4:
            self.levels = _parameter((tiles, blocks, BLOCK), jnp.int16)
            self.scales = _parameter((tiles, blocks, 2 * OUTPUTS), jnp.float16)
        else:
            self.levels = _parameter((tiles, blocks, OUTPUTS, BLOCK), jnp.int8)
            self.scales = _parameter((tiles, blocks, OUTPUTS), jnp.float16)
        self.product = product

    def serves(self, rows: int) -> bool:
        """Whether products of so many rows are these."""
        return rows <= self.product.most_rows

    def multiply(self, x: jax.Array) -> jax.Array:
        """bfloat16 `x [T, *in]` → float32 `[T, outputs]`."""
        return self.product.multiply(x.reshape(len(x), -1), self.levels[...], self.scales[...])


def _parameter(shape: tuple[int, ...], dtype: jnp.dtype) -> Parameter:
    return Parameter(jax.ShapeDtypeStruct(shape, dtype), axes=(Axis.IN_BLOCKS,) * len(shape), parts=())
