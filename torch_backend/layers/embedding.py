"""Token embeddings and logits, with the vocabulary sharded over ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from sglang_jax.architectures.tensor_names import Part
from torch_backend.layers.linear import Linear
from torch_backend.layers.parameter import Loadable
from torch_backend.layers.part import PartOptions
from torch_backend.layers.shard import ModelShard
from torch_backend.parallel import TensorParallel


class Embedding(Loadable):
    """Rows of a table `[vocab, hidden]`, of which each rank holds a range."""

    def __init__(self, hidden_size: int, shard: ModelShard, *, dtype: torch.dtype, parallel: TensorParallel) -> None:
        super().__init__()
        self.weight = self.declare("weight", (shard.vocabulary_rows, hidden_size), dtype, Part.EMBEDDING)
        self._first = shard.vocabulary.start
        self._parallel = parallel

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int32 `[T]`, all within the vocabulary → `[T, hidden]`."""
        if self._parallel.size == 1:
            return functional.embedding(tokens, self.weight)
        rows = tokens - self._first
        elsewhere = (rows < 0) | (rows >= self.weight.shape[0])
        found = functional.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return self._parallel.all_reduce(found.masked_fill(elsewhere[:, None], 0))


class Head(nn.Module):
    """Logits by a matrix `[vocab, hidden]`; each rank computes those of its rows."""

    def __init__(self, vocab_size: int, options: PartOptions) -> None:
        super().__init__()
        self.linear = Linear(options.hidden_size, options.shard.vocabulary_rows, (Part.HEAD,), options)
        self._vocab_size = vocab_size
        self._parallel = options.parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[m, hidden]` → float32 `[m, vocab]`, on every rank."""
        return self._parallel.all_gather_last(self.linear(hidden))[:, : self._vocab_size].float()
