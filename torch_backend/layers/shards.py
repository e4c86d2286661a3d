"""Several shards of a layer in one process, for results that do not depend on the number of processes.

Every process computes its shards one by one, in the same shapes, and their sum is a tree over shards (`TreeSums`), as
published for products on GPUs ("tree-based invariant kernels", Zhang et al. 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from torch_backend.kv_pages import LayerMemory
from torch_backend.layers.parameter import Loadable
from torch_backend.layers.part import LayerPart, LayerStep
from torch_backend.layers.shard import ModelShard
from torch_backend.parallel import TensorParallel
from torch_backend.rounded_rows import Rounding, Rows, rounding_for


@dataclass(frozen=True, slots=True)
class TreeSums:
    """The processes of `parallel`, each with an equal number of adjacent shards. Sums are float32, in pairs of
    neighbours, again and again; each process sums a subtree."""

    parallel: TensorParallel

    @property
    def rank(self) -> int:
        return self.parallel.rank

    @property
    def size(self) -> int:
        return self.parallel.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all shards, in the dtype of `x`: this process's, `[shards, ..., n]` → `[..., n]`."""
        own = _tree([part.float() for part in x])
        if self.size > 1:
            own = _tree(self.parallel.all_gather_last(own).chunk(self.size, dim=-1))
        return own.to(x.dtype)

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        return self.parallel.all_gather_last(x)

    def minimum(self, value: int) -> int:
        return self.parallel.minimum(value)

    def on_host(self) -> TreeSums:
        return TreeSums(self.parallel.on_host())


def _tree(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of neighbours in pairs until one is left; a last one without a neighbour waits for the next round."""
    while len(parts) > 1:
        pairs = [left + right for left, right in zip(parts[::2], parts[1::2], strict=False)]
        parts = [*pairs, *parts[2 * len(pairs) :]]
    return parts[0]


@dataclass(frozen=True, slots=True)
class OneShard:
    """A shard as its layer sees it: one of `size`, whose parts of sums are added outside of the layer."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("a shard has no part in sums within a layer")

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("a shard gathers nothing within a layer")

    def minimum(self, value: int) -> int:
        return value

    def on_host(self) -> OneShard:
        return self


class PartInShards(nn.Module):
    """The shards of one part of a layer: see `LayerPart`, with an axis of shards in front of the output."""

    def __init__(self, parts: Sequence[LayerPart], shards: Sequence[ModelShard]) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.modules_of_parts = nn.ModuleList(of_shard(part, shard) for part, shard in zip(parts, shards, strict=True))

    @property
    def rounding(self) -> Rounding | None:
        return rounding_for(*self.parts)

    def forward(self, x: Rows, step: LayerStep, memory: LayerMemory) -> torch.Tensor:
        return torch.stack([part(x, step, own) for part, own in zip(self.parts, memory.shards, strict=True)])


def of_shard(part: nn.Module | LayerPart, shard: ModelShard) -> nn.Module:
    """Marks the parameters of a part as those of a shard, for loaders."""
    assert isinstance(part, nn.Module)
    for module in part.modules():
        if isinstance(module, Loadable):
            module.shard = shard
    return part
