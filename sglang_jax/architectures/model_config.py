"""The description of a model for both backends: its layers, and the parts before and after them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from sglang_jax.architectures.kinds.attention import AttentionConfig
from sglang_jax.architectures.kinds.experts import ExpertsConfig
from sglang_jax.architectures.kinds.feed_forward import FeedForwardConfig, UngatedConfig
from sglang_jax.architectures.kinds.latent_attention import LatentAttentionConfig
from sglang_jax.architectures.kinds.norm import NormConfig
from sglang_jax.architectures.kinds.part import CachedArray, LayerPart
from sglang_jax.architectures.kinds.recurrent import RecurrentConfig
from sglang_jax.architectures.kinds.rope import RopeKind
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.architectures.pooling import Pooler

AnyAttention = AttentionConfig | LatentAttentionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelMixer:
    """Attention and a recurrent layer with the same input; their outputs are added (Falcon-H1)."""

    attention: AnyAttention
    recurrent: RecurrentConfig

    def sharded(self, over: Parallelism) -> ParallelMixer:
        return ParallelMixer(attention=self.attention.sharded(over), recurrent=self.recurrent.sharded(over))


Mixer = AnyAttention | RecurrentConfig | ParallelMixer
"""The part of a layer that mixes tokens."""

FeedForward = FeedForwardConfig | UngatedConfig | ExpertsConfig
"""The part of a layer that transforms each token separately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SublayerNorms:
    """The norms of an attention or feed-forward block: of its input (`pre`), and of its output (`post`), before it is
    added to the residual stream."""

    pre: NormConfig | None = None
    post: NormConfig | None = None


class CacheKind(StrEnum):
    """What layers cache of a sequence: all its keys and values, those of its last tokens, or a recurrent state."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"

    @property
    def keeps_states(self) -> bool:
        """Whether pools have slots for states instead of pages."""
        return self is CacheKind.STATE


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """A decoder layer: a mixer (attention, a recurrent layer, or both) and a feed-forward part, each added to the
    residual stream.

    - `mixer`, `feed_forward`: one of them may be None.
    - `parallel`: both read the same normalised input (`mixer_norms.pre`), and their sum is added.
    - `residual_multiplier`: multiplies the added outputs.
    - `learnt_scale`: after the layer, the residual stream is multiplied by a number from the checkpoint.
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
        if isinstance(self.mixer, ParallelMixer):
            return self.mixer.attention
        return self.mixer if isinstance(self.mixer, AnyAttention) else None

    @property
    def kv_attention(self) -> AttentionConfig | None:
        """The attention part, if it caches keys and values of heads."""
        return self.attention if isinstance(self.attention, AttentionConfig) else None

    @property
    def recurrent(self) -> RecurrentConfig | None:
        """The recurrent part of the mixer, if any."""
        if isinstance(self.mixer, ParallelMixer):
            return self.mixer.recurrent
        return None if isinstance(self.mixer, AnyAttention) else self.mixer

    @property
    def num_experts(self) -> int:
        """Experts of the layer; 0 if its feed-forward part is dense."""
        return self.feed_forward.num_experts if isinstance(self.feed_forward, ExpertsConfig) else 0

    @property
    def parts(self) -> tuple[LayerPart, ...]:
        """Its attention, recurrent and feed-forward parts, without those that it lacks."""
        found: tuple[LayerPart | None, ...] = (self.attention, self.recurrent, self.feed_forward)
        return tuple(part for part in found if part is not None)

    @property
    def caches_heads(self) -> bool:
        """Whether it caches arrays of heads, which are sharded, and not latent vectors."""
        return self.attention is not None and all(array.heads is not None for array in self.attention.cached)

    def sharded(self, over: Parallelism) -> LayerConfig:
        """The layer as it is built for several devices. Raises `ConfigError` if they cannot share it."""
        mixer = None if self.mixer is None else self.mixer.sharded(over)
        feed_forward = None if self.feed_forward is None else self.feed_forward.sharded(over)
        return replace(self, mixer=mixer, feed_forward=feed_forward)


def _describe_parts(layer: LayerConfig) -> Iterator[str]:
    match layer.attention:
        case AttentionConfig(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, window=window):
            within = "" if window is None else f" in a window of {window}"
            yield f"with {heads} heads of {head_dim} ({kv_heads} of keys){within}"
        case LatentAttentionConfig(num_heads=heads, latent=latent):
            yield f"with {heads} heads and latents of {latent}"
    if layer.recurrent is not None:
        yield "recurrent"
    if isinstance(layer.feed_forward, ExpertsConfig):
        yield f"with {layer.feed_forward.chosen} of {layer.feed_forward.num_experts} experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearntPositions:
    """What is added to each token's embedding: the row of its position in a table, and row 0 of another table.

    - `rows`: of the table of positions. `first`: the row of position 0.
    - `token_types`: rows of the other table, which tells the texts of a pair apart; 0 without it.
    - `marks_pairs`: the texts of a pair have the rows 0 and 1 of the other table; otherwise, both have row 0.
    - `separator`: the token that ends a text, if prompts may be marked pairs: tokens after the first one have row 1.
    """

    rows: int
    first: int = 0
    token_types: int = 0
    marks_pairs: bool = False
    separator: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only model, or an encoder with the layers of one.

    - `architecture`: the name of its family (see `architectures.registry`), which defines the names of tensors.
    - `embedding_multiplier`: multiplies embeddings; it is rounded to their dtype. `logit_multiplier`: multiplies
      logits, before `logit_cap` makes them `logit_cap * tanh(logit / logit_cap)`.
    - `learnt_positions`: see there; None if embeddings do not depend on positions.
    - `eos_token_ids`: those of config.json and of generation_config.json.
    - `shortened`: why contexts are shorter than the checkpoint's; empty if they are not.
    - `mtp_layers`: multi-token-prediction layers after the last layer. A checkpoint may have their tensors, which are
      not used.
    - `pooler`: makes vectors or scores of texts, in place of the head; None for a model with a head.
    - `max_position`: the context length that the checkpoint declares, or to which it was tuned with YaRN.
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
    mtp_layers: int = 0
    shortened: str = ""
    pooler: Pooler | None = None
    learnt_positions: LearntPositions | None = None
    dtype: str = "bfloat16"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> tuple[AnyAttention, ...]:
        """The attention parts of all layers, in order."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def kv_attention(self) -> tuple[AttentionConfig, ...]:
        """The attention parts that cache keys and values of heads, in order."""
        return tuple(layer.kv_attention for layer in self.layers if layer.kv_attention is not None)

    @property
    def causal(self) -> bool:
        """Whether tokens see only earlier ones. Otherwise a text is computed in one step, and there is a pooler."""
        return all(attention.causal for attention in self.kv_attention)

    @property
    def feed_forward(self) -> tuple[FeedForward, ...]:
        """The feed-forward parts of all layers, in order."""
        return tuple(layer.feed_forward for layer in self.layers if layer.feed_forward is not None)

    def describe(self) -> str:
        """Returns its sizes in a line, with how many layers have each kind of part."""
        parts = Counter(part for layer in self.layers for part in _describe_parts(layer))
        kinds = ", ".join(f"{count} {part}" for part, count in parts.items())
        sizes = f"{self.num_layers} layers of {self.hidden_size}, vocabulary of {self.vocab_size}"
        return f"{self.architecture}: {sizes}; {kinds}"

    @property
    def longest_context(self) -> int:
        """Maximum tokens of a context: `max_position`, or more if rope scaling extends it."""
        ropes = [attention.rope for attention in self.attention if attention.rope is not None]
        return max((rope.longest_context(self.max_position) for rope in ropes), default=self.max_position)

    @property
    def default_context(self) -> int:
        """Tokens of a context if the user sets no length. `dynamic` scaling changes nothing below `max_position`, so
        its full range is the default; `linear` scaling may already be included in `max_position`."""
        ropes = {attention.rope.kind for attention in self.attention if attention.rope is not None}
        return self.longest_context if RopeKind.DYNAMIC in ropes else self.max_position

    @property
    def keeps_states(self) -> bool:
        """Whether any layer has a recurrent state."""
        return any(layer.recurrent is not None for layer in self.layers)

    @property
    def keeps_only_latents(self) -> bool:
        """Whether all layers have latent attention, and nothing else that caches."""
        return all(isinstance(layer.mixer, LatentAttentionConfig) for layer in self.layers)

    @property
    def keeps_latents(self) -> bool:
        """Whether any layer has latent attention."""
        return any(isinstance(attention, LatentAttentionConfig) for attention in self.attention)

    def pooled(self, pooler: Pooler) -> ModelConfig:
        """The same model with a pooler in place of its head."""
        return replace(self, pooler=pooler, tie_word_embeddings=False, logit_multiplier=1.0, logit_cap=None)

    def with_layers(self, change: Callable[[LayerConfig], LayerConfig]) -> ModelConfig:
        """The same model with `change` applied to every layer."""
        return replace(self, layers=tuple(change(layer) for layer in self.layers))


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Attention layers that share pages, because they need the same tokens of a sequence and cache the same arrays per
    token; or all layers with a recurrent state. `name`: see `group_names`. `window`: tokens that a query attends to,
    its own included; None for other kinds.

    `runner.sizing.GroupMemory` has the size of a group's pages, and `PoolSpec` their number in a runner."""

    name: str
    kind: CacheKind
    layers: tuple[int, ...]
    window: int | None = None


_NAMES = {CacheKind.FULL: "full", CacheKind.WINDOW: "swa", CacheKind.STATE: "mamba"}


def group_names(lifetimes: Sequence[tuple[CacheKind, int | None]]) -> tuple[str, ...]:
    """The name of each group of a model, by kind and window, for metrics, logs and errors: `full`, `swa` (with the
    window's size if there are several), or `mamba` for states. Groups of the same kind and window are numbered from
    2 on."""
    several = sum(window is not None for _, window in lifetimes) > 1
    names = [f"{_NAMES[kind]} {window}" if window and several else _NAMES[kind] for kind, window in lifetimes]
    numbers = [names[: place + 1].count(name) for place, name in enumerate(names)]
    return tuple(f"{name} {number}" if number > 1 else name for name, number in zip(names, numbers, strict=True))


def group_of_layers(config: ModelConfig) -> tuple[int | None, ...]:
    """For each layer, the index in `cache_groups` of the group with its pages; None for a layer without attention."""
    groups = enumerate(cache_groups(config))
    number_of = {layer: number for number, group in groups if not group.kind.keeps_states for layer in group.layers}
    return tuple(number_of.get(layer) for layer in range(config.num_layers))


def cache_groups(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The cache groups of a model: full attention first, then windows by size, then recurrent states. Layers that cache
    different arrays per token (e.g. other kv heads) are in separate groups, in the order of the layers."""
    members: dict[tuple[int | None, tuple[CachedArray, ...]], list[int]] = {}
    for number, layer in enumerate(config.layers):
        if (attention := layer.attention) is not None:
            members.setdefault((attention.window, attention.cached), []).append(number)
    found = [
        (CacheKind.FULL if window is None else CacheKind.WINDOW, tuple(layers), window)
        for (window, _), layers in sorted(members.items(), key=lambda group: group[0][0] or 0)
    ]
    if kept := tuple(number for number, layer in enumerate(config.layers) if layer.recurrent is not None):
        found.append((CacheKind.STATE, kept, None))
    names = group_names([(kind, window) for kind, _, window in found])
    return tuple(CacheGroup(name, *group) for name, group in zip(names, found, strict=True))


def num_paged_groups(config: ModelConfig) -> int:
    """The number of `cache_groups` with pages: all except the group for states."""
    return sum(not group.kind.keeps_states for group in cache_groups(config))


def num_slots(config: ModelConfig, counts: Sequence[int]) -> int:
    """The slots of the group for states, 0 without one. `counts`: pages or slots of each of `cache_groups`."""
    return sum(count for group, count in zip(cache_groups(config), counts, strict=True) if group.kind.keeps_states)
