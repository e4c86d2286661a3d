"""The gated feed-forward layer."""

from __future__ import annotations

import torch
from torch import nn

from sglang_jax.checkpoint import ModelConfig
from torch_backend.layers.linear import Linear
from torch_backend.layers.packed import PackedMatrix
from torch_backend.layers.parameter import forget
from torch_backend.layers.shard import ModelShard
from torch_backend.operations import Operations


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): `down(silu(gate(x)) * up(x))`, gate and up in one product."""

    def __init__(self, config: ModelConfig, shard: ModelShard, *, dtype: torch.dtype, operations: Operations) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, len(shard.intermediate)
        self.gate_up = Linear(hidden, 2 * inner, bias=config.mlp_bias, dtype=dtype)
        # The sum over ranks adds the output's bias once.
        self.down = Linear(inner, hidden, bias=config.mlp_bias and shard.first, dtype=dtype)
        self._operations = operations
        self._packed: _PackedGateUp | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, hidden]` → this rank's part of `[T, hidden]`, to be summed over ranks."""
        output: torch.Tensor = self.down(self._inner(x))
        return output

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return self._packed(x)
        return self._operations.silu_mul(self.gate_up(x))

    def pack(self) -> None:
        """Packs the loaded weights for the CPU's kernels, and forgets the plain ones."""
        self._packed = _PackedGateUp(self.gate_up)
        self.gate_up.weight = forget(self.gate_up.weight)
        self.down.pack()


class _PackedGateUp:
    """Gate and up as two products, the second of which finishes `silu(gate) * up`: nothing is written between."""

    def __init__(self, gate_up: Linear) -> None:
        gate, up = gate_up.weight.chunk(2)
        gate_bias, up_bias = (None, None) if gate_up.bias is None else gate_up.bias.chunk(2)
        self._gate, self._up = PackedMatrix(gate, gate_bias), PackedMatrix(up, up_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._up.multiply_then_scale(x, self._gate.multiply_then_silu(x))
