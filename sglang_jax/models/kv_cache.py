"""The KV pages of a model: shape, type, placement, size."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from sglang_jax.architectures.model_config import ModelConfig, cache_groups, group_of_layers
from sglang_jax.kernels.kv_storage import page_shape
from sglang_jax.layers.platform import PlatformForm
from sglang_jax.layers.sharding import KV_AXES, named_sharding

KVCaches = tuple[jax.Array, ...]
"""Pages of each layer, as `kernels.kv_storage` lays them out."""


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """`shapes` of each layer's pages, `[num_pages, kv_heads, parts, page_size, lanes]`, and the `storage` type."""

    shapes: tuple[tuple[int, ...], ...]
    storage: jnp.dtype


def kv_cache_spec(
    config: ModelConfig,
    dtype: jnp.dtype,
    num_pages: int | tuple[int, ...],
    page_size: int,
    *,
    platform: str | None = None,
) -> KVCacheSpec:
    """Pages that hold keys and values of `dtype`; `platform` is JAX's default unless given.

    `num_pages`: of each of the model's cache groups, or one number for all of them.
    """
    form = PlatformForm.of(platform or jax.default_backend())
    groups = group_of_layers(config)
    counts = num_pages if isinstance(num_pages, tuple) else (num_pages,) * len(cache_groups(config))
    shapes = tuple(
        page_shape(
            counts[group],
            layer.mixer.num_kv_heads,
            page_size,
            layer.mixer.head_dim,
            tiled=form.tiled_kv_pages,
        )
        for group, layer in zip(groups, config.layers, strict=True)
    )
    return KVCacheSpec(shapes, form.kv_storage(dtype))


def allocate(spec: KVCacheSpec, mesh: Mesh) -> KVCaches:
    """Zeroed pages, kv heads spread over the mesh's tensor axis."""
    sharding = named_sharding(mesh, KV_AXES)
    return tuple(jnp.zeros(shape, spec.storage, device=sharding) for shape in spec.shapes)


def kv_bytes_per_token(config: ModelConfig, dtype: jnp.dtype, *, platform: str | None = None) -> tuple[int, ...]:
    """Bytes that one token takes in each of the cache groups, over its layers and all devices, padding included."""
    spec = kv_cache_spec(config, dtype, 1, 1, platform=platform)
    sizes = [math.prod(shape) * spec.storage.itemsize for shape in spec.shapes]
    return tuple(sum(sizes[layer] for layer in group.layers) for group in cache_groups(config))
