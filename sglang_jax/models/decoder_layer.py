"""One decoder layer, of any kind that a `LayerConfig` describes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
from flax import nnx

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.norm import NormConfig
from sglang_jax.architectures.model_config import LayerConfig
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.kernels.row_tiles import in_tiles
from sglang_jax.layers.kinds import build_part
from sglang_jax.layers.norm import Norm
from sglang_jax.layers.parameter import parameter
from sglang_jax.layers.part import LayerMemory, LayerPart, LayerStep, PartOptions
from sglang_jax.layers.shards import Shards


class DecoderLayer(nnx.Module):
    """A token mixer (attention, a recurrent part, or both) and a feed-forward part, each added to the residual stream,
    with the norms of the config."""

    def __init__(self, config: LayerConfig, options: PartOptions, number: int) -> None:
        """Raises `ConfigError` for a kind of part that this backend does not have, naming the layer's `number` in the
        model."""

        options = replace(options, layer=number)

        def norm(of: NormConfig | None, part: Part) -> Norm | None:
            return None if of is None else Norm([(Axis.HIDDEN, options.hidden_size)], of, options.dtype, part)

        def built(part: object | None) -> LayerPart | None:
            return None if part is None else build_part(part, options, number)

        self.config = config
        self.shards = None if options.num_shards is None else Shards(options.num_shards, options.implementation)
        self.tile_rows = options.implementation.tile_rows
        self.attention_norm = norm(config.mixer_norms.pre, Part.ATTENTION_NORM)
        self.attention = built(config.attention)
        self.recurrent = built(config.recurrent)
        self.attention_post_norm = norm(config.mixer_norms.post, Part.ATTENTION_POST_NORM)
        self.feed_forward_norm = norm(config.feed_forward_norms.pre, Part.FEED_FORWARD_NORM)
        self.feed_forward = built(config.feed_forward)
        self.feed_forward_post_norm = norm(config.feed_forward_norms.post, Part.FEED_FORWARD_POST_NORM)
        self.scale = parameter([(Axis.ONE, 1)], options.dtype, Part.LAYER_SCALE) if config.learnt_scale else None

    def __call__(
        self, x: jax.Array, residual: jax.Array, step: LayerStep, memory: LayerMemory
    ) -> tuple[jax.Array, jax.Array, LayerMemory]:
        """`x` `[T, hidden]` is the output of the layer below, which is not in the residual stream `[T, hidden]` yet.
        Returns the same of this layer, and its memory after the step."""
        if self.config.mixer is None:
            x, residual = self._add(self.feed_forward_norm, x, residual)
            x, memory = self._feed_forward(x, step, memory)
            return *self._with_scale(self._to_residual(self.feed_forward_post_norm, x), residual), memory
        x, residual = self._add(self.attention_norm, x, residual)
        with jax.named_scope("mixer"):  # the name in profiles
            attended, memory = self._mix(x, step, memory)
        if self.feed_forward is None:
            x = self._to_residual(self.attention_post_norm, attended)
        elif self.config.parallel:
            x = self._scaled(attended)
        else:
            x = self._to_residual(self.attention_post_norm, attended)
            x, residual = self._add(self.feed_forward_norm, x, residual)
            x, memory = self._feed_forward(x, step, memory)
            x = self._to_residual(self.feed_forward_post_norm, x)
        return *self._with_scale(x, residual), memory

    def _with_scale(self, x: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Both multiplied by the layer's scale, if it has one."""
        if self.scale is None:
            return x, residual
        scale = self.scale[...].astype(x.dtype)
        return x * scale, residual * scale

    def _mix(self, x: jax.Array, step: LayerStep, memory: LayerMemory) -> tuple[jax.Array, LayerMemory]:
        """The sum of the mixers' outputs, and that of a parallel feed-forward part, and their memory after the step."""
        parts = [self.attention, self.recurrent, self.feed_forward if self.config.parallel else None]
        return self._sum([part for part in parts if part is not None], x, step, memory)

    def _feed_forward(self, x: jax.Array, step: LayerStep, memory: LayerMemory) -> tuple[jax.Array, LayerMemory]:
        assert self.feed_forward is not None
        with jax.named_scope("feed_forward"):
            return self._sum([self.feed_forward], x, step, memory)

    def _sum(
        self, parts: Sequence[LayerPart], x: jax.Array, step: LayerStep, memory: LayerMemory
    ) -> tuple[jax.Array, LayerMemory]:
        """The sum of the outputs of parts that read the same input."""
        if self.shards is not None:
            return self.shards.apply(self.config, parts, x, step, memory)
        outputs = []
        for part in parts:
            output, memory = part(x, step, memory)
            outputs.append(output)
        return sum(outputs[1:], outputs[0]), memory

    def _to_residual(self, norm: Norm | None, output: jax.Array) -> jax.Array:
        """The output of a block as it is added to the residual stream."""
        if norm is not None:
            output = in_tiles(norm, output, self.tile_rows)
        return self._scaled(output)

    def _scaled(self, x: jax.Array) -> jax.Array:
        return x if self.config.residual_multiplier == 1.0 else x * self.config.residual_multiplier

    def _add(self, norm: Norm | None, x: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Adds `x` to the residual stream. Returns the input of the next block, and the sum."""

        def add(both: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            if norm is not None:
                return norm.add(*both)
            total = both[0] + both[1]
            return total, total

        return in_tiles(add, (x, residual), self.tile_rows)
