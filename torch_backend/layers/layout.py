"""What a loaded matrix may be made into for a CPU. Layers ask a layout for their product, and know none of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

import torch

from sglang_jax.architectures.kinds.feed_forward import Activation
from torch_backend.layers.by_rows import ByRows, Form, Product, set_limits
from torch_backend.layers.matrix import InBlocks, PlainMatrix
from torch_backend.layers.packed import PackedMatrix


class Layout(Protocol):
    """How loaded matrices are kept. A layer lets go of its plain weight once it has been given its product."""

    def product(self, matrix: PlainMatrix) -> Product:
        """`x [T, inputs]` → `[T, outputs]`, rounded once, after the bias."""
        ...

    def gated(self, gate_up: PlainMatrix, activation: Activation) -> Product:
        """`x [T, inputs]` → `activation(gate(x)) * up(x)`, `[T, outputs / 2]`, of gate and up one after the other."""
        ...


class Packed:
    """In the order in which oneDNN's kernels read them."""

    def product(self, matrix: PlainMatrix) -> Product:
        """See `Layout`."""
        return PackedMatrix(matrix.weight, matrix.bias).multiply

    def gated(self, gate_up: PlainMatrix, activation: Activation) -> Product:
        """Two products, the second of which finishes `activation(gate) * up`: nothing is written between."""
        gate, up = gate_up.weight.chunk(2)
        gate_bias, up_bias = (None, None) if gate_up.bias is None else gate_up.bias.chunk(2)
        first, second = PackedMatrix(gate, gate_bias), PackedMatrix(up, up_bias)
        activated = {Activation.SILU: first.multiply_then_silu, Activation.GELU_TANH: first.multiply_then_gelu}
        activated_gate = activated[activation]

        def multiply(x: torch.Tensor) -> torch.Tensor:
            return second.multiply_then_scale(x, activated_gate(x))

        return multiply


class PackedAndBlocks:
    """Packed, and those of `blocks` in the checkpoint's blocks too: the quicker form for so many rows serves a step.

    `measure` finds out which that is; until then the packed form serves all.
    """

    def __init__(self, blocks: Mapping[PlainMatrix, InBlocks]) -> None:
        self.products: list[ByRows] = []
        self._blocks = blocks
        self._packed = Packed()

    def product(self, matrix: PlainMatrix) -> Product:
        """See `Layout`."""
        packed, blocks = self._packed.product(matrix), self._blocks.get(matrix)
        if blocks is None:
            return packed
        return self._by_rows(matrix, blocks, blocks.multiply, packed, gated=False)

    def gated(self, gate_up: PlainMatrix, activation: Activation) -> Product:
        """See `Layout`."""
        packed, blocks = self._packed.gated(gate_up, activation), self._blocks.get(gate_up)
        if blocks is None:
            return packed
        few = partial(blocks.multiply_gated, activation=activation)
        return self._by_rows(gate_up, blocks, few, packed, gated=True)

    def measure(self) -> dict[Form, int]:
        """Up to how many rows blocks are quicker, of each form. Belongs on the thread that runs the model."""
        return set_limits(self.products)

    def _by_rows(self, matrix: PlainMatrix, blocks: InBlocks, few: Product, many: Product, *, gated: bool) -> Product:
        outputs, inputs = matrix.weight.shape
        product = ByRows(Form(outputs, inputs, blocks.bits, gated), few, many, matrix.weight.dtype)
        self.products.append(product)
        return product.multiply
