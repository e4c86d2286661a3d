"""The interface of the parts of a layer, whatever their kind."""

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
from sglang_jax.kernels.ragged_paged_attention.cpu import CpuAttentions, no_cpu_attention
from sglang_jax.layers.batch import ForwardBatch
from sglang_jax.layers.block_matrix import BlockProducts, no_blocks
from sglang_jax.layers.rounded_rows import MinRoundedRows, never_rounded

RotaryTables = tuple[jax.Array, jax.Array]
"""Cosines and sines of a step's tokens."""

States = tuple[jax.Array, ...]
"""A layer's pools for its state, `[slots, ...]` each, in the order of its config's `state`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOptions:
    """The options with which all parts of a model are built.

    - `dtype`: of weights. `kv_dtype`: of keys and values in pages; with 8 bits, `kv_scales` divide stored values.
    - `implementation`: the kernels of attention, and of recurrent states (see `kernels.states`).
    - `cpu_attention`: makes kernels that replace those of `implementation`.
    - `encodings`: how each matrix is stored. `block_products`: makes kernels for matrices in blocks.
    - `min_rounded_rows`: which steps round activations for 8-bit matrices.
    - `layer`: index of the part's layer, None for parts of the whole model.
    - `num_shards`: in which layers are computed, whatever the number of devices; None for one on each device.
    - `dp_ranks`: devices that compute the attention of separate rows; 1: none do.
    """

    hidden_size: int
    dtype: jnp.dtype
    implementation: AttentionImplementation
    kv_dtype: jnp.dtype | None = None
    cpu_attention: CpuAttentions = no_cpu_attention
    encodings: Encodings = all_plain
    block_products: BlockProducts = no_blocks
    min_rounded_rows: MinRoundedRows = never_rounded
    layer: int | None = None
    num_shards: int | None = None
    dp_ranks: int = 1

    def encoding_of(self, *parts: Part) -> Encoding | None:
        """The encoding of the matrices of `parts`; None for plain numbers, or if they differ."""
        found = {self.encodings(ParameterName(part, layer=self.layer)) for part in parts}
        return found.pop() if len(found) == 1 else None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerMemory:
    """The memory of a layer: KV pages in the layout of `kernels.kv_storage` if it has attention, the pools of its state
    if it has one, and, if enabled, counts of the tokens that chose each expert: uint32 `[2, experts]`, low and high
    words."""

    pages: jax.Array | None = None
    states: States = ()
    expert_tokens: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerStep:
    """A step for one layer. `batch`: with the pages of its cache group. `rotary`: None for a layer without
    positions."""

    batch: ForwardBatch
    rotary: RotaryTables | None = None

    @property
    def padding(self) -> jax.Array:
        """Which tokens are padding, bool `[T]`."""
        return jnp.arange(len(self.batch.tokens)) >= self.batch.query_starts[-1]


class LayerPart(Protocol):
    """Attention, a recurrent layer, or a feed-forward one."""

    def __call__(self, x: jax.Array, step: LayerStep, memory: LayerMemory) -> tuple[jax.Array, LayerMemory]:
        """`[T, hidden]` → `[T, hidden]`, and the layer's memory after the step."""
        ...
