"""Matrices that stay in the blocks of the checkpoint, on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint.encoding import Encoding, Stored, ValueType
from sglang_jax.checkpoint.reader import Role
from sglang_jax.cpu_kernels.block_layout import EXACT, BlockForm, with_zeros
from sglang_jax.layers.parameter import Parameter, Sizes, parameter
from sglang_jax.layers.sharding import named_sharding

BLOCK_AXES = (Axis.IN_BLOCKS, Axis.IN_BLOCK)
"""The axes that replace inputs in the arrays of a matrix in blocks, until they are packed."""

_BYTES = {ValueType.INT4: jnp.uint8, ValueType.INT8: jnp.int8}


@dataclass(frozen=True, slots=True)
class BlockProduct:
    """The kernel of products with matrices of one encoding: its name in XLA's CPU backend (`target`), maximum threads
    that it uses, maximum rows for which it is faster than a widened matrix, and its form."""

    encoding: Encoding
    target: str
    threads: int
    max_rows: int
    form: BlockForm = EXACT

    @property
    def serves_all_rows(self) -> bool:
        """Whether products are fast for many rows too, so that a matrix needs no other form."""
        return self.form is not EXACT

    def multiply(self, x: jax.Array, levels: jax.Array, scales: jax.Array) -> jax.Array:
        """`x [T, inputs]` times a matrix in the layout of `cpu_kernels.block_layout` → float32 `[T,
        outputs]`."""
        rows, inputs = x.shape
        found = jax.ShapeDtypeStruct((rows, len(levels) * self.form.outputs), jnp.float32)
        scratch = jax.ShapeDtypeStruct((self.threads, self.form.scratch_floats(inputs)), jnp.float32)
        product, _ = jax.ffi.ffi_call(self.target, (found, scratch))(x, levels, scales)
        return product


BlockProducts = Callable[[Encoding], BlockProduct | None]
"""From an encoding to its kernel; None if it has none."""


def no_blocks(_: Encoding) -> None:
    """For machines without such kernels: matrices in blocks are dequantised while they are read."""


class BlockMatrix(nnx.Module):
    """A matrix `[*out, inputs]` in blocks, for products with rows of `dtype`, without values at first: loaded as
    stored, and then packed. In the exact
    form, its weights equal those of the matrix in bfloat16, bit for bit, so a product differs only by the order of its
    float32 sums. A row's result is the same for any number of rows."""

    def __init__(
        self, product: BlockProduct, inputs: int, outputs: Sizes, parts: Sequence[Part], dtype: jnp.dtype
    ) -> None:
        """`parts`: the matrices that it consists of. Outputs are filled up to a multiple of the form's with zeros."""
        encoding = product.encoding
        assert encoding.block is not None
        blocks = [*outputs, (Axis.IN_BLOCKS, inputs // encoding.block)]
        values = [*blocks, (Axis.IN_BLOCK, encoding.block * encoding.bits // 8)]
        number = jnp.dtype(encoding.scales)
        arrays = {"values": parameter(values, jnp.dtype(_BYTES[encoding.values]), *parts, role=Role.VALUES)}
        for role in encoding.roles[1:]:
            arrays[role.value] = parameter(blocks, number, *parts, role=role)
        self.arrays = nnx.Dict(arrays)
        self.output_sizes = tuple(size for _, size in outputs)
        self.product = product
        self.dtype = dtype

    def pack(self) -> None:
        """Changes the loaded arrays, or their shapes, to those that the kernel reads."""
        encoding, form, outputs = self.product.encoding, self.product.form, math.prod(self.output_sizes)
        missing = -outputs % form.outputs
        stored = {role: self.arrays[role.value].get_value() for role in encoding.roles}
        values = stored[Role.VALUES]
        if isinstance(values, jax.ShapeDtypeStruct):
            (shape, dtype), numbers = form.shapes(encoding, (outputs + missing) // form.outputs, values.shape[-2])
            levels, scales = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(numbers, jnp.float16)
        else:
            rows = {
                role: np.asarray(array).reshape(outputs, *array.shape[len(self.output_sizes) :])
                for role, array in stored.items()
            }
            packed = form.pack(Stored(encoding, rows).of_rows(partial(with_zeros, missing)))
            levels, scales = (_placed(array, values.sharding) for array in (packed.levels, packed.scales))
        self.arrays = nnx.Dict(levels=_packed(levels), scales=_packed(scales))

    def serves(self, rows: int) -> bool:
        return rows <= self.product.max_rows

    def multiply(self, x: jax.Array, *, of_outputs: bool = False) -> jax.Array:
        """`x [T, *in]` → float32 `[T, outputs]`; see `Matrix`."""
        levels, scales = (self.arrays[name][...] for name in ("levels", "scales"))
        found = self.product.multiply(x.reshape(len(x), -1).astype(self.dtype), levels, scales)
        return found[:, : math.prod(self.output_sizes)]

    def rows(self, numbers: jax.Array) -> jax.Array:
        """Dequantised rows `[T]` of a matrix in a layout of integers, `[T, inputs]` in the dtype of products."""
        form, levels, scales = self.product.form, self.arrays["levels"][...], self.arrays["scales"][...]
        tile, lane = numbers // form.outputs, numbers % form.outputs
        own = levels[tile, :, :, lane]
        if self.product.encoding.bits == 4:
            values = jnp.stack((own & 15, own >> 4), axis=3).astype(jnp.float32)
        else:
            values = (own if form.zero else jax.lax.bitcast_convert_type(own, jnp.int8)).astype(jnp.float32) - form.zero
        scale, *least = jnp.moveaxis(scales[tile, :, :, lane].astype(jnp.float32), 2, 0)
        values = values.reshape(*scale.shape, -1) * scale[..., None]
        if least:
            # Rounded before it is added, as where rows are read from the file.
            values = jax.lax.optimization_barrier(values) + least[0][..., None]
        return values.reshape(len(numbers), -1).astype(self.dtype)

    def repack(self, layout: object) -> None:
        """Does nothing: blocks have only one layout, see `pack`."""


def _packed(array: jax.Array | jax.ShapeDtypeStruct) -> Parameter:
    return Parameter(array, axes=(Axis.IN_TILES,) * len(array.shape), parts=(), role=None)


def _placed(array: np.ndarray, like: jax.sharding.Sharding) -> jax.Array:
    placed = named_sharding(like.mesh, (Axis.IN_TILES,) * array.ndim) if isinstance(like, NamedSharding) else like
    return jax.device_put(array, placed)
