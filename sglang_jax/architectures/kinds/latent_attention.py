"""Latent attention (MLA; DeepSeek-V2, 2024): caches one short vector per token, for all heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.norm import NormConfig
from sglang_jax.architectures.kinds.part import HIDDEN, CachedArray, Declared, HeadOrder, linear, side_by_side
from sglang_jax.architectures.kinds.rope import RopeConfig
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.architectures.tensor_names import ParameterKind, Part
from sglang_jax.errors import ConfigError

_HEADS, _LATENT = (Axis.HEADS, Axis.HEAD_DIM), (Axis.LATENT,)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionConfig:
    """Attention whose keys and values are projections of one latent vector per token. Each token also has one rotated
    key, which all heads share.

    - `latent`: size of the latent vector, which is normalised (`norm`) before it is cached. `query_latent`: size of the
      normalised vector from which queries are projected; None if they are projected from the input.
    - `key_dim`: numbers of a head's query and key that do not rotate; `rotary_dim`: numbers after them that do;
      `value_dim`: size of a head's value.
    - `scale` multiplies scores. `rope`: None for a layer without positions. `interleaved_rope`: see `AttentionConfig`.
    - `bias`: whether the projections to latent vectors and to the rotated key have biases; `out_bias`: the output's.
    """

    num_heads: int
    latent: int
    query_latent: int | None
    key_dim: int
    rotary_dim: int
    value_dim: int
    scale: float
    rope: RopeConfig | None
    norm: NormConfig
    interleaved_rope: bool = False
    bias: bool = False
    out_bias: bool = False

    @property
    def window(self) -> None:
        """None: queries attend to all keys."""
        return None

    @property
    def sinks(self) -> bool:
        """False: see `AttentionConfig`."""
        return False

    @property
    def products_per_key(self) -> int:
        """See `AttentionConfig`. Counts the absorbed form (see `expands_from`)."""
        return self.num_heads * (2 * self.latent + self.rotary_dim)

    @property
    def expands_from(self) -> int | None:
        """The minimum number of a row's queries for which the expanded form (computing the keys and values of heads
        from the cached vectors) takes fewer multiply-adds than the absorbed form (multiplying queries by the cached
        vectors); None if it never does.

        Per head, for T queries over S tokens, the absorbed form takes `T * S * (2 * latent + rotary_dim)`
        multiply-adds, and the expanded form `T * S * (key_dim + rotary_dim + value_dim) + S * latent * (key_dim +
        value_dim)`. S cancels out, so the choice depends only on the number of a row's tokens in the step.
        """
        made = self.key_dim + self.value_dim
        saved = 2 * self.latent - made
        return max(-(-self.latent * made // saved), 2) if saved > 0 else None

    @property
    def cached(self) -> tuple[CachedArray, ...]:
        """The array that is cached of each token: the latent vector, followed by the rotated key."""
        parts = self.latent, self.rotary_dim
        return (CachedArray("latent", None, sum(parts), parts),)

    def parameters(self, hidden: int) -> Iterator[Declared]:
        inputs, axes, query = (hidden,), HIDDEN, Part.QUERY
        if self.query_latent is not None:
            inputs, axes, query = (self.query_latent,), _LATENT, Part.QUERY_UP
            yield from linear(Part.QUERY_LATENT, (inputs, (hidden,)), (_LATENT, HIDDEN), self.bias)
            yield Declared(Part.QUERY_LATENT_NORM, ParameterKind.WEIGHT, (_LATENT,), (inputs,), self.norm.offset)
        order = HeadOrder(self.interleaved_rope)
        of_plain, of_rotated = side_by_side(self.key_dim, self.rotary_dim)
        plain = linear(query, ((self.num_heads, self.key_dim), inputs), (_HEADS, axes), False)
        yield from (replace(each, fused_heads=of_plain) for each in plain)
        shape = ((self.num_heads, self.rotary_dim), inputs), (_HEADS, axes), False
        rotated = linear(Part.QUERY_ROTATED, *shape, order=order, stored_as=query)
        yield from (replace(each, fused_heads=of_rotated) for each in rotated)
        yield from linear(Part.LATENT, ((self.latent,), (hidden,)), (_LATENT, HIDDEN), self.bias)
        of_key = ((self.rotary_dim,), (hidden,)), ((Axis.HEAD_DIM,), HIDDEN), self.bias
        yield from linear(Part.KEY_ROTATED, *of_key, order=order)
        yield Declared(Part.LATENT_NORM, ParameterKind.WEIGHT, (_LATENT,), ((self.latent,),), self.norm.offset)
        of_keys, of_values = side_by_side(self.key_dim, self.value_dim)
        keys = linear(Part.KEY_UP, ((self.num_heads, self.key_dim), (self.latent,)), (_HEADS, _LATENT), False)
        yield from (replace(each, fused_heads=of_keys) for each in keys)
        shape = ((self.num_heads, self.value_dim), (self.latent,)), (_HEADS, _LATENT), False
        values = linear(Part.VALUE_UP, *shape, stored_as=Part.KEY_UP)
        yield from (replace(each, fused_heads=of_values) for each in values)
        outputs = ((hidden,), (self.num_heads, self.value_dim)), (HIDDEN, _HEADS), self.out_bias
        yield from linear(Part.OUTPUT, *outputs)

    def optional(self) -> Iterator[Declared]:
        """Yields nothing: see `AttentionConfig`. An 8-bit cache computes its scales."""
        yield from ()

    def sharded(self, over: Parallelism) -> LatentAttentionConfig:
        """See `LayerPart`. Latent vectors are replicated on every device, unless devices have separate rows."""
        if not over.whole_heads and self.num_heads % over.devices:
            raise ConfigError(
                f"{self.num_heads} heads cannot be spread over {over.devices} devices: choose a tp_size that divides "
                "the heads"
            )
        return self
