"""One decoder layer, of any kind that a `LayerConfig` describes."""

from __future__ import annotations

from dataclasses import replace

import torch

from sglang_jax.architectures.kinds.norm import NormConfig
from sglang_jax.architectures.model_config import LayerConfig
from sglang_jax.architectures.tensor_names import Part
from torch_backend.kv_pages import LayerMemory
from torch_backend.layers.kinds import build_part
from torch_backend.layers.norm import Norm, add_without_norm
from torch_backend.layers.parameter import Loadable
from torch_backend.layers.part import LayerPart, LayerStep, PartOptions
from torch_backend.layers.shards import OneShard, PartInShards
from torch_backend.rounded_rows import Rounding, Rows, rounding_for


class DecoderLayer(Loadable):
    """A token mixer (attention, a recurrent part, or both) and a feed-forward part, each added to the residual stream,
    with the norms of the config."""

    def __init__(self, config: LayerConfig, options: PartOptions, number: int) -> None:
        """Raises `ConfigError` for a kind of part that this backend does not have, naming the layer's `number` in the
        model."""
        super().__init__()
        options = replace(options, layer=number)

        def norm(of: NormConfig | None, part: Part) -> Norm | None:
            if of is None:
                return None
            return Norm(options.hidden_size, of, part, dtype=options.dtype, operations=options.operations)

        def built(part: object | None) -> LayerPart | None:
            if part is None:
                return None
            if not options.shards:
                return build_part(part, options, number)
            alone = [
                replace(options, shard=shard, parallel=OneShard(shard.rank, shard.size)) for shard in options.shards
            ]
            return PartInShards([build_part(part, each, number) for each in alone], options.shards)

        self.config = config
        self.attention_norm = norm(config.mixer_norms.pre, Part.ATTENTION_NORM)
        self.attention = built(config.attention)
        self.recurrent = built(config.recurrent)
        self.attention_post_norm = norm(config.mixer_norms.post, Part.ATTENTION_POST_NORM)
        self.feed_forward_norm = norm(config.feed_forward_norms.pre, Part.FEED_FORWARD_NORM)
        self.feed_forward = built(config.feed_forward)
        self.feed_forward_post_norm = norm(config.feed_forward_norms.post, Part.FEED_FORWARD_POST_NORM)
        self.scale = self.declare("scale", (1,), options.dtype, Part.LAYER_SCALE) if config.learnt_scale else None
        self._parallel = options.parallel

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: LayerStep, memory: LayerMemory
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`x` `[T, hidden]` is the output of the layer below, which is not in the residual stream `[T, hidden]` yet;
        before the first layer, there is no stream. Returns the same of this layer."""
        if self.config.mixer is None:
            rows, residual = self._to_feed_forward(x, residual)
            return self._with_scale(self._feed_forward(rows, step, memory), residual)
        beside = self.feed_forward if self.config.parallel else None
        rounding = rounding_for(self.attention, self.recurrent, beside)
        rows, residual = _add(self.attention_norm, rounding, x, residual)
        attended = self._mix(rows, step, memory)
        if self.feed_forward is None:
            x = self._to_residual(self.attention_post_norm, attended)
        elif self.config.parallel:
            x = self._to_residual(None, attended + self.feed_forward(rows, step, memory))
        else:
            rows, residual = self._to_feed_forward(self._to_residual(self.attention_post_norm, attended), residual)
            x = self._feed_forward(rows, step, memory)
        return self._with_scale(x, residual)

    def _to_feed_forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[Rows, torch.Tensor]:
        """See `_add`."""
        return _add(self.feed_forward_norm, rounding_for(self.feed_forward), x, residual)

    def _feed_forward(self, x: Rows, step: LayerStep, memory: LayerMemory) -> torch.Tensor:
        assert self.feed_forward is not None
        return self._to_residual(self.feed_forward_post_norm, self.feed_forward(x, step, memory))

    def _with_scale(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both multiplied by the layer's scale, if it has one."""
        return (x, residual) if self.scale is None else (x * self.scale, residual * self.scale)

    def _mix(self, x: Rows, step: LayerStep, memory: LayerMemory) -> torch.Tensor:
        """The sum of the mixers' outputs. Writes their pages and states into `memory`."""
        parts = [part for part in (self.attention, self.recurrent) if part is not None]
        found: torch.Tensor = parts[0](x, step, memory)
        for part in parts[1:]:
            found = found + part(x, step, memory)
        return found

    def _to_residual(self, norm: Norm | None, output: torch.Tensor) -> torch.Tensor:
        """The output of a block as it is added to the residual stream, from each rank's share of it."""
        x = self._parallel.all_reduce(output)
        if norm is not None:
            x = norm(x)
        multiplier = self.config.residual_multiplier
        return x if multiplier == 1.0 else x * multiplier


def _add(
    norm: Norm | None, rounding: Rounding | None, x: torch.Tensor, residual: torch.Tensor | None
) -> tuple[Rows, torch.Tensor]:
    """Adds `x` to the residual stream. Returns the input of the next block, as it wants it, and the sum."""
    return add_without_norm(x, residual) if norm is None else norm.add_for(rounding, x, residual)
