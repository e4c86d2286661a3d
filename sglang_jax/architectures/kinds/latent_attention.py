"""Latent attention (MLA; DeepSeek-V2, 2024): one short vector of a token is cached, however many heads there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.norm import NormConfig
from sglang_jax.architectures.kinds.part import HIDDEN, CachedArray, Declared, HeadOrder, linear
from sglang_jax.architectures.kinds.rope import RopeConfig
from sglang_jax.architectures.tensor_names import Kind, Part
from sglang_jax.errors import ConfigError

_HEADS, _LATENT = (Axis.HEADS, Axis.HEAD_DIM), (Axis.LATENT,)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionConfig:
    """Attention whose keys and values are projections of one latent vector of a token, beside which a token has one
    rotated key for all heads.

    - `latent`: numbers of the latent vector, which is normalised (`norm`) before it is cached. `query_latent`: of that
      which queries are projected from, normalised too; None where they are projected from the input.
    - `key_dim`: numbers of a head's query and key without positions; `rotary_dim`: of those that rotate, behind them;
      `value_dim`: of a head's value.
    - `scale` multiplies scores. `rope`: None for a layer without positions. `interleaved_rope`: see `AttentionConfig`.
    - `bias`: of the projections to latent vectors and to the rotated key; `out_bias`: of the output.
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
        """Queries attend to all keys."""
        return None

    @property
    def sinks(self) -> bool:
        """See `AttentionConfig`: there are none."""
        return False

    @property
    def products_per_key(self) -> int:
        """See `AttentionConfig`: as queries are multiplied by latent vectors."""
        return self.num_heads * (2 * self.latent + self.rotary_dim)

    @property
    def expands_from(self) -> int | None:
        """The fewest queries of a row for which it takes fewer products to make the keys and values of heads from the
        cached vectors (the expanded form) than to multiply queries by these (the absorbed form); None if it never does.

        For T queries over S tokens, the absorbed form takes `T * S * (2 * latent + rotary_dim)` multiply-adds per head,
        and the expanded form `T * S * (key_dim + rotary_dim + value_dim) + S * latent * (key_dim + value_dim)`. S drops
        out, so the choice depends only on the number of a row's tokens in the step.
        """
        made = self.key_dim + self.value_dim
        saved = 2 * self.latent - made
        return max(-(-self.latent * made // saved), 2) if saved > 0 else None

    @property
    def cached(self) -> tuple[CachedArray, ...]:
        """What is kept of each token: the latent vector, and behind it the rotated key."""
        return (CachedArray("latent", None, self.latent + self.rotary_dim),)

    def parameters(self, hidden: int) -> Iterator[Declared]:
        """See `LayerPart`."""
        inputs, axes, query = (hidden,), HIDDEN, Part.QUERY
        if self.query_latent is not None:
            inputs, axes, query = (self.query_latent,), _LATENT, Part.QUERY_UP
            yield from linear(Part.QUERY_LATENT, (inputs, (hidden,)), (_LATENT, HIDDEN), self.bias)
            yield Declared(Part.QUERY_LATENT_NORM, Kind.WEIGHT, (_LATENT,), (inputs,), self.norm.offset)
        turned = HeadOrder(self.interleaved_rope)
        stored = self.key_dim + self.rotary_dim
        plain = linear(query, ((self.num_heads, self.key_dim), inputs), (_HEADS, axes), False)
        yield from (replace(each, stored_head=stored) for each in plain)
        of_rotated = ((self.num_heads, self.rotary_dim), inputs), (_HEADS, axes), False
        rotated = linear(Part.QUERY_ROTATED, *of_rotated, order=turned, stored_as=query)
        yield from (replace(each, stored_head=stored, first_in_head=self.key_dim) for each in rotated)
        yield from linear(Part.LATENT, ((self.latent,), (hidden,)), (_LATENT, HIDDEN), self.bias)
        of_key = ((self.rotary_dim,), (hidden,)), ((Axis.HEAD_DIM,), HIDDEN), self.bias
        yield from linear(Part.KEY_ROTATED, *of_key, order=turned)
        yield Declared(Part.LATENT_NORM, Kind.WEIGHT, (_LATENT,), ((self.latent,),), self.norm.offset)
        stored = self.key_dim + self.value_dim
        keys = linear(Part.KEY_UP, ((self.num_heads, self.key_dim), (self.latent,)), (_HEADS, _LATENT), False)
        yield from (replace(each, stored_head=stored) for each in keys)
        of_values = ((self.num_heads, self.value_dim), (self.latent,)), (_HEADS, _LATENT), False
        values = linear(Part.VALUE_UP, *of_values, stored_as=Part.KEY_UP)
        yield from (replace(each, stored_head=stored, first_in_head=self.key_dim) for each in values)
        outputs = ((hidden,), (self.num_heads, self.value_dim)), (HIDDEN, _HEADS), self.out_bias
        yield from linear(Part.OUTPUT, *outputs)

    def optional(self) -> Iterator[Declared]:
        """See `AttentionConfig`: nothing, as there is no cache of 8 bits."""
        yield from ()

    def sharded(self, size: int) -> LatentAttentionConfig:
        """See `LayerPart`. Each device has the latent vector of every token."""
        if self.num_heads % size:
            raise ConfigError(
                f"{self.num_heads} heads cannot be spread over {size} devices: choose a tp_size that divides the heads"
            )
        return self
