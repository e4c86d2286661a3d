"""Matrices by which layers multiply, one class per way to store them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint.encoding import Encoding
from sglang_jax.checkpoint.ggml_blocks import BLOCK
from sglang_jax.checkpoint.reader import Role
from sglang_jax.layers.block_matrix import BlockMatrix
from sglang_jax.layers.grouped_matrix import GroupedMatrix, GroupProduct
from sglang_jax.layers.layout import InOutLayout, Layout
from sglang_jax.layers.parameter import Parameter, Sizes, parameter
from sglang_jax.layers.part import PartOptions
from sglang_jax.layers.rounded_rows import round_rows
from sglang_jax.layers.sharding import TENSOR, automatic_mesh, partition_spec


class Matrix(Protocol):
    """A weight `[*in, *out]`: an `nnx.Module` whose parameters are its arrays."""

    def multiply(self, x: jax.Array, *, of_outputs: bool = False) -> jax.Array:
        """`x [T, *in]`, rounded to the dtype of products → float32 `[T, *out]`, or the same with merged output axes.
        `of_outputs`: see `matmul_outputs_first`."""
        ...

    def repack(self, layout: Layout) -> None:
        """Changes the loaded arrays, or their shapes, to another layout."""
        ...


class PlainMatrix(nnx.Module):
    """One array of plain numbers, loaded as `[*in, *out]`."""

    def __init__(self, kernel: Parameter, inputs: int, layout: Layout) -> None:
        """`inputs`: number of input axes, if the kernel has the layout `InOutLayout`."""
        self.kernel = kernel
        self.inputs = inputs
        self.layout = layout

    @classmethod
    def of(cls, inputs: Sizes, outputs: Sizes, parts: Sequence[Part], dtype: jnp.dtype) -> PlainMatrix:
        """A matrix without values. `parts`: the matrices that it consists of."""
        return cls(parameter([*inputs, *outputs], dtype, *parts), len(inputs), InOutLayout())

    def multiply(self, x: jax.Array, *, of_outputs: bool = False) -> jax.Array:
        kernel = self.kernel[...]
        return self.layout.multiply(x.astype(kernel.dtype), kernel, of_outputs=of_outputs)

    def repack(self, layout: Layout) -> None:
        layout.repack(self.kernel, self.inputs)
        self.layout = layout


class ScaledMatrix(nnx.Module):
    """8-bit values `[*in, *out]`, int8 or float8, and a scale per output. Products widen the values to their dtype,
    which is exact, and multiply float32 sums by the scale. In steps of many rows, they round the rows to the type of
    the values instead, each with a scale; each of several devices rounds its own inputs."""

    def __init__(
        self,
        encoding: Encoding,
        inputs: Sizes,
        outputs: Sizes,
        parts: Sequence[Part],
        dtype: jnp.dtype,
        min_rounded_rows: int | None = None,
    ) -> None:
        """A matrix without values. `dtype`: of products. `min_rounded_rows`: of a step that rounds its rows; None if
        none does."""
        values = jnp.dtype(encoding.values.value)
        self.values = parameter([*inputs, *outputs], values, *parts, role=Role.VALUES)
        self.scales = parameter(outputs, jnp.dtype(jnp.float32), *parts, role=Role.SCALES)
        self.inputs = len(inputs)
        self.input_axes = (Axis.TOKENS, *(axis for axis, _ in inputs))
        self.dtype, self.min_rounded_rows = dtype, min_rounded_rows
        self.layout: Layout = InOutLayout()

    def multiply(self, x: jax.Array, *, of_outputs: bool = False) -> jax.Array:
        x, values, scales = x.astype(self.dtype), self.values[...], self.scales[...]
        mesh, inputs = automatic_mesh(), partition_spec(self.input_axes)
        if mesh is None or not any(inputs):
            return self._product(x, values, scales, of_outputs)

        def sums(x: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
            return jax.lax.psum(self._product(x, values, scales, of_outputs), TENSOR)

        # Scaled before it is summed: the compiler rounds what devices exchange if rounding is all that follows the sum.
        places = inputs, partition_spec(self.values.axes), partition_spec(self.scales.axes)
        return jax.shard_map(sums, mesh=mesh, in_specs=places, out_specs=PartitionSpec(), check_vma=False)(
            x, values, scales
        )

    def _product(self, x: jax.Array, values: jax.Array, scales: jax.Array, of_outputs: bool) -> jax.Array:
        if self.min_rounded_rows is not None and len(x) >= self.min_rounded_rows:
            x, of_rows = round_rows(x, values.dtype)
            sums = self.layout.multiply(x, values, of_outputs=of_outputs).reshape(len(x), *scales.shape)
            return sums.astype(jnp.float32) * of_rows.reshape(-1, *[1] * scales.ndim) * scales
        product = self.layout.multiply(x, values.astype(self.dtype), of_outputs=of_outputs)
        return product.reshape(len(x), *scales.shape) * scales

    def repack(self, layout: Layout) -> None:
        layout.repack(self.values, self.inputs)
        layout.repack_rows(self.scales)
        self.layout = layout


class TwoFormMatrix(nnx.Module):
    """A matrix in two formats: in blocks for steps of few rows, and another one for other steps."""

    def __init__(self, blocks: BlockMatrix, plain: PlainMatrix) -> None:
        self.blocks, self.plain = blocks, plain

    def multiply(self, x: jax.Array, *, of_outputs: bool = False) -> jax.Array:
        if self.blocks.serves(len(x)):
            return self.blocks.multiply(x)
        return self.plain.multiply(x, of_outputs=of_outputs)

    def repack(self, layout: Layout) -> None:
        # Blocks have only one layout: see `BlockMatrix.pack`.
        self.plain.repack(layout)


class JoinedMatrix(nnx.Module):
    """Matrices that multiply the same rows and are stored in different ways. Their outputs are joined along an axis."""

    def __init__(self, matrices: Sequence[Matrix], sizes: Sequence[tuple[int, ...]], axis: int) -> None:
        """`sizes`: of the outputs of each matrix. `axis`: of these, the one along which they are joined."""
        self.matrices = nnx.List(matrices)
        self.sizes, self.axis = tuple(sizes), axis

    def multiply(self, x: jax.Array, *, of_outputs: bool = False) -> jax.Array:
        """`x [T, *in]` → float32 `[T, outputs]`; see `Matrix`."""
        products = [each.multiply(x, of_outputs=of_outputs) for each in self.matrices]
        own = (found.reshape(len(x), *sizes) for found, sizes in zip(products, self.sizes, strict=True))
        return jnp.concatenate(list(own), axis=1 + self.axis).reshape(len(x), -1)

    def repack(self, layout: Layout) -> None:
        for each in self.matrices:
            each.repack(layout)


def matrix_for(inputs: Sizes, outputs: Sizes, parts: Sequence[Part], options: PartOptions) -> Matrix:
    """A matrix without values, of the class for the encoding of its `parts`. A matrix in blocks stays in blocks if a
    kernel serves all steps; it is also kept widened to the dtype of products if that serves only few rows, or only
    widened if no kernel reads its blocks. Parts of different encodings are widened too, unless a kernel serves all
    steps of one of them."""
    encodings = {options.encoding_of(part) for part in parts}
    if len(encodings) > 1 and any(_serves_all_rows(each, options) for each in encodings):
        own, sizes, axis = _of_parts(outputs)
        return JoinedMatrix(
            [_matrix(inputs, each, (part,), options) for each, part in zip(own, parts, strict=True)], sizes, axis
        )
    return _matrix(inputs, outputs, parts, options)


def _of_parts(outputs: Sizes) -> tuple[list[Sizes], list[tuple[int, ...]], int]:
    """For gate and up, or for queries, keys and values: the outputs of each, their sizes with the axis along which they
    are joined, and the number of that axis."""
    (first, count), *inner = outputs
    if first is Axis.GATE_OR_UP:
        return [inner] * count, [(1, *(size for _, size in inner))] * count, 0
    assert [axis for axis, _ in inner] == [Axis.HEAD_PART, Axis.HEAD_DIM], outputs
    (_, parts), head = inner
    group = parts - 2
    own = [[(Axis.HEADS, count * group), head], *[[(Axis.KV_HEADS, count), head]] * 2]
    return own, [(count, share, head[1]) for share in (group, 1, 1)], 1


def _serves_all_rows(encoding: Encoding | None, options: PartOptions) -> bool:
    product = None if encoding is None else options.block_products(encoding)
    return product is not None and product.serves_all_rows


def _matrix(inputs: Sizes, outputs: Sizes, parts: Sequence[Part], options: PartOptions) -> Matrix:
    encoding = options.encoding_of(*parts)
    if encoding is None:
        return PlainMatrix.of(inputs, outputs, parts, options.dtype)
    fits = not math.prod(size for _, size in inputs) % max(encoding.block or 0, BLOCK)
    product = options.block_products(encoding) if fits else None
    if product is None and encoding.block is None:
        rounded = options.min_rounded_rows(encoding)
        return ScaledMatrix(encoding, inputs, outputs, parts, options.dtype, rounded)
    if isinstance(product, GroupProduct):
        product = product.for_inputs(inputs)
        if product is not None:
            return GroupedMatrix(product, inputs, outputs, parts)
    if product is None:
        return PlainMatrix.of(inputs, outputs, parts, options.dtype)
    blocks = BlockMatrix(product, inputs, outputs, parts, options.dtype)
    if product.serves_all_rows:
        return blocks
    return TwoFormMatrix(blocks, PlainMatrix.of(inputs, outputs, parts, options.dtype))
