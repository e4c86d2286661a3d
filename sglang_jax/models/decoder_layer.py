"""One decoder layer of any kind that `LayerConfig` describes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.norm import NormConfig
from sglang_jax.architectures.model_config import LayerConfig
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.kernels.ragged_paged_attention import AttentionImplementation
from sglang_jax.layers.attention import Attention, RotaryTables
from sglang_jax.layers.batch import ForwardBatch
from sglang_jax.layers.feed_forward import feed_forward_layer
from sglang_jax.layers.norm import Norm
from sglang_jax.layers.parameter import parameter
from sglang_jax.layers.recurrent import recurrent_layer
from sglang_jax.layers.weight_format import WeightFormat
from sglang_jax.models.kv_cache import LayerMemory


class DecoderLayer(nnx.Module):
    """What mixes tokens and feed-forward, each added to the residual stream, with norms where the config has them."""

    def __init__(
        self,
        config: LayerConfig,
        hidden_size: int,
        *,
        dtype: jnp.dtype,
        kv_dtype: jnp.dtype,
        attention: AttentionImplementation,
    ) -> None:
        def norm(of: NormConfig | None, part: Part) -> Norm | None:
            return None if of is None else Norm([(Axis.HIDDEN, hidden_size)], of, dtype, part)

        self.config = config
        self.attention_norm = norm(config.mixer_norms.pre, Part.ATTENTION_NORM)
        self.attention = (
            None
            if config.attention is None
            else Attention(config.attention, hidden_size, dtype=dtype, kv_dtype=kv_dtype, implementation=attention)
        )
        self.recurrent = (
            None
            if config.recurrent is None
            else recurrent_layer(config.recurrent, hidden_size, dtype=dtype, implementation=attention)
        )
        self.attention_post_norm = norm(config.mixer_norms.post, Part.ATTENTION_POST_NORM)
        self.feed_forward_norm = norm(config.feed_forward_norms.pre, Part.FEED_FORWARD_NORM)
        inner = config.feed_forward
        self.feed_forward = None if inner is None else feed_forward_layer(inner, hidden_size, dtype=dtype)
        self.feed_forward_post_norm = norm(config.feed_forward_norms.post, Part.FEED_FORWARD_POST_NORM)
        self.scale = parameter([(Axis.ONE, 1)], dtype, Part.LAYER_SCALE) if config.learnt_scale else None

    def __call__(
        self, x: jax.Array, residual: jax.Array, batch: ForwardBatch, rotary: RotaryTables | None, memory: LayerMemory
    ) -> tuple[jax.Array, jax.Array, LayerMemory]:
        """x `[T, hidden]` is what the layer below has yet to add to the residual stream `[T, hidden]`."""
        if self.config.mixer is None:
            x, residual = _add(self.feed_forward_norm, x, residual)
            return *self._with_scale(self._given(self.feed_forward_post_norm, self._fed(x)), residual), memory
        x, residual = _add(self.attention_norm, x, residual)
        with jax.named_scope("mixer"):  # as profiles show it
            attended, memory = self._mixed(x, batch, rotary, memory)
        if self.feed_forward is None:
            x = self._given(self.attention_post_norm, attended)
        elif self.config.parallel:
            x = self._scaled(attended + self._fed(x))
        else:
            x, residual = _add(self.feed_forward_norm, self._given(self.attention_post_norm, attended), residual)
            x = self._given(self.feed_forward_post_norm, self._fed(x))
        return *self._with_scale(x, residual), memory

    def _with_scale(self, x: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Both by the layer's number, if it has one."""
        if self.scale is None:
            return x, residual
        scale = self.scale[...].astype(x.dtype)
        return x * scale, residual * scale

    def _mixed(
        self, x: jax.Array, batch: ForwardBatch, rotary: RotaryTables | None, memory: LayerMemory
    ) -> tuple[jax.Array, LayerMemory]:
        """The output of what mixes tokens, and what it keeps."""
        if self.attention is None:
            assert self.recurrent is not None
            return self.recurrent(x, batch.states, memory)
        if self.recurrent is None:
            return self.attention(x, batch, rotary, memory)
        pages, states = memory
        attended, pages = self.attention(x, batch, rotary, pages)
        found, states = self.recurrent(x, batch.states, states)
        return attended + found, (pages, states)

    def arrange(self, wanted: WeightFormat) -> None:
        """Every matrix, once loaded, in another format."""
        if self.attention is not None:
            self.attention.arrange(wanted)
        if self.recurrent is not None:
            self.recurrent.arrange(wanted)
        if self.feed_forward is not None:
            self.feed_forward.arrange(wanted)

    def _fed(self, x: jax.Array) -> jax.Array:
        assert self.feed_forward is not None
        with jax.named_scope("feed_forward"):
            return self.feed_forward(x)

    def _given(self, norm: Norm | None, output: jax.Array) -> jax.Array:
        """What a block gives to the residual stream."""
        return self._scaled(output if norm is None else norm(output))

    def _scaled(self, x: jax.Array) -> jax.Array:
        return x if self.config.residual_multiplier == 1.0 else x * self.config.residual_multiplier


def _add(norm: Norm | None, x: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds x to the residual stream: what the next block reads, and the sum."""
    if norm is not None:
        return norm.add(x, residual)
    total = x + residual
    return total, total
