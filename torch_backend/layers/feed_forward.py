"""Feed-forward layers, with and without a gate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from sglang_jax.architectures.kinds.feed_forward import FeedForwardConfig, UngatedActivation, UngatedConfig
from sglang_jax.architectures.tensor_names import Part
from torch_backend.kv_pages import LayerMemory
from torch_backend.layers.linear import GatedLinear, Linear
from torch_backend.layers.part import LayerStep, PartOptions
from torch_backend.rounded_rows import Rounding, Rows


class FeedForward(nn.Module):
    """`down(activation(gate(x)) * up(x))` (Shazeer 2020), gate and up in one product."""

    def __init__(self, config: FeedForwardConfig, options: PartOptions) -> None:
        super().__init__()
        shard, hidden_size = options.shard, options.hidden_size
        inner = len(shard.intermediate(config.size))
        both = (Part.GATE, Part.UP)
        self.gate_up = GatedLinear(hidden_size, inner, both, config.activation, options, bias=config.bias)
        # One rank has the bias: the sum over ranks adds it once.
        self.down = Linear(inner, (hidden_size,), (Part.DOWN,), options, bias=config.bias and shard.first)

    @property
    def rounding(self) -> Rounding | None:
        return self.gate_up.rounding

    def forward(self, x: Rows, step: LayerStep, memory: LayerMemory) -> torch.Tensor:
        output: torch.Tensor = self.down(self.gate_up.rows_for(self.down, x))
        return output


_ACTIVATIONS: dict[UngatedActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    UngatedActivation.SQUARED_RELU: lambda x: x.relu_().square_(),
    UngatedActivation.RELU: torch.relu_,
    UngatedActivation.GELU: functional.gelu,
    UngatedActivation.GELU_TANH: partial(functional.gelu, approximate="tanh"),
}
"""They may overwrite their input."""


class Ungated(nn.Module):
    """See `UngatedConfig`."""

    def __init__(self, config: UngatedConfig, options: PartOptions) -> None:
        super().__init__()
        shard, hidden_size = options.shard, options.hidden_size
        inner = len(shard.intermediate(config.size))
        self.up = Linear(hidden_size, (inner,), (Part.UP,), options, bias=config.bias)
        self.down = Linear(inner, (hidden_size,), (Part.DOWN,), options, bias=config.bias and shard.first)
        self._activation = _ACTIVATIONS[config.activation]

    @property
    def rounding(self) -> Rounding | None:
        return self.up.rounding

    def forward(self, x: Rows, step: LayerStep, memory: LayerMemory) -> torch.Tensor:
        output: torch.Tensor = self.down(self._activation(self.up(x)))
        return output
