"""Layouts of loaded matrices on a CPU. Layers get their product from a layout, and do not depend on its kind."""

from __future__ import annotations

import logging
import sys
from functools import partial
from typing import Protocol

import torch

from sglang_jax.architectures.kinds.feed_forward import Activation
from torch_backend.layers.matrix import PlainMatrix, TwoFormMatrix
from torch_backend.layers.matrix_by_size import MatrixBySize, MatrixShape, Product, set_limits
from torch_backend.layers.packed import PackedMatrix

logger = logging.getLogger(__name__)


class Layout(Protocol):
    """How loaded matrices are kept. A layer releases its plain weight once it has its product."""

    def product(self, matrix: PlainMatrix) -> Product:
        """`x [T, inputs]` → `[T, outputs]`, rounded once, after the bias."""
        ...

    def gated(self, gate_up: PlainMatrix, activation: Activation) -> Product:
        """`x [T, inputs]` → `activation(gate(x)) * up(x)`, `[T, outputs / 2]`; the matrix is gate, then up."""
        ...


class PackedLayout:
    """The layout of oneDNN's kernels. For matrices that are also kept in blocks, `measure` finds the numbers of rows
    for which blocks are faster; before this, packed matrices are used."""

    def __init__(self) -> None:
        self.products: list[MatrixBySize] = []

    def product(self, matrix: PlainMatrix) -> Product:
        packed = PackedMatrix(matrix.weight, matrix.bias).multiply
        if not isinstance(matrix, TwoFormMatrix):
            return packed
        return self._by_size(matrix, matrix.take_blocks().multiply, packed, gated=False)

    def gated(self, gate_up: PlainMatrix, activation: Activation) -> Product:
        """Two packed products; the second is fused with `activation(gate) * up`, without an intermediate result."""
        gate, up = gate_up.weight.chunk(2)
        gate_bias, up_bias = (None, None) if gate_up.bias is None else gate_up.bias.chunk(2)
        first, second = PackedMatrix(gate, gate_bias), PackedMatrix(up, up_bias)
        activated = {Activation.SILU: first.multiply_then_silu, Activation.GELU_TANH: first.multiply_then_gelu}
        activated_gate = activated[activation]

        def multiply(x: torch.Tensor) -> torch.Tensor:
            return second.multiply_then_scale(x, activated_gate(x))

        if not isinstance(gate_up, TwoFormMatrix):
            return multiply
        small_batch = partial(gate_up.take_blocks().multiply_gated, activation=activation)
        return self._by_size(gate_up, small_batch, multiply, gated=True)

    def measure(self) -> None:
        """Measures up to how many rows blocks are faster, and logs it. To be called on the model's thread."""
        if self.products:
            logger.info(
                "Quantised matrices are used in steps with at most these numbers of rows: %s",
                ", ".join(f"{form.outputs}x{form.inputs} {limit}" for form, limit in set_limits(self.products).items()),
            )

    def use_blocks(self) -> None:
        """Uses blocks for every step, without measuring: then results do not depend on a clock."""
        for product in self.products:
            product.limit = sys.maxsize

    def _by_size(self, matrix: TwoFormMatrix, small_batch: Product, large_batch: Product, *, gated: bool) -> Product:
        outputs, inputs = matrix.weight.shape
        form = MatrixShape(outputs, inputs, matrix.encoding, gated)
        product = MatrixBySize(form, small_batch, large_batch, matrix.weight.dtype)
        self.products.append(product)
        return product.multiply
