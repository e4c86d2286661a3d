"""The description of a model for both backends: a list of layers, and the parts before and after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from sglang_jax.architectures.kinds.attention import AttentionConfig
from sglang_jax.architectures.kinds.experts import ExpertsConfig
from sglang_jax.architectures.kinds.feed_forward import FeedForwardConfig, SquaredReluConfig
from sglang_jax.architectures.kinds.latent_attention import LatentAttentionConfig
from sglang_jax.architectures.kinds.norm import NormConfig
from sglang_jax.architectures.kinds.part import CachedArray, LayerPart
from sglang_jax.architectures.kinds.recurrent import RecurrentConfig
from sglang_jax.architectures.kinds.rope import RopeKind

AnyAttention = AttentionConfig | LatentAttentionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """Attention and a recurrent layer with the same input; their outputs are added (Falcon-H1)."""

    attention: AnyAttention
    recurrent: RecurrentConfig

    def sharded(self, size: int) -> SideBySide:
        """See `LayerPart`."""
        return SideBySide(attention=self.attention.sharded(size), recurrent=self.recurrent.sharded(size))


Mixer = AnyAttention | RecurrentConfig | SideBySide
"""The part of a layer that mixes tokens."""

FeedForward = FeedForwardConfig | SquaredReluConfig | ExpertsConfig
"""The part of a layer that sees each token by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SublayerNorms:
    """The norms of an attention or feed-forward block: of its input (`pre`), and of its output (`post`), before it is
    added to the residual stream."""

    pre: NormConfig | None = None
    post: NormConfig | None = None


class CacheKind(StrEnum):
    """What layers cache of a sequence: all keys and values, those of its last tokens, or a recurrent state."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"

    @property
    def keeps_states(self) -> bool:
        """Whether pools have slots for states, and no pages."""
        return self is CacheKind.STATE


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """A decoder layer: a mixer (attention, a recurrent layer, or both) and a feed-forward part, each added to the
    residual stream.

    - `mixer`, `feed_forward`: one of them may be None.

    - `parallel`: both read the same normalised input (`mixer_norms.pre`), and their sum is added.
    - `residual_multiplier`: of the added outputs.
    - `learnt_scale`: the residual stream is multiplied by a number from the checkpoint after the layer.
    """

    mixer: Mixer | None
    feed_forward: FeedForward | None
    mixer_norms: SublayerNorms
    feed_forward_norms: SublayerNorms
    parallel: bool = False
    residual_multiplier: float = 1.0
    learnt_scale: bool = False

    @property
    def attention(self) -> AnyAttention | None:
        """The attention part of the mixer, if any."""
        if isinstance(self.mixer, SideBySide):
            return self.mixer.attention
        return self.mixer if isinstance(self.mixer, AnyAttention) else None

    @property
    def kv_attention(self) -> AttentionConfig | None:
        """The attention part, if it keeps keys and values of heads."""
        return self.attention if isinstance(self.attention, AttentionConfig) else None

    @property
    def recurrent(self) -> RecurrentConfig | None:
        """The recurrent part of the mixer, if any."""
        if isinstance(self.mixer, SideBySide):
            return self.mixer.recurrent
        return None if isinstance(self.mixer, AnyAttention) else self.mixer

    @property
    def num_experts(self) -> int:
        """How many experts the layer has; 0 if its feed-forward part has none."""
        return self.feed_forward.num_experts if isinstance(self.feed_forward, ExpertsConfig) else 0

    @property
    def parts(self) -> tuple[LayerPart, ...]:
        """Its attention, recurrent and feed-forward part, of those that it has, in the order of the model."""
        found: tuple[LayerPart | None, ...] = (self.attention, self.recurrent, self.feed_forward)
        return tuple(part for part in found if part is not None)

    def sharded(self, size: int) -> LayerConfig:
        """The layer as it is built for `size` devices that share it. Raises `ConfigError` if it cannot be."""
        mixer = None if self.mixer is None else self.mixer.sharded(size)
        feed_forward = None if self.feed_forward is None else self.feed_forward.sharded(size)
        return replace(self, mixer=mixer, feed_forward=feed_forward)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only model.

    - `architecture`: the name of its family (see `architectures.registry`), which has the names of tensors.
    - `embedding_multiplier`: of embeddings, rounded to their dtype. `logit_multiplier`: of logits, before `logit_cap`
      makes them `logit_cap * tanh(logit / logit_cap)`.
    - `eos_token_ids`: those of config.json and of generation_config.json.
    - `guessing_layers`: layers behind the last that guess further tokens. A checkpoint may have their tensors; nothing
      uses them.
    - `max_position`: the context length that the checkpoint declares, or that it was tuned to by YaRN.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    final_norm: NormConfig
    max_position: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    embedding_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    logit_cap: float | None = None
    guessing_layers: int = 0
    dtype: str = "bfloat16"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> tuple[AnyAttention, ...]:
        """Attention of the layers that have it, in order."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def kv_attention(self) -> tuple[AttentionConfig, ...]:
        """Those of them that keep keys and values of heads."""
        return tuple(layer.kv_attention for layer in self.layers if layer.kv_attention is not None)

    @property
    def feed_forward(self) -> tuple[FeedForward, ...]:
        """Feed-forward parts of the layers that have one, in order."""
        return tuple(layer.feed_forward for layer in self.layers if layer.feed_forward is not None)

    @property
    def longest_context(self) -> int:
        """Tokens that a context may have at most, where rope scaling reaches beyond `max_position`."""
        ropes = [attention.rope for attention in self.attention if attention.rope is not None]
        return max((rope.longest_context(self.max_position) for rope in ropes), default=self.max_position)

    @property
    def default_context(self) -> int:
        """Tokens of a context unless the user asks for more or fewer. `dynamic` scaling changes nothing before
        `max_position`, so it comes without asking; `linear` may be declared in `max_position` already."""
        ropes = {attention.rope.kind for attention in self.attention if attention.rope is not None}
        return self.longest_context if RopeKind.DYNAMIC in ropes else self.max_position

    @property
    def keeps_states(self) -> bool:
        """Whether any layer has a recurrent state."""
        return any(layer.recurrent is not None for layer in self.layers)

    @property
    def keeps_latents(self) -> bool:
        """Whether any layer has latent attention."""
        return any(isinstance(attention, LatentAttentionConfig) for attention in self.attention)

    def with_layers(self, change: Callable[[LayerConfig], LayerConfig]) -> ModelConfig:
        """The same model with `change` applied to every layer."""
        return replace(self, layers=tuple(change(layer) for layer in self.layers))


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with attention that share pages, because they need the same tokens of a sequence and keep the same arrays
    of each; or the layers with a recurrent state. `name`: see `group_names`. `window`: tokens that a query attends to,
    its own included; None for the other kinds.

    `runner.sizing.GroupMemory` has the size of a group's pages, `PoolSpec` the pages that a runner has for it."""

    name: str
    kind: CacheKind
    layers: tuple[int, ...]
    window: int | None = None


_NAMES = {CacheKind.FULL: "full", CacheKind.WINDOW: "swa", CacheKind.STATE: "mamba"}


def group_names(lifetimes: Sequence[tuple[CacheKind, int | None]]) -> tuple[str, ...]:
    """A name for each group of a model, by kind and window, for metrics, logs and errors: `full`, `swa` (with the
    window's size if there are several), `mamba` for states. Groups that differ only in the arrays of a token have a
    number from 2 on."""
    several = sum(window is not None for _, window in lifetimes) > 1
    names = [f"{_NAMES[kind]} {window}" if window and several else _NAMES[kind] for kind, window in lifetimes]
    numbers = [names[: place + 1].count(name) for place, name in enumerate(names)]
    return tuple(f"{name} {number}" if number > 1 else name for name, number in zip(names, numbers, strict=True))


def group_of_layers(config: ModelConfig) -> tuple[int | None, ...]:
    """For each layer, the index in `cache_groups` of the group with its pages; None without attention."""
    groups = enumerate(cache_groups(config))
    number_of = {layer: number for number, group in groups if not group.kind.keeps_states for layer in group.layers}
    return tuple(number_of.get(layer) for layer in range(config.num_layers))


def cache_groups(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The groups of a model's layers: full attention first, then windows by their size, then recurrent states.
    Layers that keep other arrays of a token, as of other kv heads, are in separate groups, in the order of the
    layers."""
    alike: dict[tuple[int | None, tuple[CachedArray, ...]], list[int]] = {}
    for number, layer in enumerate(config.layers):
        if (attention := layer.attention) is not None:
            alike.setdefault((attention.window, attention.cached), []).append(number)
    found = [
        (CacheKind.FULL if window is None else CacheKind.WINDOW, tuple(layers), window)
        for (window, _), layers in sorted(alike.items(), key=lambda group: group[0][0] or 0)
    ]
    if kept := tuple(number for number, layer in enumerate(config.layers) if layer.recurrent is not None):
        found.append((CacheKind.STATE, kept, None))
    names = group_names([(kind, window) for kind, _, window in found])
    return tuple(CacheGroup(name, *group) for name, group in zip(names, found, strict=True))


def num_paged_groups(config: ModelConfig) -> int:
    """The number of `cache_groups` with pages: all except the one for states."""
    return sum(not group.kind.keeps_states for group in cache_groups(config))


def num_slots(config: ModelConfig, counts: Sequence[int]) -> int:
    """Of `counts` of pages, or slots, of each of `cache_groups`, that of the group for states; 0 if there is none."""
    return sum(count for group, count in zip(cache_groups(config), counts, strict=True) if group.kind.keeps_states)
