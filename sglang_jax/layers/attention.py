"""Grouped-query self-attention over paged keys and values."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from sglang_jax.checkpoint.model_config import ModelConfig
from sglang_jax.kernels.ragged_paged_attention import (
    AttentionImplementation,
    AttentionOptions,
    ragged_paged_attention,
    write_kv,
)
from sglang_jax.layers.batch import ForwardBatch
from sglang_jax.layers.linear import Linear
from sglang_jax.layers.norm import RMSNorm
from sglang_jax.layers.parameter import parameter
from sglang_jax.layers.rotary import apply_rotary
from sglang_jax.layers.sharding import KV_AXES, Axis, partition_spec

RotaryTables = tuple[jax.Array, jax.Array]


class Attention(nnx.Module):
    """Projections, optional norms of queries and keys (Qwen3), rotation, cache write, attention, output projection.

    The fused projection is `[hidden, kv_heads, group + 2, head_dim]`: of each kv head its queries, its key, its value.

    **Arguments:** `kv_dtype`: the type of keys and values in pages; one of 8 bits brings `kv_scales`, by which they are
    stored divided. `window`, `soft_cap`, `sinks`: see `AttentionOptions`; a layer with sinks has a parameter for them.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: jnp.dtype,
        implementation: AttentionImplementation,
        kv_dtype: jnp.dtype | None = None,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: bool = False,
    ) -> None:
        self.implementation = implementation
        self.window = window
        self.soft_cap = soft_cap
        self.group = config.num_heads // config.num_kv_heads
        self.scale = config.head_dim**-0.5
        hidden = [(Axis.HIDDEN, config.hidden_size)]
        head = (Axis.HEAD_DIM, config.head_dim)
        fused = [(Axis.KV_HEADS, config.num_kv_heads), (Axis.HEAD_PART, self.group + 2), head]
        heads = [(Axis.HEADS, config.num_heads), head]
        self.qkv = Linear(hidden, fused, bias=config.attention_bias, dtype=dtype)
        self.output = Linear(heads, hidden, bias=config.attention_out_bias, dtype=dtype)
        self.query_norm = RMSNorm(*head, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.key_norm = RMSNorm(*head, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.sinks = parameter([(Axis.HEADS, config.num_heads)], jnp.dtype(jnp.float32)) if sinks else None
        scales = [(Axis.KV_HEADS, config.num_kv_heads), (Axis.KEY_OR_VALUE, 2)]
        scaled = kv_dtype is not None and kv_dtype.itemsize == 1
        self.kv_scales = parameter(scales, jnp.dtype(jnp.float32)) if scaled else None

    def __call__(
        self, x: jax.Array, batch: ForwardBatch, rotary: RotaryTables, kv_pages: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """`x [T, hidden]` → `[T, hidden]` and the layer's pages with the step's keys and values."""
        fused = self.qkv(x)
        queries, keys, values = fused[:, :, : self.group], fused[:, :, self.group], fused[:, :, self.group + 1]
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        queries, keys = apply_rotary(queries, *rotary), apply_rotary(keys, *rotary)
        queries = queries.reshape(x.shape[0], -1, queries.shape[-1])
        attended, kv_pages = write_and_attend(
            self.implementation, queries, keys, values, kv_pages, batch, scale=self.scale, options=self._options()
        )
        return self.output(attended), kv_pages

    def _options(self) -> AttentionOptions:
        return AttentionOptions(
            window=self.window,
            soft_cap=self.soft_cap,
            sinks=None if self.sinks is None else self.sinks[...],
            kv_scales=None if self.kv_scales is None else self.kv_scales[...],
        )


def write_and_attend(
    implementation: AttentionImplementation,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    kv_pages: jax.Array,
    batch: ForwardBatch,
    *,
    scale: float,
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:
    """Stores a step's keys and values, and attends to all that the queries see: see `ragged_paged_attention`.

    Under a mesh kernels run on each device for its own heads, with its part of the options: the compiler spreads
    operations, but not kernels.

    **Arguments:** `queries` `[T, heads, head_dim]`; `keys`, `values` `[T, kv_heads, head_dim]`; `kv_pages` as
    `kernels.kv_storage` describes.

    **Returns:** `[T, heads, head_dim]`, and the pages after the write.
    """

    def run(
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        kv_pages: jax.Array,
        batch: ForwardBatch,
        options: AttentionOptions,
    ) -> tuple[jax.Array, jax.Array]:
        kv_pages = write_kv(implementation, kv_pages, keys, values, batch.write_slots, options=options)
        attended = ragged_paged_attention(implementation, queries, kv_pages, batch, scale=scale, options=options)
        return attended, kv_pages

    mesh = jax.sharding.get_abstract_mesh()
    if implementation is not AttentionImplementation.PALLAS or mesh.empty:
        return run(queries, keys, values, kv_pages, batch, options)
    heads = partition_spec((Axis.TOKENS, Axis.HEADS, Axis.HEAD_DIM))
    kv_heads = partition_spec((Axis.TOKENS, Axis.KV_HEADS, Axis.HEAD_DIM))
    pages = partition_spec(KV_AXES)
    by_device = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(heads, kv_heads, kv_heads, pages, PartitionSpec(), _option_specs(options)),
        out_specs=(heads, pages),
        check_vma=False,
    )
    return by_device(queries, keys, values, kv_pages, batch, options)


def _option_specs(options: AttentionOptions) -> AttentionOptions:
    """Where each array of the options goes."""
    return replace(
        options,
        sinks=None if options.sinks is None else partition_spec((Axis.HEADS,)),
        kv_scales=None if options.kv_scales is None else partition_spec((Axis.KV_HEADS, Axis.KEY_OR_VALUE)),
    )
