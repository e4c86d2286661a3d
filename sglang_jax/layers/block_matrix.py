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
from sglang_jax.checkpoint.encoding import Encoding, Stored
from sglang_jax.checkpoint.ggml_blocks import BLOCK
from sglang_jax.checkpoint.reader import Role
from sglang_jax.cpu_kernels.block_layout import EXACT, BlockForm, with_zeros
from sglang_jax.cpu_kernels.integer_layout import LevelKind, kind_of
from sglang_jax.layers.grouped_matrix import GroupProduct
from sglang_jax.layers.parameter import Parameter, Sizes, parameter
from sglang_jax.layers.sharding import named_sharding

BLOCK_AXES = (Axis.IN_BLOCKS, Axis.SHARDED_IN_BLOCKS, Axis.EXPERT_IN_BLOCKS, Axis.IN_BLOCK)
"""The axes that replace inputs in the arrays of a matrix in blocks, until they are packed."""


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
        return self.multiply_one(x, levels, scales, jnp.int32(0), len(levels) * self.form.outputs)

    def multiply_one(
        self, x: jax.Array, levels: jax.Array, scales: jax.Array, number: jax.Array, outputs: int
    ) -> jax.Array:
        """The same for the matrix with a number, int32 `[]`, of several that follow each other, each with this many
        outputs, which must be whole tiles."""
        rows, inputs = x.shape
        found = jax.ShapeDtypeStruct((rows, outputs), jnp.float32)
        scratch = jax.ShapeDtypeStruct((self.threads, self.form.scratch_floats(inputs)), jnp.float32)
        product, _ = jax.ffi.ffi_call(self.target, (found, scratch))(x, levels, scales, number)
        return product

    def serves_stacks(self, outputs: int, inputs: int) -> bool:
        """Whether the kernel multiplies one of several matrices of this size in all steps."""
        whole = not (outputs % self.form.outputs or inputs % max(self.encoding.block or 0, BLOCK))
        return self.serves_all_rows and whole


BlockProducts = Callable[[Encoding], BlockProduct | GroupProduct | None]
"""From an encoding to its kernel; None if it has none."""


def no_blocks(_: Encoding) -> None:
    """For machines without such kernels: matrices in blocks are dequantised while they are read."""


class BlockMatrix(nnx.Module):
    """A matrix `[*out, inputs]` in blocks, for products with rows of `dtype`, without values at first: loaded as
    stored, and then packed. In the exact
    form, its weights equal those of the matrix in bfloat16, bit for bit, so a product differs only by the order of its
    float32 sums. A row's result is the same for any number of rows."""

    def __init__(
        self, product: BlockProduct, inputs: Sizes, outputs: Sizes, parts: Sequence[Part], dtype: jnp.dtype
    ) -> None:
        """`parts`: the matrices that it consists of. Outputs are filled up to a multiple of the form's with zeros."""
        self.inputs = math.prod(size for _, size in inputs)
        if product.encoding.block is None:
            values = parameter([*outputs, *inputs], jnp.dtype(jnp.int8), *parts, role=Role.VALUES)
            scales = parameter(outputs, jnp.dtype(jnp.float32), *parts, role=Role.SCALES)
            self.arrays = nnx.Dict(values=values, scales=scales)
        else:
            kind = product.encoding.block_type
            blocks = [*outputs, (Axis.IN_BLOCKS, self.inputs // kind.weights), (Axis.IN_BLOCK, kind.nbytes)]
            self.arrays = nnx.Dict(values=parameter(blocks, jnp.dtype(jnp.uint8), *parts, role=Role.VALUES))
        self.output_sizes = tuple(size for _, size in outputs)
        self.product = product
        self.dtype = dtype

    def pack(self) -> None:
        """Changes the loaded arrays, or their shapes, to those that the kernel reads."""
        encoding, form, outputs = self.product.encoding, self.product.form, math.prod(self.output_sizes)
        missing = -outputs % form.outputs
        values = self.arrays["values"].get_value()
        if isinstance(values, jax.ShapeDtypeStruct):
            packed_shapes = form.shapes(encoding, (outputs + missing) // form.outputs, self.inputs // BLOCK)
            levels, scales = (jax.ShapeDtypeStruct(*each) for each in packed_shapes)
        else:
            own = (self.inputs,) if encoding.block is None else values.shape[-2:]
            arrays = {Role.VALUES: np.asarray(values).reshape(outputs, *own)}
            if encoding.block is None:
                arrays[Role.SCALES] = np.asarray(self.arrays["scales"].get_value()).reshape(outputs)
            stored = Stored(encoding, arrays)
            packed = form.pack(stored.of_rows(partial(with_zeros, missing)))
            levels, scales = (_placed(array, values.sharding) for array in (packed.levels, packed.scales))
        self.arrays = nnx.Dict(levels=_packed(levels), scales=_packed(scales))

    def serves(self, rows: int) -> bool:
        return rows <= self.product.max_rows

    def multiply(self, x: jax.Array, *, of_outputs: bool = False) -> jax.Array:
        """`x [T, *in]` → float32 `[T, outputs]`; see `Matrix`."""
        levels, scales = (self.arrays[name][...] for name in ("levels", "scales"))
        found = self.product.multiply(x.reshape(len(x), -1).astype(self.dtype), levels, scales)
        return found[:, : math.prod(self.output_sizes)]

    def multiply_one(self, x: jax.Array, number: jax.Array) -> jax.Array:
        """`x [T, inputs]` times one of several matrices `[count, out, inputs]` → float32 `[T, out]`."""
        levels, scales = (self.arrays[name][...] for name in ("levels", "scales"))
        return self.product.multiply_one(x.astype(self.dtype), levels, scales, number, self.output_sizes[-1])

    def rows(self, numbers: jax.Array) -> jax.Array:
        """Dequantised rows `[T]` of a matrix in a layout of integers, `[T, inputs]` in the dtype of products."""
        form, kind = self.product.form, kind_of(self.product.encoding.values)
        tile, lane = numbers // form.outputs, numbers % form.outputs
        scale, *offset = self._numbers(tile, lane, kind)
        values = self._levels(tile, lane, kind).reshape(*scale.shape, -1) * scale[..., None]
        if offset:
            # Rounded before it is added, as where rows are read from the file.
            values = jax.lax.optimization_barrier(values) + offset[0][..., None]
        return values.reshape(len(numbers), -1).astype(self.dtype)

    def _levels(self, tile: jax.Array, lane: jax.Array, kind: LevelKind) -> jax.Array:
        """Levels without their zeros, float32 `[T, blocks, 8, 4]`."""
        levels, zero = self.arrays["levels"][...][tile, :, :, lane], self.product.form.zero
        if kind.bits == 8:
            whole = levels if zero else jax.lax.bitcast_convert_type(levels, jnp.int8)
            return whole.astype(jnp.float32) - zero
        low, upper = levels[:, :, :4], levels[:, :, 4:]
        values = jnp.stack((low & 15, low >> 4), axis=3).reshape(*low.shape[:2], 8, 4)
        if kind.bits > 4:
            shifts = np.arange(0, 8, kind.bits - 4, dtype=np.uint8)[:, None]
            bits = upper[:, :, :, None] >> shifts & (1 << (kind.bits - 4)) - 1
            values = values | bits.reshape(values.shape) << 4
        if kind.table:
            values = jnp.array(kind.table, jnp.uint8)[values]
        return values.astype(jnp.float32) - kind.zero

    def _numbers(self, tile: jax.Array, lane: jax.Array, kind: LevelKind) -> jax.Array:
        """Scales, and offsets if there are any: float32 `[1 or 2, T, groups]`."""
        found = self.arrays["scales"][...][tile]
        at, outputs = jnp.arange(len(tile)), self.product.form.outputs
        if not kind.factors:
            return jnp.moveaxis(found[at, :, :, lane].astype(jnp.float32), 2, 0)
        size = 2 * kind.numbers * outputs
        pairs = found[:, :, :size].reshape(*found.shape[:2], kind.numbers, outputs, 2)
        factors = jax.lax.bitcast_convert_type(pairs, jnp.float16)[at, :, :, lane].astype(jnp.float32)
        small = jax.lax.bitcast_convert_type(found[:, :, size:], jnp.int8)
        numbers = small.reshape(*found.shape[:2], -1, kind.numbers, outputs)[at, :, :, :, lane].astype(jnp.float32)
        products = (numbers * factors[:, :, None]).reshape(len(tile), -1, kind.numbers)
        # Rounded before they are multiplied, as where rows are read from the file.
        return jnp.moveaxis(jax.lax.optimization_barrier(products), 2, 0)

    def repack(self, layout: object) -> None:
        """Does nothing: blocks have only one layout, see `pack`."""


def _packed(array: jax.Array | jax.ShapeDtypeStruct) -> Parameter:
    return Parameter(array, axes=(Axis.IN_TILES,) * len(array.shape), parts=(), role=None)


def _placed(array: np.ndarray, like: jax.sharding.Sharding) -> jax.Array:
    placed = named_sharding(like.mesh, (Axis.IN_TILES,) * array.ndim) if isinstance(like, NamedSharding) else like
    return jax.device_put(array, placed)
