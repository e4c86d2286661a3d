"""What a loaded matrix may be made into for a CPU. Layers ask a format for their product, and know no form of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

import torch

from sglang_jax.architectures.kinds.feed_forward import Activation
from torch_backend.layers.by_rows import ByRows, Form, Product, set_limits
from torch_backend.layers.matrix import HasMatrix, InBlocks, Matrix
from torch_backend.layers.packed import PackedMatrix


class WeightFormat(Protocol):
    """How loaded matrices are kept. A layer lets go of its plain weight once it has been given its product."""

    def matrix(self, module: HasMatrix) -> Matrix:
        """The matrix of a module."""
        ...

    def gated(self, gate_up: HasMatrix, activation: Activation) -> Product:
        """`x [T, inputs]` → `activation(gate(x)) * up(x)`, `[T, outputs / 2]`, of gate and up one after the other."""
        ...


class Packed:
    """In the order in which oneDNN's kernels read them."""

    def matrix(self, module: HasMatrix) -> Matrix:
        """See `WeightFormat`."""
        return PackedMatrix(module.weight, module.bias)

    def gated(self, gate_up: HasMatrix, activation: Activation) -> Product:
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

    def __init__(self, blocks: Mapping[HasMatrix, InBlocks]) -> None:
        self.products: list[ByRows] = []
        self._blocks = blocks
        self._packed = Packed()

    def matrix(self, module: HasMatrix) -> Matrix:
        """See `WeightFormat`."""
        packed, blocks = self._packed.matrix(module), self._blocks.get(module)
        if blocks is None:
            return packed
        return self._by_rows(module, blocks, blocks.multiply, packed.multiply, gated=False)

    def gated(self, gate_up: HasMatrix, activation: Activation) -> Product:
        """See `WeightFormat`."""
        packed, blocks = self._packed.gated(gate_up, activation), self._blocks.get(gate_up)
        if blocks is None:
            return packed
        few = partial(blocks.multiply_gated, activation=activation)
        return self._by_rows(gate_up, blocks, few, packed, gated=True).multiply

    def measure(self) -> dict[Form, int]:
        """Up to how many rows blocks are quicker, of each form. Belongs on the thread that runs the model."""
        return set_limits(self.products)

    def _by_rows(self, module: HasMatrix, blocks: InBlocks, few: Product, many: Product, *, gated: bool) -> ByRows:
        outputs, inputs = module.weight.shape
        product = ByRows(Form(outputs, inputs, blocks.bits, gated), few, many, module.weight.dtype)
        self.products.append(product)
        return product
