"""Llama, Mistral, Qwen2 and Qwen3 (dense): one pre-norm decoder whose differences are all in `ModelConfig`."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from sglang_jax.checkpoint.model_config import ModelConfig
from sglang_jax.checkpoint.rotary import RotaryScaling
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation
from sglang_jax.layers.attention import Attention, RotaryTables
from sglang_jax.layers.batch import ForwardBatch
from sglang_jax.layers.embedding import Embedding, Head
from sglang_jax.layers.feed_forward import FeedForward
from sglang_jax.layers.norm import RMSNorm
from sglang_jax.layers.parameter import matmul, matmul_outputs_first
from sglang_jax.layers.platform import PlatformForm
from sglang_jax.layers.rotary import rotary_tables, rotary_tables_once
from sglang_jax.layers.sharding import Axis
from sglang_jax.models.kv_cache import KVCaches


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(
        self, config: ModelConfig, *, dtype: jnp.dtype, kv_dtype: jnp.dtype, attention: AttentionImplementation
    ) -> None:
        self.attention_norm = RMSNorm(Axis.HIDDEN, config.hidden_size, config.rms_norm_eps, dtype)
        self.attention = Attention(config, dtype=dtype, kv_dtype=kv_dtype, implementation=attention)
        self.feed_forward_norm = RMSNorm(Axis.HIDDEN, config.hidden_size, config.rms_norm_eps, dtype)
        self.feed_forward = FeedForward(config, dtype=dtype)

    def __call__(
        self, x: jax.Array, residual: jax.Array, batch: ForwardBatch, rotary: RotaryTables, kv_pages: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x `[T, hidden]` is what the layer below has yet to add to the residual stream `[T, hidden]`."""
        x, residual = self.attention_norm.add(x, residual)
        x, kv_pages = self.attention(x, batch, rotary, kv_pages)
        x, residual = self.feed_forward_norm.add(x, residual)
        return self.feed_forward(x), residual, kv_pages

    def put_outputs_first(self) -> None:
        """Every matrix, once loaded, as `[out, in]`."""
        for linear in (self.attention.qkv, self.attention.output, self.feed_forward.gate_up, self.feed_forward.down):
            linear.put_outputs_first()


@partial(jax.jit, static_argnums=0)
def _run_layer(
    graph: nnx.GraphDef[DecoderLayer],
    state: nnx.State,
    x: jax.Array,
    residual: jax.Array,
    batch: ForwardBatch,
    rotary: RotaryTables,
    kv_pages: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One layer as a function of its weights. All layers are alike, so that a program traces and lowers only one of
    them; the compiler inlines every call."""
    layer: DecoderLayer = nnx.merge(graph, state)
    return layer(x, residual, batch, rotary, kv_pages)


class Transformer(nnx.Module):
    """The decoder with its embeddings and head.

    Layers are unrolled: a scan over stacked bfloat16 weights copies them all at every step on XLA's CPU backend.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: jnp.dtype,
        kv_dtype: jnp.dtype,
        attention: AttentionImplementation,
        form: PlatformForm,
    ) -> None:
        self.embedding = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = nnx.List(
            [
                DecoderLayer(config, dtype=dtype, kv_dtype=kv_dtype, attention=attention)
                for _ in range(config.num_layers)
            ]
        )
        self.final_norm = RMSNorm(Axis.HIDDEN, config.hidden_size, config.rms_norm_eps, dtype)
        own_head = form.own_head_for_tied_embeddings or not config.tie_word_embeddings
        self.head = Head(config.hidden_size, config.vocab_size, dtype) if own_head else None
        self.rotary = RotaryScaling(config.rope, config.head_dim, config.max_position)
        self.tied = config.tie_word_embeddings
        self.form = form
        self.outputs_first = False

    def arrange(self) -> None:
        """Changes weights, once loaded to one device, to the form that its platform computes with.

        Until then, and on several devices, they are in the form of every platform, in which they are loaded and stored.
        """
        if self.form.outputs_first:
            self.put_outputs_first()

    def put_outputs_first(self) -> None:
        """Every matrix as `[out, in]`: see `PlatformForm`. Tied embeddings are in this form already, so that an own
        head is given up."""
        self.outputs_first = True
        for layer in self.layers:
            layer.put_outputs_first()
        if self.tied:
            self.head = None
        elif self.head is not None:
            self.head.put_outputs_first()

    def __call__(self, batch: ForwardBatch, kv_caches: KVCaches) -> tuple[jax.Array, KVCaches]:
        """Hidden states `[T, hidden]` after the final norm, and the caches with the step's keys and values."""
        residual = self.embedding(batch.tokens)
        if self.form.wide_activations:
            residual = residual.astype(jnp.float32)
        x = jnp.zeros_like(residual)
        tables = rotary_tables_once if self.form.computes_again_for_each_reader else rotary_tables
        rotary = tables(self.rotary, batch.positions)
        written = []
        for layer, kv_pages in zip(self.layers, kv_caches, strict=True):
            x, residual, kv_pages = _run_layer(*nnx.split(layer), x, residual, batch, rotary, kv_pages)
            written.append(kv_pages)
        hidden, _ = self.final_norm.add(x, residual)
        return hidden, tuple(written)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 `[m, vocab]` of hidden states `[m, hidden]`."""
        table = self.embedding.table[...]
        hidden = hidden.astype(table.dtype)
        if self.head is not None:
            return self.head(hidden)
        return matmul_outputs_first(hidden, table) if self.outputs_first else matmul(hidden, table.T)
