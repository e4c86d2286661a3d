"""Grouped-query self-attention over paged keys and values."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from sglang_jax.checkpoint.model_config import ModelConfig
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation, ragged_paged_attention, write_kv
from sglang_jax.layers.batch import ForwardBatch
from sglang_jax.layers.linear import Linear
from sglang_jax.layers.norm import RMSNorm
from sglang_jax.layers.rotary import apply_rotary
from sglang_jax.layers.sharding import KV_AXES, Axis, partition_spec

RotaryTables = tuple[jax.Array, jax.Array]


class Attention(nnx.Module):
    """Projections, optional norms of queries and keys (Qwen3), rotation, cache write, attention, output projection.

    The fused projection is `[hidden, kv_heads, group + 2, head_dim]`: of each kv head its queries, its key, its value.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, implementation: AttentionImplementation) -> None:
        self.implementation = implementation
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
        attended, kv_pages = self._by_device()(queries, keys, values, kv_pages, batch)
        return self.output(attended), kv_pages

    def _write_and_attend(
        self, queries: jax.Array, keys: jax.Array, values: jax.Array, kv_pages: jax.Array, batch: ForwardBatch
    ) -> tuple[jax.Array, jax.Array]:
        kv_pages = write_kv(self.implementation, kv_pages, keys, values, batch.write_slots)
        return ragged_paged_attention(self.implementation, queries, kv_pages, batch, scale=self.scale), kv_pages

    def _by_device(self) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """Each device with its own heads, under a mesh: the compiler spreads operations, but not kernels."""
        mesh = jax.sharding.get_abstract_mesh()
        if self.implementation is not AttentionImplementation.PALLAS or mesh.empty:
            return self._write_and_attend
        heads = partition_spec((Axis.TOKENS, Axis.HEADS, Axis.HEAD_DIM))
        kv_heads = partition_spec((Axis.TOKENS, Axis.KV_HEADS, Axis.HEAD_DIM))
        pages = partition_spec(KV_AXES)
        return jax.shard_map(
            self._write_and_attend,
            mesh=mesh,
            in_specs=(heads, kv_heads, kv_heads, pages, PartitionSpec()),
            out_specs=(heads, pages),
            check_vma=False,
        )
