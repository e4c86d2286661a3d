"""The matrices of all experts of a layer, one class per way to store them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn import functional

from sglang_jax.architectures.tensor_names import ParameterKind, Part
from sglang_jax.checkpoint.encoding import Encoding, Stored
from sglang_jax.checkpoint.ggml_blocks import BLOCK
from sglang_jax.checkpoint.group_blocks import GroupType, groups_of
from sglang_jax.checkpoint.reader import Role
from torch_backend.kernels.group_layout import GroupedWeights
from torch_backend.layers.bfloat16 import Bfloat16Products
from torch_backend.layers.blocks import BlockedMatrix, BlockMatrices
from torch_backend.layers.expert_products import (
    ExpertProduct,
    RoundedExpertProduct,
    SortedRows,
    pack_experts,
    product_for,
    scaled_product_for,
)
from torch_backend.layers.parameter import Loadable, drop_value
from torch_backend.layers.part import PartOptions
from torch_backend.layers.plain_products import Stack, sorted_product_on
from torch_backend.layers.scaled_products import VALUE_TYPES
from torch_backend.rounded_rows import Rounding, Rows

RowProduct = Callable[[torch.Tensor], torch.Tensor]
"""`x [T, inputs]` → `[T, outputs]`, with the bias added, rounded once."""


class ExpertMatrices(Loadable, ABC):
    """Matrices `[experts, outputs, inputs]`, and biases `[experts, outputs]` of their products, or None."""

    any_rows = False
    """Whether a row's product does not depend on how many rows are multiplied together."""

    def __init__(self, shape: tuple[int, int, int], parts: Sequence[Part], *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype
        self.bias = self.declare("bias", shape[:2], dtype, *parts, kind=ParameterKind.BIAS) if bias else None

    @abstractmethod
    def of(self, expert: int) -> RowProduct:
        """The product with the matrix of one expert, on a CPU."""

    @abstractmethod
    def widened(self) -> torch.Tensor:
        """All matrices in the dtype of products."""

    @property
    def has_product(self) -> bool:
        """Whether they are multiplied as they are stored, by a product of their own on a GPU."""
        return False

    @property
    def rounding(self) -> Rounding | None:
        """See `Reader`; of `multiply_sorted`."""
        return None

    def multiply_sorted(self, x: Rows, rows: SortedRows) -> torch.Tensor:
        """Multiplies rows `[M, inputs]`, plain numbers or rounded by `rounding`, by the matrices of their experts: `[M,
        outputs]`, with the biases added. Outputs of padding are undefined."""
        assert isinstance(x, torch.Tensor), "the product takes plain numbers"
        return sorted_product_on(x.device)(x, self.stack, rows)

    @property
    def stack(self) -> Stack:
        """All matrices in the dtype of products, and their biases."""
        return Stack(self.widened(), self.bias)

    def _with_bias(self, found: torch.Tensor, rows: SortedRows) -> torch.Tensor:
        return found if self.bias is None else found + self.bias[rows.existing]

    def _bias_of(self, expert: int) -> torch.Tensor | None:
        return None if self.bias is None else self.bias[expert]


class PlainExperts(ExpertMatrices):
    """Plain numbers."""

    def __init__(self, shape: tuple[int, int, int], parts: Sequence[Part], *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(shape, parts, bias=bias, dtype=dtype)
        self.weight = self.declare("weight", shape, dtype, *parts)

    def of(self, expert: int) -> RowProduct:
        return partial(functional.linear, weight=self.weight[expert], bias=self._bias_of(expert))

    def widened(self) -> torch.Tensor:
        return self.weight


class ScaledExperts(ExpertMatrices):
    """8-bit values, and a float32 scale per row. They are widened in each product, unless there is one of float8."""

    def __init__(
        self,
        encoding: Encoding,
        shape: tuple[int, int, int],
        parts: Sequence[Part],
        *,
        bias: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(shape, parts, bias=bias, dtype=dtype)
        self.encoding = encoding
        self.values = self.declare("values", shape, VALUE_TYPES[encoding.value_type], *parts, role=Role.VALUES)
        self.scales = self.declare("scales", shape[:2], torch.float32, *parts, role=Role.SCALES)
        self._product: RoundedExpertProduct | None = None

    def choose_product(self, device: torch.device) -> None:
        """Chooses the fastest product on a device; before this, values are widened."""
        self._product = scaled_product_for(self.encoding, self.shape, device, self.dtype)

    def of(self, expert: int) -> RowProduct:
        weight = self._widen(self.values[expert], self.scales[expert])
        return partial(functional.linear, weight=weight, bias=self._bias_of(expert))

    def widened(self) -> torch.Tensor:
        return self._widen(self.values, self.scales)

    @property
    def rounding(self) -> Rounding | None:
        return None if self._product is None else self._product.rounding

    @property
    def has_product(self) -> bool:
        return self._product is not None

    def multiply_sorted(self, x: Rows, rows: SortedRows) -> torch.Tensor:
        if self._product is None:
            return super().multiply_sorted(x, rows)
        return self._with_bias(self._product(x, self.values, self.scales, rows), rows)

    def _widen(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return (values.float() * scales[..., None]).to(self.dtype)


class Bfloat16Experts(ExpertMatrices):
    """bfloat16 in a model of float32, on a CPU."""

    any_rows = True

    def __init__(
        self, shape: tuple[int, int, int], parts: Sequence[Part], *, bias: bool, products: Bfloat16Products
    ) -> None:
        super().__init__(shape, parts, bias=bias, dtype=torch.float32)
        self.weight = self.declare("weight", shape, torch.bfloat16, *parts)
        self._products = products

    def of(self, expert: int) -> RowProduct:
        return partial(self._products.multiply, weight=self.weight[expert], bias=self._bias_of(expert))

    def widened(self) -> torch.Tensor:
        return self.weight.to(self.dtype)


class BlockExperts(ExpertMatrices):
    """Quantised values in blocks, or int8 with a scale per row, on a CPU: loaded as stored, then packed for kernels
    that multiply them by rows rounded to int8."""

    any_rows = True

    def __init__(
        self,
        encoding: Encoding,
        shape: tuple[int, int, int],
        parts: Sequence[Part],
        *,
        bias: bool,
        dtype: torch.dtype,
        matrices: BlockMatrices,
    ) -> None:
        super().__init__(shape, parts, bias=bias, dtype=dtype)
        self.encoding, self._matrices = encoding, matrices
        if encoding.block is None:
            self.values = self.declare("values", shape, torch.int8, *parts, role=Role.VALUES)
            self.scales = self.declare("scales", shape[:2], torch.float32, *parts, role=Role.SCALES)
        else:
            kind = encoding.block_type
            blocks = (*shape[:2], shape[2] // kind.weights, kind.nbytes)
            self.values = self.declare("values", blocks, torch.uint8, *parts, role=Role.VALUES)
        self._packed: list[BlockedMatrix] = []

    def pack(self) -> None:
        """Converts the loaded arrays to the form of the kernels, before the first product."""
        names = {role: role.value for role in (Role.VALUES, Role.SCALES) if role.value in self.sources}
        arrays = {role: self.get_parameter(name).numpy() for role, name in names.items()}
        self._packed = [
            self._matrices.matrix(
                Stored(self.encoding, {role: each[expert] for role, each in arrays.items()}), self._bias_of(expert)
            )
            for expert in range(self.shape[0])
        ]
        for name in names.values():
            self.register_parameter(name, drop_value(self.get_parameter(name)))

    def of(self, expert: int) -> RowProduct:
        return self._packed[expert].multiply

    def widened(self) -> torch.Tensor:
        raise NotImplementedError("experts in blocks are multiplied one by one")


class GroupedExperts(ExpertMatrices):
    """Matrices quantised in groups, on a GPU: loaded as stored, then rearranged once, to one matrix of all experts, one
    above the other."""

    def __init__(
        self, kind: GroupType, shape: tuple[int, int, int], parts: Sequence[Part], *, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__(shape, parts, bias=bias, dtype=dtype)
        self.kind = kind
        blocks = (*shape[:2], shape[2] // kind.weights, kind.nbytes)
        self.values = self.declare("values", blocks, torch.uint8, *parts, role=Role.VALUES)
        self._weights: GroupedWeights | None = None
        self._product: ExpertProduct | None = None

    def pack(self) -> None:
        """Rearranges the loaded blocks, and chooses the product on their device, before the first product."""
        self._weights = pack_experts(self.kind, self.values)
        self._product = product_for(self.kind, self.values.device, self.dtype)
        self.values = drop_value(self.values)

    def of(self, expert: int) -> RowProduct:
        assert self._weights is not None
        outputs = self.shape[1]
        own = self._weights.part(slice(expert * outputs, (expert + 1) * outputs))
        return partial(functional.linear, weight=own.widened(self.dtype), bias=self._bias_of(expert))

    def widened(self) -> torch.Tensor:
        assert self._weights is not None
        return self._weights.widened(self.dtype).view(self.shape)

    @property
    def has_product(self) -> bool:
        return self._product is not None

    def multiply_sorted(self, x: Rows, rows: SortedRows) -> torch.Tensor:
        if self._product is None:
            return super().multiply_sorted(x, rows)
        assert self._weights is not None
        assert isinstance(x, torch.Tensor), "the product takes plain numbers"
        return self._product(x, self._weights, self.bias, rows)


def expert_matrices(
    shape: tuple[int, int, int], parts: Sequence[Part], options: PartOptions, *, bias: bool
) -> ExpertMatrices:
    """Creates the matrices of all experts without values, of the class for the encoding of their `parts`: in blocks if
    kernels serve all steps, in groups on a GPU, otherwise widened to the dtype of products when they are loaded. Plain
    ones stay in bfloat16 if kernels widen them in each product."""
    encoding, matrices = options.encoding_of_part(shape[2], *parts), options.block_matrices
    if encoding is None:
        products = options.bfloat16_products(*parts)
        if products is None or shape[1] < products.least_outputs:
            return PlainExperts(shape, parts, bias=bias, dtype=options.dtype)
        return Bfloat16Experts(shape, parts, bias=bias, products=products)
    whole = not shape[2] % max(encoding.block or 0, BLOCK)
    if matrices is not None and matrices.serves_all_rows and whole and matrices.work(encoding, gated=False):
        return BlockExperts(encoding, shape, parts, bias=bias, dtype=options.dtype, matrices=matrices)
    if encoding.block is None:
        return ScaledExperts(encoding, shape, parts, bias=bias, dtype=options.dtype)
    kind = groups_of(encoding.values)
    if options.keeps_groups and kind is not None and not shape[2] % kind.weights:
        return GroupedExperts(kind, shape, parts, bias=bias, dtype=options.dtype)
    return PlainExperts(shape, parts, bias=bias, dtype=options.dtype)
