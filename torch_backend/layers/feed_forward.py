"""Feed-forward layers: gated ones, and one with a squared nonlinearity."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from sglang_jax.architectures.model_config import Activation, FeedForwardConfig, SquaredReluConfig
from sglang_jax.architectures.tensor_names import Part
from torch_backend.layers.by_rows import ByRows, Form, Product
from torch_backend.layers.linear import Linear
from torch_backend.layers.packed import PackedMatrix
from torch_backend.layers.parameter import forget
from torch_backend.layers.shard import ModelShard
from torch_backend.operations import Operations


def feed_forward_layer(
    config: FeedForwardConfig | SquaredReluConfig,
    hidden_size: int,
    shard: ModelShard,
    *,
    dtype: torch.dtype,
    operations: Operations,
) -> FeedForward | SquaredRelu:
    """A rank's part of the layer of a config."""
    if isinstance(config, SquaredReluConfig):
        return SquaredRelu(config, hidden_size, shard, dtype=dtype)
    return FeedForward(config, hidden_size, shard, dtype=dtype, operations=operations)


class FeedForward(nn.Module):
    """`down(activation(gate(x)) * up(x))` (Shazeer 2020), gate and up in one product."""

    def __init__(
        self,
        config: FeedForwardConfig,
        hidden_size: int,
        shard: ModelShard,
        *,
        dtype: torch.dtype,
        operations: Operations,
    ) -> None:
        super().__init__()
        inner = len(shard.intermediate(config.size))
        self.gate_up = Linear(hidden_size, 2 * inner, (Part.GATE, Part.UP), bias=config.bias, dtype=dtype)
        # The sum over ranks adds the output's bias once.
        self.down = Linear(inner, hidden_size, (Part.DOWN,), bias=config.bias and shard.first, dtype=dtype)
        self._activation = config.activation
        self._gated: Product = _PlainGated(self.gate_up, config.activation, operations)
        self.by_rows: ByRows | None = None
        """The two forms of gate and up, if they have two."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, hidden]` → this rank's part of `[T, hidden]`, to be summed over ranks."""
        output: torch.Tensor = self.down(self._gated(x))
        return output

    def pack(self) -> None:
        """Packs the loaded weights for the CPU's kernels, and forgets the plain ones."""
        packed = _PackedGated(self.gate_up, self._activation)
        self._gated = packed
        blocks = self.gate_up.blocks
        if blocks is not None:
            form = Form(self.gate_up.weight.shape[0], self.gate_up.weight.shape[1], blocks.bits, gated=True)
            few = partial(blocks.multiply_gated, activation=self._activation)
            self.by_rows = ByRows(form, few, packed, self.gate_up.weight.dtype)
            self._gated = self.by_rows.multiply
        self.gate_up.weight = forget(self.gate_up.weight)
        self.down.pack()


class SquaredRelu(nn.Module):
    """See `SquaredReluConfig`."""

    def __init__(self, config: SquaredReluConfig, hidden_size: int, shard: ModelShard, *, dtype: torch.dtype) -> None:
        super().__init__()
        inner = len(shard.intermediate(config.size))
        self.up = Linear(hidden_size, inner, (Part.UP,), bias=config.bias, dtype=dtype)
        # The sum over ranks adds the output's bias once.
        self.down = Linear(inner, hidden_size, (Part.DOWN,), bias=config.bias and shard.first, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, hidden]` → this rank's part of `[T, hidden]`, to be summed over ranks."""
        output: torch.Tensor = self.down(self.up(x).relu_().square_())
        return output

    def pack(self) -> None:
        """Packs the loaded weights for the CPU's kernels, and forgets the plain ones."""
        self.up.pack()
        self.down.pack()


class _PlainGated:
    """`activation(gate(x)) * up(x)`, `[T, hidden]` → `[T, intermediate]`: one product, then the activation."""

    def __init__(self, gate_up: Linear, activation: Activation, operations: Operations) -> None:
        self._gate_up = gate_up
        self._activate = {Activation.SILU: operations.silu_mul, Activation.GELU_TANH: operations.gelu_mul}[activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._activate(self._gate_up(x))


class _PackedGated:
    """Two products, the second of which finishes `activation(gate) * up`: nothing is written between."""

    def __init__(self, gate_up: Linear, activation: Activation) -> None:
        gate, up = gate_up.weight.chunk(2)
        gate_bias, up_bias = (None, None) if gate_up.bias is None else gate_up.bias.chunk(2)
        packed, self._up = PackedMatrix(gate, gate_bias), PackedMatrix(up, up_bias)
        self._activated_gate = {
            Activation.SILU: packed.multiply_then_silu,
            Activation.GELU_TANH: packed.multiply_then_gelu,
        }[activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._up.multiply_then_scale(x, self._activated_gate(x))
