"""The gated feed-forward layer."""

from __future__ import annotations

import torch
from torch import nn

from sglang_jax.checkpoint import ModelConfig
from torch_backend.layers.linear import Linear
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, hidden]` → this rank's part of `[T, hidden]`, to be summed over ranks."""
        output: torch.Tensor = self.down(self._operations.silu_mul(self.gate_up(x)))
        return output
