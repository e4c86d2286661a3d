"""How the parts of a layer are built and called, whatever their kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_jax.architectures.manifest import ParameterName
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint.encoding import Encoding
from sglang_jax.checkpoint.quantization import Encodings, all_plain
from torch_backend.attention.interface import StepAttention
from torch_backend.batch import ForwardBatch
from torch_backend.kv_pages import LayerMemory
from torch_backend.layers.blocks import BlockMatrices
from torch_backend.layers.shard import ModelShard
from torch_backend.operations import Operations, Rotation
from torch_backend.parallel import TensorParallel
from torch_backend.recurrent.interface import StepStates


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOptions:
    """What all parts of a model are built with, of which a rank has its `shard`.

    - `dtype`: of weights.
    - `encodings`: how matrices are stored. `block_matrices`: what keeps those in blocks so, too.
    - `layer`: the part's, None for what belongs to the whole model.
    """

    hidden_size: int
    shard: ModelShard
    dtype: torch.dtype
    operations: Operations
    parallel: TensorParallel
    encodings: Encodings = all_plain
    block_matrices: BlockMatrices | None = None
    layer: int | None = None

    def encoding_of(self, *parts: Part) -> Encoding | None:
        """How the matrices of some parts are stored: None for plain numbers, and where they differ."""
        found = {self.encodings(ParameterName(part, layer=self.layer)) for part in parts}
        return found.pop() if len(found) == 1 else None


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What a step computes once for all layers whose attention is alike in it."""

    attention: StepAttention
    rotation: Rotation
    write_slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerStep:
    """A step as a layer sees it. `attention`: of a layer that has some. `states`: where sequences have their states, in
    a model that keeps some."""

    batch: ForwardBatch
    attention: AttentionStep | None
    states: StepStates | None

    @property
    def padding(self) -> torch.Tensor:
        """bool `[T]`: which tokens are padding."""
        batch = self.batch
        places = torch.arange(len(batch.tokens), dtype=torch.int32, device=batch.tokens.device)
        of = torch.searchsorted(batch.query_starts[1:], places, right=True)
        # A step that was captured has sequences without keys, and may have tokens behind the last sequence.
        return (of == len(batch.kv_lens)) | (batch.kv_lens[of.clamp(max=len(batch.kv_lens) - 1)] == 0)


class LayerPart(Protocol):
    """Attention, a recurrent layer, or a feed-forward one."""

    def __call__(self, x: torch.Tensor, step: LayerStep, memory: LayerMemory) -> torch.Tensor:
        """`[T, hidden]` → this rank's part of `[T, hidden]`, to be summed over ranks. What the layer keeps is written
        into `memory`."""
        ...
