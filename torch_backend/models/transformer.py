"""Llama, Mistral, Qwen2 and Qwen3 (dense): one pre-norm decoder whose differences are all in `ModelConfig`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from sglang_jax.checkpoint import ModelConfig
from sglang_jax.checkpoint.rotary import RotaryScaling
from torch_backend.attention.interface import AttentionImplementation
from torch_backend.batch import ForwardBatch
from torch_backend.kv_pages import KVPages
from torch_backend.layers.attention import Attention, LayerStep
from torch_backend.layers.embedding import Embedding, Head
from torch_backend.layers.feed_forward import FeedForward
from torch_backend.layers.norm import RMSNorm
from torch_backend.layers.shard import ModelShard
from torch_backend.operations import Operations
from torch_backend.parallel import SINGLE, TensorParallel
from torch_backend.rotary import RotaryTables


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        shard: ModelShard,
        *,
        dtype: torch.dtype,
        operations: Operations,
        parallel: TensorParallel,
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(hidden, eps, dtype=dtype, operations=operations)
        self.attention = Attention(config, shard, dtype=dtype, operations=operations)
        self.feed_forward_norm = RMSNorm(hidden, eps, dtype=dtype, operations=operations)
        self.feed_forward = FeedForward(config, shard, dtype=dtype, operations=operations)
        self._parallel = parallel

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: LayerStep, kv: KVPages
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x `[T, hidden]` is what the layer below has yet to add to the residual stream, which begins with it."""
        x, residual = self.attention_norm(x, residual)
        x = self._parallel.all_reduce(self.attention(x, step, kv))
        x, residual = self.feed_forward_norm(x, residual)
        return self._parallel.all_reduce(self.feed_forward(x)), residual

    def pack(self) -> None:
        """See `Transformer.pack`."""
        self.attention.qkv.pack()
        self.attention.output.pack()
        self.feed_forward.pack()


class Transformer(nn.Module):
    """The decoder with its embeddings and head, or a rank's part of it. For inference: nothing has gradients."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        operations: Operations,
        attention: AttentionImplementation,
        parallel: TensorParallel,
    ) -> None:
        super().__init__()
        self.shard = ModelShard.of(config, parallel.rank, parallel.size)
        self.device = device
        self.embedding = Embedding(config.hidden_size, self.shard, dtype=dtype, parallel=parallel)
        self.decoder_layers = tuple(
            DecoderLayer(config, self.shard, dtype=dtype, operations=operations, parallel=parallel)
            for _ in range(config.num_layers)
        )
        self.layers = nn.ModuleList(self.decoder_layers)
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, operations=operations)
        self.head = Head(config.hidden_size, config.vocab_size, self.shard, dtype=dtype, parallel=parallel)
        self.tied = config.tie_word_embeddings
        if self.tied:
            self.head.linear.weight = self.embedding.weight
        self._rotary = RotaryTables(RotaryScaling(config.rope, config.head_dim, config.max_position), device)
        self._attention = attention

    def forward(self, batch: ForwardBatch, kv: Sequence[KVPages]) -> torch.Tensor:
        """Hidden states `[T, hidden]` after the final norm. Writes the step's keys and values into `kv`, the pages of
        each layer."""
        step = LayerStep(self._attention.prepare(batch), self._rotary(batch.positions), batch.write_slots)
        x: torch.Tensor = self.embedding(batch.tokens)
        residual = None
        for layer, pages in zip(self.decoder_layers, kv, strict=True):
            x, residual = layer(x, residual, step, pages)
        hidden: torch.Tensor = self.final_norm(x, residual)[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 `[m, vocab]` of hidden states `[m, hidden]`, on every rank."""
        found: torch.Tensor = self.head(hidden)
        return found

    def pack(self) -> None:
        """Turns loaded matrices into the form that the CPU's kernels read best; at any time one of them is held twice.

        Tied embeddings are held in both forms: rows are looked up in the plain one."""
        for layer in self.decoder_layers:
            layer.pack()
        self.head.linear.pack(keep_plain=self.tied)


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    operations: Operations,
    attention: AttentionImplementation,
    parallel: TensorParallel = SINGLE,
) -> Transformer:
    """A model without values (`weights.load_weights` gives them), of which each rank of `parallel` holds its part.

    **Raises:** `ConfigError` if the model cannot be divided among so many ranks.
    """
    return Transformer(
        config, dtype=dtype, device=device, operations=operations, attention=attention, parallel=parallel
    )
