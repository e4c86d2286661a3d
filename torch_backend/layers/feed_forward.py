"""Feed-forward layers: gated ones, and one with a squared nonlinearity."""

from __future__ import annotations

import torch
from torch import nn

from sglang_jax.architectures.kinds.feed_forward import Activation, FeedForwardConfig, SquaredReluConfig
from sglang_jax.architectures.tensor_names import Part
from torch_backend.kv_pages import LayerMemory
from torch_backend.layers.by_rows import Product
from torch_backend.layers.linear import Linear
from torch_backend.layers.parameter import forget
from torch_backend.layers.part import LayerStep, PartOptions
from torch_backend.layers.weight_format import WeightFormat
from torch_backend.operations import Operations


class FeedForward(nn.Module):
    """`down(activation(gate(x)) * up(x))` (Shazeer 2020), gate and up in one product."""

    def __init__(self, config: FeedForwardConfig, options: PartOptions) -> None:
        super().__init__()
        shard, dtype, hidden_size = options.shard, options.dtype, options.hidden_size
        inner = len(shard.intermediate(config.size))
        self.gate_up = Linear(hidden_size, 2 * inner, (Part.GATE, Part.UP), bias=config.bias, dtype=dtype)
        # The sum over ranks adds the output's bias once.
        self.down = Linear(inner, hidden_size, (Part.DOWN,), bias=config.bias and shard.first, dtype=dtype)
        self._activation = config.activation
        self._gated: Product = _PlainGated(self.gate_up, config.activation, options.operations)

    def forward(self, x: torch.Tensor, step: LayerStep, memory: LayerMemory) -> torch.Tensor:
        """See `LayerPart`."""
        output: torch.Tensor = self.down(self._gated(x))
        return output

    def arrange(self, form: WeightFormat) -> None:
        """Puts the loaded weights in a format, and forgets the plain ones."""
        self._gated = form.gated(self.gate_up, self._activation)
        self.gate_up.weight = forget(self.gate_up.weight)
        self.down.arrange(form)


class SquaredRelu(nn.Module):
    """See `SquaredReluConfig`."""

    def __init__(self, config: SquaredReluConfig, options: PartOptions) -> None:
        super().__init__()
        shard, dtype, hidden_size = options.shard, options.dtype, options.hidden_size
        inner = len(shard.intermediate(config.size))
        self.up = Linear(hidden_size, inner, (Part.UP,), bias=config.bias, dtype=dtype)
        # The sum over ranks adds the output's bias once.
        self.down = Linear(inner, hidden_size, (Part.DOWN,), bias=config.bias and shard.first, dtype=dtype)

    def forward(self, x: torch.Tensor, step: LayerStep, memory: LayerMemory) -> torch.Tensor:
        """See `LayerPart`."""
        output: torch.Tensor = self.down(self.up(x).relu_().square_())
        return output

    def arrange(self, form: WeightFormat) -> None:
        """Puts the loaded weights in a format, and forgets the plain ones."""
        self.up.arrange(form)
        self.down.arrange(form)


class _PlainGated:
    """`activation(gate(x)) * up(x)`, `[T, hidden]` → `[T, intermediate]`: one product, then the activation."""

    def __init__(self, gate_up: Linear, activation: Activation, operations: Operations) -> None:
        self._gate_up = gate_up
        self._activate = {Activation.SILU: operations.silu_mul, Activation.GELU_TANH: operations.gelu_mul}[activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._activate(self._gate_up(x))
