"""One description of a model for both backends: a list of layers, and what stands around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum


class RopeKind(StrEnum):
    """How rotary frequencies are scaled. Names are those of `rope_scaling.rope_type` in HF configs."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    PROPORTIONAL = "proportional"
    """The first pairs of a head turn as those of whole heads do, the others stand still (Gemma 4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and its long-context variants.

    Fields that a kind does not use keep their default. `original_max_position` is the context length before scaling;
    `turning` the share of the pairs that turn.
    """

    kind: RopeKind = RopeKind.DEFAULT
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    turning: float = 1.0


class NormKind(StrEnum):
    """What a norm divides by."""

    RMS = "rms"
    """The root of the mean square (Zhang and Sennrich 2019)."""
    LAYER = "layer"
    """The standard deviation, once the mean is subtracted (Ba et al. 2016); without a bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """A norm and its weight.

    - `wide`: the weight multiplies in float32, before the result is rounded to the type of activations. Otherwise the
      result is rounded first.
    - `offset`: added to the stored weight when it is loaded; 1 where a checkpoint stores w for a weight of 1 + w.
    """

    eps: float
    kind: NormKind = NormKind.RMS
    wide: bool = False
    offset: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QKNorm:
    """Norms of queries and keys before the rotation.

    - `whole`: over all heads together (OLMo-2); otherwise over each head (Qwen3), with one weight for all.
    """

    norm: NormConfig
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Grouped-query self-attention.

    - `head_dim` need not be the hidden size over the heads; all three numbers may differ from layer to layer.
    - `scale` multiplies scores; `soft_cap` makes them `soft_cap * tanh(score / soft_cap)`.
    - `rope`: None for a layer without positions.
    - `interleaved_rope`: the checkpoint's rotary pairs are neighbours; rows are put into halves when they are loaded.
    - `window`: keys that a query sees at most, itself included; None for all before it.
    - `sinks`: each head has a learnt score that joins the softmax's sum and has no value.
    - `value_norm`: each head's value is divided by its root mean square; the norm has no weight.
    - `values_are_keys`: values have no projection of their own, they are keys before norm and rotation.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig | None
    interleaved_rope: bool = False
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    qk_norm: QKNorm | None = None
    value_norm: NormConfig | None = None
    values_are_keys: bool = False
    bias: bool = False
    out_bias: bool = False


class Activation(StrEnum):
    """The nonlinearity of a gated feed-forward layer. Names are those of `hidden_act` in HF configs."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardConfig:
    """`down(activation(gate(x)) * up(x))` (Shazeer 2020)."""

    size: int
    activation: Activation = Activation.SILU
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SublayerNorms:
    """The norms of an attention or feed-forward block: of its input (`pre`), and of its output before it is added to
    the residual stream (`post`)."""

    pre: NormConfig | None = None
    post: NormConfig | None = None


class CacheKind(StrEnum):
    """What layers need of a sequence: all of its keys and values, those of its last tokens, or a recurrent state. No
    family has layers with a state yet."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """A decoder layer: what mixes tokens (attention) and feed-forward, each added to the residual stream.

    - `parallel`: both read the same normalised input (`mixer_norms.pre`), and their sum is added.
    - `residual_multiplier`: of what is added.
    - `learnt_scale`: the checkpoint has a number by which the residual stream is multiplied after the layer.
    """

    mixer: AttentionConfig
    feed_forward: FeedForwardConfig
    mixer_norms: SublayerNorms
    feed_forward_norms: SublayerNorms
    parallel: bool = False
    residual_multiplier: float = 1.0
    learnt_scale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer.

    - `architecture`: the name of its family (see `architectures.registry`), which knows how tensors are called.
    - `embedding_multiplier`: of embeddings, rounded to their type. `logit_multiplier`: of logits, before `logit_cap`
      makes them `logit_cap * tanh(logit / logit_cap)`.
    - `eos_token_ids` joins what config.json and generation_config.json say.
    - `max_position` is the longest context that the checkpoint declares.
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
    dtype: str = "bfloat16"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def with_layers(self, change: Callable[[LayerConfig], LayerConfig]) -> ModelConfig:
        """The same model with every layer changed."""
        return replace(self, layers=tuple(change(layer) for layer in self.layers))


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of a model whose keys and values share pages, as they need the same tokens of a sequence and have pages of
    the same shape. `window`: tokens that a query sees, its own among them; None for `CacheKind.FULL`.

    What a page of a group takes is `runner.sizing.GroupMemory`, the pages that a runner has for it `PoolSpec`."""

    kind: CacheKind
    layers: tuple[int, ...]
    window: int | None = None


def group_of_layers(config: ModelConfig) -> tuple[int, ...]:
    """Of each layer, the number of its group in `cache_groups`."""
    groups = enumerate(cache_groups(config))
    number_of = {layer: number for number, group in groups for layer in group.layers}
    return tuple(number_of[layer] for layer in range(config.num_layers))


def cache_groups(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The groups of a model's layers: full attention first, then windows by their size. Layers whose kv heads differ in
    number or size are in groups of their own, in the order of the layers."""
    alike: dict[tuple[int | None, int, int], list[int]] = {}
    for number, layer in enumerate(config.layers):
        mixer = layer.mixer
        alike.setdefault((mixer.window, mixer.num_kv_heads, mixer.head_dim), []).append(number)
    return tuple(
        CacheGroup(CacheKind.FULL if window is None else CacheKind.WINDOW, tuple(layers), window)
        for (window, _, _), layers in sorted(alike.items(), key=lambda group: group[0][0] or 0)
    )
