"""Grouped-query self-attention over paged keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from sglang_jax.checkpoint import ModelConfig
from torch_backend.attention.interface import AttentionOptions, StepAttention
from torch_backend.kv_pages import KVPages
from torch_backend.layers.linear import Linear
from torch_backend.layers.parameter import parameter
from torch_backend.layers.shard import ModelShard
from torch_backend.operations import HeadNorms, Operations, Rotation


@dataclass(frozen=True, slots=True)
class LayerStep:
    """What a step computes once for all its layers."""

    attention: StepAttention
    rotation: Rotation
    write_slots: torch.Tensor


class Attention(nn.Module):
    """Projections, optional norms of queries and keys (Qwen3), rotation, cache write, attention, output projection.

    The fused projection gives all queries, all keys, all values.
    """

    def __init__(self, config: ModelConfig, shard: ModelShard, *, dtype: torch.dtype, operations: Operations) -> None:
        super().__init__()
        head_dim = config.head_dim
        fused = (len(shard.heads) + 2 * len(shard.kv_heads)) * head_dim
        self.qkv = Linear(config.hidden_size, fused, bias=config.attention_bias, dtype=dtype)
        # The sum over ranks adds the output's bias once.
        bias = config.attention_out_bias and shard.first
        self.output = Linear(len(shard.heads) * head_dim, config.hidden_size, bias=bias, dtype=dtype)
        self.query_norm = parameter((head_dim,), dtype) if config.qk_norm else None
        self.key_norm = parameter((head_dim,), dtype) if config.qk_norm else None
        self._eps = config.rms_norm_eps
        self._options = AttentionOptions(scale=head_dim**-0.5)
        self._operations = operations

    def forward(self, x: torch.Tensor, step: LayerStep, kv: KVPages) -> torch.Tensor:
        """`[T, hidden]` → this rank's part of `[T, hidden]`, to be summed over ranks. Writes the step's keys and
        values into `kv`."""
        qkv = self.qkv(x)
        queries = self._operations.rotate_and_write(qkv, step.rotation, self._norms(), kv, step.write_slots)
        attended = step.attention(queries, kv, self._options)
        output: torch.Tensor = self.output(attended.view(x.shape[0], -1))
        return output

    def _norms(self) -> HeadNorms | None:
        if self.query_norm is None or self.key_norm is None:
            return None
        return HeadNorms(self.query_norm, self.key_norm, self._eps)
