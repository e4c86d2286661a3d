"""Decoder-only transformers on flax nnx.

model = build_model(config, dtype=jnp.bfloat16, attention=AttentionImplementation.XLA)   # shapes only
load_weights(model, reader, config, mesh)                # sglang_jax.jax_runner.weights
model.repack()                                          # into the layout that the platform computes with
kv_caches = allocate(kv_cache_spec(config, jnp.bfloat16, num_pages, page_size), mesh)
graph, state = nnx.split(model)                          # inside a jitted function: model = nnx.merge(graph, state)
hidden, kv_caches = model(batch, kv_caches)              # [T, hidden_size]; donate kv_caches
logits = model.logits(hidden)                            # float32 [T, vocab_size]
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.checkpoint.quantization import Encodings, all_plain
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation
from sglang_jax.kernels.ragged_paged_attention.cpu import CpuAttentions, no_cpu_attention
from sglang_jax.layers.block_matrix import BlockProducts, no_blocks
from sglang_jax.layers.platform import PlatformLayout
from sglang_jax.layers.rounded_rows import MinRoundedRows, never_rounded
from sglang_jax.models.kv_cache import KVCaches, KVCacheSpec, StateDtypes, allocate, bytes_of_groups, kv_cache_spec
from sglang_jax.models.parameters import check_shapes
from sglang_jax.models.transformer import Transformer

__all__ = [
    "AttentionImplementation",
    "KVCacheSpec",
    "KVCaches",
    "StateDtypes",
    "Transformer",
    "allocate",
    "build_model",
    "bytes_of_groups",
    "kv_cache_spec",
]


def build_model(
    config: ModelConfig,
    *,
    dtype: jnp.dtype,
    attention: AttentionImplementation,
    platform: str | None = None,
    kv_dtype: jnp.dtype | None = None,
    cpu_attention: CpuAttentions = no_cpu_attention,
    encodings: Encodings = all_plain,
    block_products: BlockProducts = no_blocks,
    min_rounded_rows: MinRoundedRows = never_rounded,
    num_shards: int | None = None,
    dp_ranks: int = 1,
) -> Transformer:
    """A model whose parameters are only shapes until weights are loaded. `dtype`: of weights and activations, bfloat16,
    or float32 for exact float32 throughout; raises `ValueError` for another.

    - `platform`: `cpu`, `gpu` or `tpu`, which decides the layout of some weights; JAX's default if None.
    - `kv_dtype`: of keys and values in the cache; `dtype` if None.
    - `cpu_attention`: makes kernels of attention for a CPU; by default, `attention` computes all.
    - `encodings`: how each matrix is stored; by default, all are plain numbers.
    - `block_products`: makes the kernels of matrices that stay in blocks; by default, none do.
    - `min_rounded_rows`: the steps that round activations for 8-bit matrices; by default, none do.
    - `num_shards`: in which the model is computed, whatever the number of devices; None for one on each device.
    - `dp_ranks`: see `PartOptions`.
    """
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"dtype must be bfloat16 or float32, got {jnp.dtype(dtype)}")
    form = PlatformLayout.of(platform or jax.default_backend())
    model = Transformer(
        config,
        dtype=jnp.dtype(dtype),
        kv_dtype=jnp.dtype(kv_dtype or dtype),
        attention=attention,
        form=form,
        cpu_attention=cpu_attention,
        encodings=encodings,
        block_products=block_products,
        min_rounded_rows=min_rounded_rows,
        num_shards=num_shards,
        dp_ranks=dp_ranks,
    )
    check_shapes(model)
    return model
