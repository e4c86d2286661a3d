"""Matrices of layers in all the forms in which they are stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from sglang_jax.architectures.tensor_names import ParameterKind, Part
from sglang_jax.checkpoint.encoding import Encoding, Stored, ValueType
from sglang_jax.checkpoint.reader import Role
from torch_backend.layers.blocks import BlockedMatrix, BlockMatrices
from torch_backend.layers.parameter import Loadable, drop_value
from torch_backend.layers.part import PartOptions
from torch_backend.layers.scaled_products import VALUE_TYPES, PlainProduct, ScaledProduct, multiply_widened, product_for

_BLOCK_VALUES = {ValueType.INT4: torch.uint8, ValueType.INT8: torch.int8}
"""Dtypes of matrices in blocks; a byte holds two values of four bits."""


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
        values = VALUE_TYPES[encoding.values]
        self.encoding = encoding
        self.shape, self.dtype = (outputs, inputs), dtype
        self.values = self.declare("values", (outputs, inputs), values, *parts, role=Role.VALUES)
        self.scales = self.declare("scales", (outputs,), torch.float32, *parts, role=Role.SCALES)
        self.bias = self.declare("bias", (outputs,), dtype, *parts, kind=ParameterKind.BIAS) if bias else None
        self.product: ScaledProduct = multiply_widened

    def choose_product(self, device: torch.device, dtype: torch.dtype) -> None:
        """Chooses the fastest product on a device; before this, values are widened."""
        self.product = product_for(self.encoding, self.shape, device, dtype)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.values, self.scales, self.bias)


class TwoFormMatrix(PlainMatrix):
    """The same matrix twice: plain values, and a checkpoint's quantised blocks for steps with few rows, loaded as
    stored: values `[outputs, blocks, bytes]`, scales and offsets `[outputs, blocks]`."""

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
        assert encoding.block is not None
        self.encoding = encoding
        self._matrices = matrices
        blocks = (outputs, inputs // encoding.block)
        values = (*blocks, encoding.block * encoding.bits // 8)
        self.values = self.declare("values", values, _BLOCK_VALUES[encoding.values], *parts, role=Role.VALUES)
        for role in encoding.roles[1:]:
            self.register_parameter(role.value, self.declare(role.value, blocks, torch.float16, *parts, role=role))

    def take_blocks(self) -> BlockedMatrix:
        """Converts the loaded blocks to the form of the kernels, and releases the loaded arrays."""
        arrays = {role: self.get_parameter(role.value) for role in self.encoding.roles}
        blocks = Stored(self.encoding, {role: array.numpy() for role, array in arrays.items()})
        matrix = self._matrices.matrix(blocks, self.bias)
        for role, array in arrays.items():
            self.register_parameter(role.value, drop_value(array))
        return matrix


def matrix_for(
    inputs: int, outputs: int, parts: Sequence[Part], options: PartOptions, *, bias: bool
) -> PlainMatrix | ScaledMatrix:
    """Creates a matrix without values, of the class for the encoding of its `parts`. A matrix in blocks is also widened
    to the dtype of products, or only widened if no kernel reads its blocks."""
    encoding, dtype = options.encoding_of(*parts), options.dtype
    if encoding is None:
        return PlainMatrix(inputs, outputs, parts, bias=bias, dtype=dtype)
    if encoding.block is None:
        return ScaledMatrix(encoding, inputs, outputs, parts, bias=bias, dtype=dtype)
    matrices, gated = options.block_matrices, parts[0] is Part.GATE
    if matrices is None:
        return PlainMatrix(inputs, outputs, parts, bias=bias, dtype=dtype)
    whole = not (inputs % encoding.block or outputs % (matrices.outputs_together * (2 if gated else 1)))
    if not whole or not matrices.work(encoding, gated=gated):
        return PlainMatrix(inputs, outputs, parts, bias=bias, dtype=dtype)
    return TwoFormMatrix(encoding, inputs, outputs, parts, bias=bias, dtype=dtype, matrices=matrices)
