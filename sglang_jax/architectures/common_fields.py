"""Fields of config.json that most families share, with each family's defaults."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from sglang_jax.architectures.hf_rope import MAX_POSITIONS, rope_from_hf
from sglang_jax.architectures.json_fields import MAX_LAYERS, JsonFields
from sglang_jax.architectures.kinds.attention import AttentionConfig
from sglang_jax.architectures.kinds.feed_forward import Activation, FeedForwardConfig
from sglang_jax.architectures.kinds.norm import NormConfig
from sglang_jax.architectures.kinds.rope import RopeConfig, RopeKind
from sglang_jax.architectures.model_config import AnyAttention, FeedForward, LayerConfig, ModelConfig, SublayerNorms
from sglang_jax.errors import CheckpointError, quote

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """transformers' defaults for fields that config.json lacks. `num_kv_heads` 0: equal to `num_attention_heads`."""

    max_position: int
    num_kv_heads: int = 0
    head_dim: int | None = None
    eps: float = 1e-6
    theta: float = 10000.0
    activation: str = "silu"
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonFields:
    """The common fields of a config.json. `rope`: that of most layers; `declared`: `max_position_embeddings`."""

    fields: JsonFields
    defaults: Defaults
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    declared: int
    rope: RopeConfig
    max_position: int

    @classmethod
    def read(
        cls,
        fields: JsonFields,
        defaults: Defaults,
        *,
        rope: RopeConfig | None = None,
    ) -> CommonFields:
        """Reads and checks the fields. Raises `CheckpointError` for missing, mistyped or inconsistent ones. `rope`: of
        families that parse it themselves."""
        heads = fields.required_integer("num_attention_heads")
        hidden = fields.required_integer("hidden_size")
        declared = fields.size("max_position_embeddings", defaults.max_position)
        rope = rope or rope_from_hf(fields, declared, defaults.theta)
        common = cls(
            fields=fields,
            defaults=defaults,
            hidden_size=hidden,
            num_layers=fields.required_integer("num_hidden_layers", MAX_LAYERS),
            num_heads=heads,
            num_kv_heads=_kv_heads(fields, defaults, heads),
            head_dim=_head_dim(fields, defaults, hidden // heads),
            declared=declared,
            rope=rope,
            max_position=rope.longest_context(declared) if rope.kind is RopeKind.YARN else declared,
        )
        longest = rope.longest_context(declared)
        if longest > MAX_POSITIONS:
            raise CheckpointError(f"{fields.file}: a context of {quote(longest)} tokens; the limit is {MAX_POSITIONS}")
        common.check_heads(common.num_heads, common.num_kv_heads, common.head_dim)
        rotated = rope.rotated_numbers(common.head_dim)
        if rotated % 2 or not rotated:
            raise CheckpointError(
                f"{fields.file}: partial_rotary_factor {rope.partial_rotary_factor:g} rotates {rotated} of the "
                f"{common.head_dim} numbers of a head; it must be an even number, at least 2"
            )
        return common

    def check_heads(self, heads: int, kv_heads: int, head_dim: int) -> None:
        """Raises `CheckpointError` if `kv_heads` does not divide `heads`, or if `head_dim` is odd."""
        if heads % kv_heads:
            raise CheckpointError(
                f"{self.fields.file}: num_attention_heads ({heads}) must be a multiple of num_key_value_heads "
                f"({kv_heads})"
            )
        if head_dim % 2:
            raise CheckpointError(f"{self.fields.file}: head_dim ({head_dim}) must be even for rotary embedding")

    def norm(self, field: str = "rms_norm_eps") -> NormConfig:
        """An RMS norm with the file's epsilon."""
        return NormConfig(eps=self.fields.positive(field, self.defaults.eps))

    def attention(self) -> AttentionConfig:
        """Attention over all keys, with the common rope and without biases; families replace fields that differ."""
        return AttentionConfig(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            rope=self.rope,
        )

    def activation(self, field: str = "hidden_act") -> Activation:
        """Reads the activation. Raises `CheckpointError` for an unsupported one."""
        name = self.fields.string(field) or self.defaults.activation
        known = [activation.value for activation in Activation]
        if name not in known:
            raise CheckpointError(
                f"{self.fields.file}: {field} {name!r} is not supported; supported: {', '.join(known)}"
            )
        return Activation(name)

    def feed_forward(self, *, field: str = "hidden_act", bias: bool = False) -> FeedForwardConfig:
        """A gated feed-forward part. Raises `CheckpointError` for an unsupported activation."""
        activation = self.activation(field)
        return FeedForwardConfig(
            size=self.fields.required_integer("intermediate_size"), activation=activation, bias=bias
        )

    def pre_norm_layer(
        self, attention: AnyAttention, feed_forward: FeedForward, norm: NormConfig | None = None
    ) -> LayerConfig:
        """A layer with `norm`, by default `self.norm()`, before attention and before the feed-forward part."""
        norms = SublayerNorms(pre=norm or self.norm())
        return LayerConfig(mixer=attention, feed_forward=feed_forward, mixer_norms=norms, feed_forward_norms=norms)

    def effective_window(self, window: int | None) -> int | None:
        """`window`, or None if no sequence can be longer than it. Raises `CheckpointError` if it is 0."""
        if window == 0:
            raise CheckpointError(f"{self.fields.file}: the sliding window is 0 tokens, it must be at least 1")
        return None if window is None or window >= self.rope.longest_context(self.max_position) else window

    def sliding_layers(self, every: int | None) -> list[bool]:
        """Whether each layer has a window: by `layer_types`, or else all but every `every`-th (None: no layer)."""
        types = self.kinds_of_layers("sliding_attention", "full_attention")
        if types is None:
            return [every is not None and bool((number + 1) % every) for number in range(self.num_layers)]
        return [kind == "sliding_attention" for kind in types]

    def kinds_of_layers(self, *known: str) -> tuple[str, ...] | None:
        """`layer_types`, one of `known` per layer, or None. Raises `CheckpointError` for any other list."""
        types = self.fields.strings("layer_types")
        if types is None:
            return None
        unknown = sorted(set(types) - set(known))
        if unknown or len(types) != self.num_layers:
            seen = ", ".join(unknown) or f"{len(types)} entries for {self.num_layers} layers"
            raise CheckpointError(
                f"{self.fields.file}: layer_types has {seen}; supported: {' or '.join(known)} for each layer"
            )
        return types

    def model(
        self,
        family: str,
        layers: Iterable[LayerConfig],
        final_norm: NormConfig | None = None,
        *,
        tied: str = "tie_word_embeddings",
    ) -> ModelConfig:
        """A model of these layers, to which families add multipliers and caps. `tied`: the family's field that ties the
        head to the embeddings; `tie_word_embeddings` is read if it is absent."""
        fields, defaults = self.fields, self.defaults
        is_tied = fields.boolean(tied)
        if is_tied is None:
            is_tied = fields.boolean("tie_word_embeddings")
        ends = fields.integers("eos_token_id")
        if "eos_token_id" not in fields.values and defaults.eos_token_id is not None:
            ends = (defaults.eos_token_id,)
        begin = fields.integer("bos_token_id")
        return ModelConfig(
            architecture=family,
            vocab_size=fields.required_integer("vocab_size"),
            hidden_size=self.hidden_size,
            layers=tuple(layers),
            final_norm=final_norm or self.norm(),
            max_position=self.max_position,
            tie_word_embeddings=defaults.tie_word_embeddings if is_tied is None else is_tied,
            eos_token_ids=ends,
            bos_token_id=begin if "bos_token_id" in fields.values else defaults.bos_token_id,
            dtype=fields.string("dtype") or fields.string("torch_dtype") or "float32",
        )


def _kv_heads(fields: JsonFields, defaults: Defaults, heads: int) -> int:
    if "num_key_value_heads" not in fields.values:
        return defaults.num_kv_heads or heads
    return fields.size("num_key_value_heads", heads)


def _head_dim(fields: JsonFields, defaults: Defaults, derived: int) -> int:
    if "head_dim" not in fields.values:
        return defaults.head_dim or derived
    return fields.size("head_dim", derived)
