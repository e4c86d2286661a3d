"""How the parts of a layer are built and called, whatever their kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from sglang_jax.architectures.manifest import ParameterName
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint.encoding import Encoding
from sglang_jax.checkpoint.quantization import Encodings, all_plain
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation
from sglang_jax.layers.batch import ForwardBatch
from sglang_jax.layers.block_matrix import BlockProducts, no_blocks

RotaryTables = tuple[jax.Array, jax.Array]
"""Cosines and sines of a step's tokens."""

States = tuple[jax.Array, ...]
"""A layer's pools for its state, `[slots, ...]` each, in the order of its config's `state`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOptions:
    """What all parts of a model are built with.

    - `dtype`: of weights. `kv_dtype`: of keys and values in pages; one of 8 bits brings `kv_scales`, by which they are
      stored divided.
    - `implementation`: the kernels of attention, and of recurrent states (see `kernels.states`).
    - `encodings`: how matrices are stored. `block_products`: kernels for those in blocks.
    - `layer`: the part's, None for what belongs to the whole model.
    """

    hidden_size: int
    dtype: jnp.dtype
    implementation: AttentionImplementation
    kv_dtype: jnp.dtype | None = None
    encodings: Encodings = all_plain
    block_products: BlockProducts = no_blocks
    layer: int | None = None

    def encoding_of(self, *parts: Part) -> Encoding | None:
        """How the matrices of some parts are stored: None for plain numbers, and where they differ."""
        found = {self.encodings(ParameterName(part, layer=self.layer)) for part in parts}
        return found.pop() if len(found) == 1 else None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerMemory:
    """What a layer keeps of sequences: KV pages, as `kernels.kv_storage` lays them out, where it has attention, and the
    pools of its state, where it has one.

    `expert_tokens`: how many tokens each expert was chosen by, if that is counted: uint32 `[2, experts]`, low words and
    high words.
    """

    pages: jax.Array | None = None
    states: States = ()
    expert_tokens: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerStep:
    """A step as a layer sees it. `batch`: in the pages of the layer's cache group. `rotary`: None without positions."""

    batch: ForwardBatch
    rotary: RotaryTables | None = None

    @property
    def padding(self) -> jax.Array:
        """bool `[T]`: which tokens are padding."""
        return jnp.arange(len(self.batch.tokens)) >= self.batch.query_starts[-1]


class LayerPart(Protocol):
    """Attention, a recurrent layer, or a feed-forward one."""

    def __call__(self, x: jax.Array, step: LayerStep, memory: LayerMemory) -> tuple[jax.Array, LayerMemory]:
        """`[T, hidden]` → `[T, hidden]`, and what the layer keeps after the step."""
        ...
