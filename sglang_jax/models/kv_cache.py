"""The memory of a model's layers, KV pages and recurrent states: shapes, dtypes, sharding and bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sglang_jax.architectures.kinds.recurrent import CONV_STATE, StateArray, StateDtype
from sglang_jax.architectures.model_config import (
    CacheGroup,
    LayerConfig,
    ModelConfig,
    cache_groups,
    group_of_layers,
    num_slots,
)
from sglang_jax.kernels.causal_convolution import tail_shape
from sglang_jax.kernels.kv_storage import page_shape
from sglang_jax.layers.part import LayerMemory, States
from sglang_jax.layers.platform import PlatformLayout
from sglang_jax.layers.sharding import KV_AXES, PAGES_OF_RANKS, named_sharding, spec_of_state

_FLOAT32 = jnp.dtype(jnp.float32)

KVCaches = tuple[LayerMemory, ...]
"""The memory of each layer."""


def states_of(memory: KVCaches) -> list[States]:
    return [layer.states for layer in memory if layer.states]


def with_states(memory: KVCaches, states: list[States]) -> KVCaches:
    """`memory` with other state pools, in the order of `states_of`."""
    others = iter(states)
    return tuple(replace(layer, states=next(others)) if layer.states else layer for layer in memory)


@dataclass(frozen=True, slots=True)
class StatePool:
    """One array `[slots, ...]` of a layer's states, and its sharding over a mesh."""

    shape: tuple[int, ...]
    dtype: jnp.dtype
    spec: PartitionSpec

    def on(self, mesh: Mesh) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=NamedSharding(mesh, self.spec))


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The memory of all layers, with one entry per layer in each field but `storage`.

    - `shapes`: of its pages, `[num_pages, kv_heads, parts, page_size, lanes]`; `()` for a layer without pages.
    - `sharded`: whether its KV heads are sharded over the devices; otherwise each device has them all.
    - `ranks`: devices of which each has separate pages, one after the other in the arrays; 1: pages are those of all.
    - `storage`: dtype of pages. `states`: its state pools, empty for attention.
    - `counted`: number of experts whose tokens it counts.
    """

    shapes: tuple[tuple[int, ...], ...]
    sharded: tuple[bool, ...]
    storage: jnp.dtype
    states: tuple[tuple[StatePool, ...], ...]
    counted: tuple[int, ...]
    ranks: int = 1

    def memory(self, mesh: Mesh) -> KVCaches:
        """The shapes of each layer's memory, with KV heads and heads of states sharded over the mesh's tensor axis."""
        heads, whole = named_sharding(mesh, KV_AXES), NamedSharding(mesh, PartitionSpec())
        others = NamedSharding(mesh, PAGES_OF_RANKS) if self.ranks > 1 else whole

        def of(shape: tuple[int, ...], sharded: bool, states: tuple[StatePool, ...], experts: int) -> LayerMemory:
            pages = heads if sharded else others
            paged = jax.ShapeDtypeStruct(shape, self.storage, sharding=pages) if shape else None
            words = jax.ShapeDtypeStruct((2, experts), jnp.uint32, sharding=whole) if experts else None
            return LayerMemory(paged, tuple(state.on(mesh) for state in states), words)

        return tuple(map(of, self.shapes, self.sharded, self.states, self.counted))

    def bytes(self, layer: int, devices: int) -> int:
        """Bytes of a layer's memory on each of `devices` devices."""
        pages = math.prod(self.shapes[layer]) * self.storage.itemsize if self.shapes[layer] else 0
        states = sum(math.prod(state.shape) * state.dtype.itemsize for state in self.states[layer])
        return pages // (devices if self.sharded[layer] else self.ranks) + states // devices


def kv_cache_spec(
    config: ModelConfig,
    dtype: jnp.dtype,
    num_pages: int | tuple[int, ...],
    page_size: int,
    *,
    platform: str | None = None,
    state_dtypes: StateDtypes | None = None,
    count_experts: bool = False,
    shards_on_device: int = 1,
    ranks: int = 1,
) -> KVCacheSpec:
    """The memory of a model: pages with keys and values of `dtype`, and slots for states. `num_pages`: pages, or slots,
    of each cache group, or one number for all. `platform`: JAX's default if None; `state_dtypes`: float32 if None.
    `count_experts`: whether layers count the tokens that choose each expert. `shards_on_device`: each device has the
    heads of this many shards; the pages, or slots, of each shard follow those of the one before. `ranks`: each has
    `num_pages` separate pages."""
    form = PlatformLayout.of(platform or jax.default_backend())
    groups = group_of_layers(config)
    counts = num_pages if isinstance(num_pages, tuple) else (num_pages,) * len(cache_groups(config))
    slots = num_slots(config, counts)

    def pages(layer: LayerConfig, group: int | None) -> tuple[int, ...]:
        if layer.attention is None or group is None:
            return ()
        # A page is one array, so that one copy fetches it.
        (heads, width), *others = dict.fromkeys((array.heads, array.width) for array in layer.attention.cached)
        assert not others, "cached arrays have one shape"
        shared, own, count = len(layer.attention.cached) == 1, heads or 1, counts[group]
        if layer.caches_heads:
            own, count = own // shards_on_device, count * shards_on_device
        tiled, in_8_bits = form.tiled_kv_pages, dtype.itemsize == 1
        return page_shape(count * ranks, own, page_size, width, tiled=tiled, shared=shared, in_8_bits=in_8_bits)

    shapes = tuple(pages(layer, group) for group, layer in zip(groups, config.layers, strict=True))
    tiled, dtypes = form.tiled_state_tails, state_dtypes or StateDtypes()
    states = tuple(_pools(layer, slots, dtypes, shards_on_device, tiled=tiled) for layer in config.layers)
    counted = tuple(layer.num_experts if count_experts else 0 for layer in config.layers)
    sharded = tuple(layer.caches_heads for layer in config.layers)
    return KVCacheSpec(shapes, sharded, form.kv_storage(dtype), states, counted, ranks)


@dataclass(frozen=True, slots=True)
class StateDtypes:
    """Dtypes of the arrays of states: see `architectures.StateDtype`."""

    activations: jnp.dtype = _FLOAT32
    recurrent: jnp.dtype = _FLOAT32

    def of(self, kind: StateDtype) -> jnp.dtype:
        return self.activations if kind is StateDtype.ACTIVATIONS else self.recurrent


def _pools(
    layer: LayerConfig, slots: int, dtypes: StateDtypes, shards_on_device: int, *, tiled: bool
) -> tuple[StatePool, ...]:
    """`tiled`: whether the last inputs of convolutions are in tiles (see `kernels.causal_convolution`)."""
    recurrent = layer.recurrent
    if recurrent is None:
        return ()

    def of(array: StateArray) -> StatePool:
        axis = array.sharded_axis
        shape = (*array.shape[:axis], array.shape[axis] // shards_on_device, *array.shape[axis + 1 :])
        if array.name == CONV_STATE:
            shape = tail_shape(*shape, tiled=tiled, shards=recurrent.shards // shards_on_device)
        return StatePool((slots * shards_on_device, *shape), dtypes.of(array.dtype), spec_of_state(array))

    return tuple(map(of, recurrent.state))


def allocate(spec: KVCacheSpec, mesh: Mesh) -> KVCaches:
    return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype, device=array.sharding), spec.memory(mesh))


def bytes_of_groups(
    config: ModelConfig,
    dtype: jnp.dtype,
    page_size: int,
    *,
    platform: str | None = None,
    state_dtypes: StateDtypes | None = None,
    devices: int = 1,
    shards_on_device: int = 1,
) -> tuple[int, ...]:
    """Bytes on each of `devices` devices of one page, or one slot, of each cache group, over all of its layers and with
    padding."""
    per_token = kv_cache_spec(
        config, dtype, 1, 1, platform=platform, state_dtypes=state_dtypes, shards_on_device=shards_on_device
    )

    def of_one(group: CacheGroup) -> int:
        return sum(per_token.bytes(layer, devices) for layer in group.layers)

    return tuple(of_one(group) * (1 if group.kind.keeps_states else page_size) for group in cache_groups(config))
