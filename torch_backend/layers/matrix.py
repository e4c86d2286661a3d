"""Matrices of layers in all the forms in which they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn
from torch.nn import functional

from sglang_jax.architectures.kinds.feed_forward import Activation
from sglang_jax.architectures.tensor_names import ParameterKind, Part
from sglang_jax.checkpoint.encoding import Encoding, Stored
from sglang_jax.checkpoint.ggml_blocks import BLOCK
from sglang_jax.checkpoint.group_blocks import groups_of
from sglang_jax.checkpoint.reader import Role
from torch_backend.layers.bfloat16 import Bfloat16Matrix
from torch_backend.layers.blocks import BlockedMatrix, BlockMatrices
from torch_backend.layers.grouped import GroupedMatrix
from torch_backend.layers.parameter import Loadable, drop_value
from torch_backend.layers.part import PartOptions
from torch_backend.layers.scaled_products import (
    VALUE_TYPES,
    PlainProduct,
    RoundedProduct,
    ScaledProduct,
    multiply_widened,
    product_for,
)
from torch_backend.rounded_rows import Rounding, Rows


class PlainMatrix(Loadable):
    """A weight `[outputs, inputs]` of plain values, and an optional bias of its product, `[outputs]`."""

    def __init__(self, inputs: int, outputs: int, parts: Sequence[Part], *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = (outputs, inputs), dtype
        self.weight = self.declare("weight", (outputs, inputs), dtype, *parts)
        self.bias = self.declare("bias", (outputs,), dtype, *parts, kind=ParameterKind.BIAS) if bias else None
        self.product: PlainProduct = functional.linear

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, inputs]` → `[T, outputs]`, rounded once, after the bias."""
        return self.product(x, self.weight, self.bias)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rows `[T]` of the weight, `[T, inputs]`."""
        return functional.embedding(numbers, self.weight)

    def release(self) -> None:
        """Releases the weight after it was copied to another layout."""
        self.weight = drop_value(self.weight)


class ScaledMatrix(Loadable):
    """8-bit values `[outputs, inputs]`, a float32 scale per row, and an optional bias of the product."""

    def __init__(
        self,
        encoding: Encoding,
        inputs: int,
        outputs: int,
        parts: Sequence[Part],
        *,
        bias: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        values = VALUE_TYPES[encoding.value_type]
        self.encoding = encoding
        self.shape, self.dtype = (outputs, inputs), dtype
        self.values = self.declare("values", (outputs, inputs), values, *parts, role=Role.VALUES)
        self.scales = self.declare("scales", (outputs,), torch.float32, *parts, role=Role.SCALES)
        self.bias = self.declare("bias", (outputs,), dtype, *parts, kind=ParameterKind.BIAS) if bias else None
        self.product: ScaledProduct | RoundedProduct = multiply_widened

    def choose_product(self, device: torch.device, dtype: torch.dtype) -> None:
        """Chooses the fastest product on a device; before this, values are widened."""
        self.product = product_for(self.encoding, self.shape, device, dtype)

    @property
    def rounding(self) -> Rounding | None:
        """See `Reader`."""
        return self.product.rounding if isinstance(self.product, RoundedProduct) else None

    def multiply(self, x: Rows) -> torch.Tensor:
        """See `PlainMatrix.multiply`; `x`: plain numbers, or rounded by `rounding`."""
        if isinstance(self.product, RoundedProduct):
            return self.product(x, self.values, self.scales, self.bias)
        assert isinstance(x, torch.Tensor), "the product takes plain numbers"
        return self.product(x, self.values, self.scales, self.bias)


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A checkpoint's quantised blocks of a matrix `[outputs, inputs]`, or its int8 values with a scale per row, as
    parameters of a module: loaded as stored, blocks as `[outputs, blocks, bytes]`. It does not refer to the module,
    which could then only be freed by the garbage collector, from which a running engine keeps its model."""

    encoding: Encoding
    matrices: BlockMatrices

    def declare(self, module: Loadable, inputs: int, outputs: int, parts: Sequence[Part]) -> None:
        if self.encoding.block is None:
            shapes = {Role.VALUES: ((outputs, inputs), torch.int8), Role.SCALES: ((outputs,), torch.float32)}
        else:
            kind = self.encoding.block_type
            shapes = {Role.VALUES: ((outputs, inputs // kind.weights, kind.nbytes), torch.uint8)}
        for role, (shape, dtype) in shapes.items():
            module.register_parameter(role.value, module.declare(role.value, shape, dtype, *parts, role=role))

    def take(self, module: Loadable, bias: torch.Tensor | None) -> BlockedMatrix:
        """Converts the loaded blocks to the form of the kernels, and releases the loaded arrays."""
        roles = [role for role in (Role.VALUES, Role.SCALES) if role.value in module.sources]
        arrays = {role: module.get_parameter(role.value) for role in roles}
        matrix = self.matrices.matrix(
            Stored(self.encoding, {role: each.numpy() for role, each in arrays.items()}), bias
        )
        for role, each in arrays.items():
            module.register_parameter(role.value, drop_value(each))
        return matrix


class QuantisedMatrix(Loadable):
    """A matrix in quantised blocks, whose kernels serve steps of any number of rows, and an optional bias of its
    product."""

    def __init__(
        self,
        encoding: Encoding,
        inputs: int,
        outputs: int,
        parts: Sequence[Part],
        *,
        bias: bool,
        dtype: torch.dtype,
        matrices: BlockMatrices,
    ) -> None:
        super().__init__()
        self.encoding, self.shape, self.dtype = encoding, (outputs, inputs), dtype
        self._stored = StoredBlocks(encoding, matrices)
        self._stored.declare(self, inputs, outputs, parts)
        self.bias = self.declare("bias", (outputs,), dtype, *parts, kind=ParameterKind.BIAS) if bias else None
        self._packed: BlockedMatrix | None = None

    def pack(self) -> None:
        """Converts the loaded blocks to the form of the kernels, before the first product."""
        self._packed = self._stored.take(self, self.bias)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        assert self._packed is not None
        return self._packed.multiply(x)

    @property
    def columns(self) -> int:
        """See `BlockedMatrix`."""
        assert self._packed is not None
        return self._packed.columns

    def multiply_into(self, x: torch.Tensor, output: torch.Tensor) -> None:
        """See `BlockedMatrix`."""
        assert self._packed is not None
        self._packed.multiply_into(x, output)

    def multiply_gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """See `BlockedMatrix`."""
        assert self._packed is not None
        return self._packed.multiply_gated(x, activation)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """See `PlainMatrix.rows`."""
        assert self._packed is not None
        return self._packed.rows(numbers)


class TwoFormMatrix(PlainMatrix):
    """The same matrix twice: plain values, and a checkpoint's quantised blocks for steps with few rows."""

    def __init__(
        self,
        encoding: Encoding,
        inputs: int,
        outputs: int,
        parts: Sequence[Part],
        *,
        bias: bool,
        dtype: torch.dtype,
        matrices: BlockMatrices,
    ) -> None:
        super().__init__(inputs, outputs, parts, bias=bias, dtype=dtype)
        self.encoding = encoding
        self._stored = StoredBlocks(encoding, matrices)
        self._stored.declare(self, inputs, outputs, parts)

    def take_blocks(self) -> BlockedMatrix:
        """See `StoredBlocks.take`."""
        return self._stored.take(self, self.bias)


OneMatrix = PlainMatrix | Bfloat16Matrix | ScaledMatrix | QuantisedMatrix | GroupedMatrix
TableMatrix = PlainMatrix | Bfloat16Matrix | QuantisedMatrix | GroupedMatrix


class JoinedMatrix(nn.Module):
    """Matrices that multiply the same rows and are stored in different ways. Their outputs are concatenated."""

    def __init__(self, matrices: Sequence[OneMatrix]) -> None:
        super().__init__()
        self.matrices = tuple(matrices)
        self.modules_of_matrices = nn.ModuleList(self.matrices)
        self.outputs = sum(each.shape[0] for each in self.matrices)
        self.in_blocks = [each for each in self.matrices if isinstance(each, QuantisedMatrix)]

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """See `PlainMatrix.multiply`."""
        if len(self.in_blocks) < len(self.matrices):
            return torch.cat([each.multiply(x) for each in self.matrices], dim=-1)
        firsts = [0, *accumulate(each.shape[0] for each in self.in_blocks)]
        columns = max(first + each.columns for first, each in zip(firsts, self.in_blocks, strict=False))
        output = x.new_empty((len(x), columns))
        for first, each in zip(firsts, self.in_blocks, strict=False):
            # What it writes past its own columns, the next one overwrites.
            each.multiply_into(x, output[:, first:])
        return output[:, : self.outputs] if columns > self.outputs else output


AnyMatrix = OneMatrix | JoinedMatrix


def multiply_rows(matrix: AnyMatrix, x: Rows) -> torch.Tensor:
    """The product with rows that may be rounded, if the matrix wants them so."""
    if isinstance(x, torch.Tensor):
        return matrix.multiply(x)
    assert isinstance(matrix, ScaledMatrix), "other matrices want plain numbers"
    return matrix.multiply(x)


def matrix_for(
    inputs: int, outputs: Sequence[int], parts: Sequence[Part], options: PartOptions, *, bias: bool
) -> AnyMatrix:
    """Creates a matrix without values, of the class for the encoding of its `parts`; `outputs`: of each of them. A
    matrix in blocks stays in blocks if kernels serve all steps; it is also widened to the dtype of products if they
    only serve few rows, or only widened if no kernel reads its blocks; one in groups stays so on a GPU. Parts of
    different encodings are widened too, unless kernels serve all steps of those in blocks. A plain one stays in
    bfloat16 if kernels widen it in each product."""
    matrices = options.block_matrices
    several = len(parts) > 1 and matrices is not None and matrices.serves_all_rows
    if several and not _serves(inputs, sum(outputs), parts, options):
        found = [
            _matrix(inputs, (size,), (part,), options, bias=bias) for size, part in zip(outputs, parts, strict=True)
        ]
        in_blocks = [isinstance(each, QuantisedMatrix) for each in found]
        if all(in_blocks) or (any(in_blocks) and not options.fixed):
            return JoinedMatrix(found)
    return _matrix(inputs, outputs, parts, options, bias=bias)


def _matrix(
    inputs: int, outputs: Sequence[int], parts: Sequence[Part], options: PartOptions, *, bias: bool
) -> OneMatrix:
    dtype, matrices, rows = options.dtype, options.block_matrices, sum(outputs)
    encoding = options.encoding_of_part(inputs, *parts)
    if encoding is None:
        return _plain(inputs, rows, parts, options, bias=bias)
    if matrices is None or not _serves(inputs, rows, parts, options):
        if encoding.block is None:
            return ScaledMatrix(encoding, inputs, rows, parts, bias=bias, dtype=dtype)
        kind = groups_of(encoding.values)
        if options.keeps_groups and kind is not None and not inputs % kind.weights:
            return GroupedMatrix(kind, inputs, rows, parts, bias=bias, dtype=dtype)
        return PlainMatrix(inputs, rows, parts, bias=bias, dtype=dtype)
    form = QuantisedMatrix if matrices.serves_all_rows else TwoFormMatrix
    return form(encoding, inputs, rows, parts, bias=bias, dtype=dtype, matrices=matrices)


def _serves(inputs: int, rows: int, parts: Sequence[Part], options: PartOptions) -> bool:
    """Whether a kernel multiplies all parts of a matrix, `rows` of `inputs` values, in one product."""
    encoding, matrices = options.encoding_of_part(inputs, *parts), options.block_matrices
    if encoding is None or matrices is None or inputs % max(encoding.block or 0, BLOCK):
        return False
    gated = parts[0] is Part.GATE and len(parts) > 1
    any_rows = matrices.serves_all_rows and not gated
    whole = any_rows or not rows % (matrices.outputs_together * (2 if gated else 1))
    return whole and matrices.work(encoding, gated=gated)


def table_for(rows: int, width: int, part: Part, options: PartOptions) -> TableMatrix:
    """Creates a matrix `[rows, width]` without values whose rows are looked up: in blocks if kernels serve it too, in
    bfloat16 if such matrices stay in it, else plain."""
    if options.block_matrices is not None and options.block_matrices.serves_all_rows:
        found = matrix_for(width, (rows,), (part,), options, bias=False)
        if isinstance(found, QuantisedMatrix):
            return found
    return _plain(width, rows, (part,), options, bias=False)


def _plain(
    inputs: int, outputs: int, parts: Sequence[Part], options: PartOptions, *, bias: bool
) -> PlainMatrix | Bfloat16Matrix:
    products = options.bfloat16_products(*parts)
    if products is None or outputs < products.least_outputs * (2 if parts[0] is Part.GATE else 1):
        return PlainMatrix(inputs, outputs, parts, bias=bias, dtype=options.dtype)
    return Bfloat16Matrix(inputs, outputs, parts, bias=bias, products=products)
