"""The KV pages of a model: shape, type, placement, size."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.kernels.kv_storage import page_shape
from sglang_jax.layers.platform import PlatformForm
from sglang_jax.layers.sharding import KV_AXES, named_sharding

KVCaches = tuple[jax.Array, ...]
"""Pages of each layer, as `kernels.kv_storage` lays them out."""


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """`shape` of one layer's pages, `[num_pages, kv_heads, parts, page_size, lanes]`, and the type that holds them."""

    num_layers: int
    shape: tuple[int, ...]
    storage: jnp.dtype


def kv_cache_spec(
    config: ModelConfig, dtype: jnp.dtype, num_pages: int, page_size: int, *, platform: str | None = None
) -> KVCacheSpec:
    """Pages that hold keys and values of `dtype`; `platform` is JAX's default unless given."""
    form = PlatformForm.of(platform or jax.default_backend())
    shape = page_shape(num_pages, config.num_kv_heads, page_size, config.head_dim, tiled=form.tiled_kv_pages)
    return KVCacheSpec(config.num_layers, shape, form.kv_storage(dtype))


def allocate(spec: KVCacheSpec, mesh: Mesh) -> KVCaches:
    """Zeroed pages, kv heads spread over the mesh's tensor axis."""
    sharding = named_sharding(mesh, KV_AXES)
    return tuple(jnp.zeros(spec.shape, spec.storage, device=sharding) for _ in range(spec.num_layers))


def kv_bytes_per_token(config: ModelConfig, dtype: jnp.dtype, *, platform: str | None = None) -> int:
    """Bytes that one token takes over all layers and devices, padding included."""
    spec = kv_cache_spec(config, dtype, 1, 1, platform=platform)
    return spec.num_layers * math.prod(spec.shape) * spec.storage.itemsize
