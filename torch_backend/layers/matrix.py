"""Matrices: what a layer multiplies by, whatever it is stored as."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from sglang_jax.architectures.tensor_names import Kind, Part
from sglang_jax.checkpoint.encoding import Encoding, Stored, ValueType
from sglang_jax.checkpoint.reader import Role
from torch_backend.layers.blocks import BlockMatrices, InBlocks
from torch_backend.layers.parameter import Loadable, forget
from torch_backend.layers.part import PartOptions
from torch_backend.layers.scaled_products import VALUE_TYPES, ScaledProduct, multiply_widened, product_for

_OUTPUTS_TOGETHER = 4
"""Outputs of a matrix in blocks are a multiple of this."""

_BLOCK_VALUES = {ValueType.INT4: torch.uint8, ValueType.INT8: torch.int8}
"""Of matrices in blocks; two of four bits are a byte."""


class PlainMatrix(Loadable):
    """A weight `[outputs, inputs]` of numbers, and the bias of its product, `[outputs]`, if there is one."""

    def __init__(self, inputs: int, outputs: int, parts: Sequence[Part], *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = self.declare("weight", (outputs, inputs), dtype, *parts)
        self.bias = self.declare("bias", (outputs,), dtype, *parts, kind=Kind.BIAS) if bias else None

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, inputs]` → `[T, outputs]`, rounded once, after the bias."""
        return functional.linear(x, self.weight, self.bias)

    def let_go(self) -> None:
        """Forgets the weight, which is kept elsewhere in another layout."""
        self.weight = forget(self.weight)


class ScaledMatrix(Loadable):
    """Values of 8 bits `[outputs, inputs]`, a float32 scale of each row, and a bias of the product, if there is one."""

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
        self.values = self.declare("values", (outputs, inputs), values, *parts, role=Role.VALUES)
        self.scales = self.declare("scales", (outputs,), torch.float32, *parts, role=Role.SCALES)
        self.bias = self.declare("bias", (outputs,), dtype, *parts, kind=Kind.BIAS) if bias else None
        self._product: ScaledProduct = multiply_widened

    def choose_product(self, device: torch.device, dtype: torch.dtype) -> None:
        """The quickest product on a device; until then values are widened."""
        self._product = product_for(self.encoding, tuple(self.values.shape), device, dtype)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, inputs]` → `[T, outputs]`."""
        return self._product(x, self.values, self.scales, self.bias)


class FewOrMany(PlainMatrix):
    """The same matrix twice: plain numbers, and for steps of few rows the blocks in which a checkpoint stores them.

    Blocks are loaded as they are stored: values `[outputs, blocks, bytes]`, scales and offsets `[outputs, blocks]`.
    """

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

    def take_blocks(self) -> InBlocks:
        """The loaded blocks, as they are multiplied by; what they were loaded as is forgotten."""
        arrays = {role: self.get_parameter(role.value) for role in self.encoding.roles}
        blocks = Stored(self.encoding, {role: array.numpy() for role, array in arrays.items()})
        matrix = self._matrices.matrix(blocks, self.bias)
        for role, array in arrays.items():
            self.register_parameter(role.value, forget(array))
        return matrix


def matrix_for(
    inputs: int, outputs: int, parts: Sequence[Part], options: PartOptions, *, bias: bool
) -> PlainMatrix | ScaledMatrix:
    """A matrix without values, of the class for how its `parts` are stored. What has blocks is also widened to the type
    of products, or widened alone where no kernel reads it."""
    encoding, dtype = options.encoding_of(*parts), options.dtype
    if encoding is None:
        return PlainMatrix(inputs, outputs, parts, bias=bias, dtype=dtype)
    if encoding.block is None:
        return ScaledMatrix(encoding, inputs, outputs, parts, bias=bias, dtype=dtype)
    matrices, gated = options.block_matrices, parts[0] is Part.GATE
    whole = not (inputs % encoding.block or outputs % (_OUTPUTS_TOGETHER * (2 if gated else 1)))
    if matrices is None or not whole or not matrices.work(encoding, gated=gated):
        return PlainMatrix(inputs, outputs, parts, bias=bias, dtype=dtype)
    return FewOrMany(encoding, inputs, outputs, parts, bias=bias, dtype=dtype, matrices=matrices)
