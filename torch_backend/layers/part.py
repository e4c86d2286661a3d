"""How the parts of a layer are built and called."""

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
from torch_backend.elementwise import Apply, directly
from torch_backend.kv_pages import LayerMemory
from torch_backend.layers.bfloat16 import Bfloat16Products, Bfloat16Weights
from torch_backend.layers.blocks import BlockMatrices
from torch_backend.layers.shard import ModelShard
from torch_backend.operations import Operations, Rotation
from torch_backend.parallel import TensorParallel
from torch_backend.recurrent.interface import StepStates
from torch_backend.rounded_rows import Reader, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOptions:
    """Options of all parts of a model, of which a rank has its `shard`. `dtype`: of weights; `encodings`: how matrices
    are stored; `block_matrices`: kernels for matrices in GGUF blocks; `keeps_groups`: matrices in groups stay so, where
    no such kernel reads them; `bfloat16`: matrices that stay in bfloat16;
    `layer`: the part's, None for parts of the whole model; `each`: how functions of elements are applied; `fixed`: a
    token's result must not depend on the other tokens of the step. `shards`: those that the process computes one by
    one, if it has several."""

    hidden_size: int
    shard: ModelShard
    dtype: torch.dtype
    operations: Operations
    parallel: TensorParallel
    encodings: Encodings = all_plain
    block_matrices: BlockMatrices | None = None
    keeps_groups: bool = False
    bfloat16: Bfloat16Weights | None = None
    layer: int | None = None
    each: Apply = directly
    fixed: bool = False
    shards: tuple[ModelShard, ...] = ()

    def encoding_of(self, *parts: Part) -> Encoding | None:
        """How the matrices of some parts are stored: None for plain values, and if they differ."""
        found = {self.encodings(ParameterName(part, layer=self.layer)) for part in parts}
        return found.pop() if len(found) == 1 else None

    def encoding_of_part(self, inputs: int, *parts: Part) -> Encoding | None:
        """The same for the shard's part of the matrices, which has `inputs` columns: see `Encoding.for_inputs`."""
        found = self.encoding_of(*parts)
        return None if found is None else found.for_inputs(inputs)

    def bfloat16_products(self, *parts: Part) -> Bfloat16Products | None:
        """The products of a matrix of some parts, if it stays in bfloat16."""
        stay = self.bfloat16
        if stay is None or not all(ParameterName(part, layer=self.layer) in stay.names for part in parts):
            return None
        return stay.products


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """Values that a step computes once for all layers with the same kind of attention."""

    attention: StepAttention
    rotation: Rotation
    write_slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerStep:
    """A step, for one layer. `attention`: of a layer with attention; `states`: of a model with recurrent states."""

    batch: ForwardBatch
    attention: AttentionStep | None
    states: StepStates | None

    @property
    def padding(self) -> torch.Tensor:
        """Which tokens are padding, bool `[T]`."""
        batch = self.batch
        places = torch.arange(len(batch.tokens), dtype=torch.int32, device=batch.tokens.device)
        of = torch.searchsorted(batch.query_starts[1:], places, right=True)
        # A captured step has sequences without keys, and may have tokens after the last sequence.
        return (of == len(batch.kv_lens)) | (batch.kv_lens[of.clamp(max=len(batch.kv_lens) - 1)] == 0)


class LayerPart(Reader, Protocol):
    """Attention, a recurrent layer, or a feed-forward layer."""

    def __call__(self, x: Rows, step: LayerStep, memory: LayerMemory) -> torch.Tensor:
        """`[T, hidden]`, plain numbers or rounded by `rounding` → this rank's part of `[T, hidden]`, to be summed over
        ranks. Updates the layer's `memory`."""
        ...
