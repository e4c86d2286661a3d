"""Linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from sglang_jax.architectures.kinds.feed_forward import Activation
from sglang_jax.architectures.tensor_names import Part
from torch_backend.layers.bfloat16 import Bfloat16Matrix
from torch_backend.layers.fixed_rows import FixedRows
from torch_backend.layers.grouped import GroupedMatrix
from torch_backend.layers.layout import Layout
from torch_backend.layers.matrix import (
    JoinedMatrix,
    PlainMatrix,
    QuantisedMatrix,
    ScaledMatrix,
    TwoFormMatrix,
    matrix_for,
    multiply_rows,
)
from torch_backend.layers.matrix_by_size import Product
from torch_backend.layers.part import PartOptions
from torch_backend.rounded_rows import Rounding, Rows


class Linear(nn.Module):
    """`x [T, inputs]` → `[T, outputs]`, rounded once, after the bias. `parts`: matrices that multiply the same input,
    concatenated along the outputs; `outputs`: of each of them."""

    def __init__(
        self, inputs: int, outputs: Sequence[int], parts: Sequence[Part], options: PartOptions, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.matrix = matrix_for(inputs, outputs, parts, options, bias=bias)
        self._product: Product = self.matrix.multiply

    @property
    def rounding(self) -> Rounding | None:
        """See `Reader`. Known once the weights are loaded."""
        return self.matrix.rounding if isinstance(self.matrix, ScaledMatrix) else None

    def forward(self, x: Rows) -> torch.Tensor:
        return self._product(x) if isinstance(x, torch.Tensor) else multiply_rows(self.matrix, x)

    def repack(self, layout: Layout, *, keep_plain: bool = False) -> None:
        """Moves a loaded weight of plain values to a layout, and releases it unless it is needed elsewhere."""
        if isinstance(self.matrix, PlainMatrix):
            self._product = self._repack(layout, self.matrix)
            if not keep_plain:
                self.matrix.release()

    def _repack(self, layout: Layout, matrix: PlainMatrix) -> Product:
        return layout.product(matrix)

    def fix_rows(self, fixed: FixedRows) -> None:
        """Makes the results of a loaded matrix independent of the number of rows."""
        matrix = self.matrix
        if isinstance(matrix, TwoFormMatrix | QuantisedMatrix | JoinedMatrix | Bfloat16Matrix):
            # Such kernels have one order of sums, and serve every step (`PackedLayout.use_blocks`).
            return
        assert not isinstance(matrix, GroupedMatrix), "results of matrices in groups depend on the number of rows"
        fixed.use(matrix)
        kind = type(self), type(matrix), matrix.shape, matrix.bias is None
        self._product = fixed.in_tiles(self._product, matrix.shape[1], matrix.dtype, kind)


class GatedLinear(Linear):
    """`activation(gate(x)) * up(x)` by one product: `x [T, inputs]` → `[T, outputs]`. `parts`: gate and up."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        parts: tuple[Part, Part],
        activation: Activation,
        options: PartOptions,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__(inputs, (outputs, outputs), parts, options, bias=bias)
        operations = options.operations
        self._activation = activation
        gated = {Activation.SILU: operations.silu_mul, Activation.GELU_TANH: operations.gelu_mul}[activation]
        self._gated = gated
        if isinstance(self.matrix, QuantisedMatrix | Bfloat16Matrix):
            self._product = partial(self.matrix.multiply_gated, activation=activation)
        else:
            # Not a method: a module that refers to itself can only be freed by the garbage collector.
            self._product = partial(_in_two_steps, self.matrix.multiply, gated)

    def forward(self, x: Rows) -> torch.Tensor:
        return self._product(x) if isinstance(x, torch.Tensor) else self._gated(multiply_rows(self.matrix, x))

    def rows_for(self, reader: Linear, x: Rows) -> Rows:
        """The same as `reader` wants it."""
        if reader.rounding is None:
            found: torch.Tensor = self(x)
            return found
        return reader.rounding.gated(multiply_rows(self.matrix, x), self._activation)

    def _repack(self, layout: Layout, matrix: PlainMatrix) -> Product:
        return layout.gated(matrix, self._activation)


def _in_two_steps(multiply: Product, activate: Product, x: torch.Tensor) -> torch.Tensor:
    return activate(multiply(x))
