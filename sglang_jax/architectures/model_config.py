"""One description of a model for both backends: a list of layers, and what stands around them."""

from __future__ import annotations

import math
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
    `turning` the share of the pairs that turn. `rotated`: the share of a head that rotates, its first numbers, as a
    head of that size would; the rest knows no positions.
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
    rotated: float = 1.0

    def rotated_numbers(self, head_dim: int) -> int:
        """How many numbers of a head rotate."""
        return int(head_dim * self.rotated)


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
    - `output_gate`: what each head gives is multiplied by the sigmoid of a projection of the input, whose rows a
      checkpoint keeps behind those of the head's query.
    - `input_multiplier`, `key_multiplier`, `output_multiplier`: of what attention takes, of keys, of what it gives.
    - `values_are_keys`: values have no separate projection, they are keys before norm and rotation.
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
    output_gate: bool = False
    bias: bool = False
    out_bias: bool = False
    input_multiplier: float = 1.0
    key_multiplier: float = 1.0
    output_multiplier: float = 1.0


class StateDtype(StrEnum):
    """What numbers an array of a state holds."""

    ACTIVATIONS = "activations"
    """Of the type of the model's activations."""
    RECURRENT = "recurrent"
    """float32, unless `mamba_ssm_dtype` says otherwise."""


LAST_INPUTS = "tail"
"""The array of a state that a convolution keeps, `[width - 1, channels]`."""


@dataclass(frozen=True, slots=True)
class StateArray:
    """One array of what a layer keeps of a sequence instead of keys: `shape` of one slot. `spread`: the axis of
    `shape` along which devices that share the layer have each a part."""

    name: str
    shape: tuple[int, ...]
    dtype: StateDtype
    spread: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig:
    """A gated short convolution (LFM2): `out(c * conv(b * x))`, where b, c and x are projections of the input and the
    convolution runs over the last `width` tokens of each channel by itself.

    - `bias`: of both projections and of the convolution.
    - `shards`: devices that share it (`recurrent_shards.spread`); channels of its parameters lie device by device.
    """

    channels: int
    width: int
    bias: bool = False
    shards: int = 1

    @property
    def state(self) -> tuple[StateArray, ...]:
        """The last inputs of the convolution."""
        return (_tail(self.width, self.channels),)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNetConfig:
    """A gated delta net (Yang et al. 2024): each head keeps a matrix `[key_dim, value_dim]`, which decays at each token
    and is then corrected towards the token's value at the token's key.

    Queries, keys and values pass a convolution over the last `width` tokens and a SiLU; each key head serves
    `num_value_heads / num_key_heads` neighbouring value heads. `norm` is over each head's output, which is then
    multiplied by the SiLU of a gate. `shards`: as in `ShortConvConfig`.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    width: int
    norm: NormConfig
    shards: int = 1

    @property
    def channels(self) -> int:
        """Of the convolution: all queries, all keys, all values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def state(self) -> tuple[StateArray, ...]:
        """The last inputs of the convolution, and each head's matrix."""
        matrix = (self.num_value_heads, self.key_dim, self.value_dim)
        return (_tail(self.width, self.channels), StateArray("matrix", matrix, StateDtype.RECURRENT, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """Mamba-2 (Dao and Gu 2024): each head keeps a matrix `[state_size, head_dim]`, which decays at each token, and to
    which the token's input is added along a direction of the state.

    One projection gives a gate, the input, the directions that are written and read, and each head's step size.
    Directions are those of a group of neighbouring heads. Inputs and directions pass a convolution over the last
    `width` tokens and a SiLU.

    - `norm`: over each of `norm_groups` parts of the output; None where there is none. `norm_before_gate`: the norm is
      taken before the output is multiplied by the SiLU of the gate.
    - `least_step`, `most_step`: bounds of step sizes.
    - `bias`: of the projection of the input; `out_bias`: of that of the output; `conv_bias`: of the convolution.
    - `input_multiplier`, `output_multiplier`: of what the layer takes and gives; `part_multipliers`: of the parts of
      the projection, which are gate, input, directions written and read, step sizes.
    - `shards`: as in `ShortConvConfig`.
    """

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    width: int
    norm: NormConfig | None
    norm_groups: int = 1
    norm_before_gate: bool = False
    least_step: float = 0.0
    most_step: float = math.inf
    bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True
    input_multiplier: float = 1.0
    part_multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    output_multiplier: float = 1.0
    shards: int = 1

    @property
    def inner(self) -> int:
        """Numbers of all heads."""
        return self.num_heads * self.head_dim

    @property
    def parts(self) -> tuple[int, int, int, int, int]:
        """Rows of the parts of the projection."""
        directions = self.num_groups * self.state_size
        return (self.inner, self.inner, directions, directions, self.num_heads)

    @property
    def channels(self) -> int:
        """Of the convolution: all inputs, all directions that are written, all that are read."""
        return self.inner + 2 * self.num_groups * self.state_size

    @property
    def state(self) -> tuple[StateArray, ...]:
        """The last inputs of the convolution, and each head's matrix."""
        matrix = (self.num_heads, self.state_size, self.head_dim)
        return (_tail(self.width, self.channels), StateArray("matrix", matrix, StateDtype.RECURRENT, 0))


RecurrentConfig = ShortConvConfig | GatedDeltaNetConfig | Mamba2Config
"""What mixes tokens by a state that it keeps of the sequence so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """Attention and a recurrent layer that read the same input, and whose outputs are added (Falcon-H1)."""

    attention: AttentionConfig
    recurrent: RecurrentConfig


Mixer = AttentionConfig | RecurrentConfig | SideBySide
"""What mixes tokens."""


def _tail(width: int, channels: int) -> StateArray:
    """The inputs of a convolution that the next token's output reads, oldest first."""
    return StateArray(LAST_INPUTS, (width - 1, channels), StateDtype.ACTIVATIONS, 1)


class Activation(StrEnum):
    """The nonlinearity of a gated feed-forward layer. Names are those of `hidden_act` in HF configs."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardConfig:
    """`down(activation(gate(x)) * up(x))` (Shazeer 2020). `gate_multiplier`: of `gate(x)`; `output_multiplier`: of the
    result."""

    size: int
    activation: Activation = Activation.SILU
    bias: bool = False
    gate_multiplier: float = 1.0
    output_multiplier: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SquaredReluConfig:
    """`down(relu(up(x)) ** 2)` (So et al. 2021, "Primer")."""

    size: int
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SublayerNorms:
    """The norms of an attention or feed-forward block: of its input (`pre`), and of its output before it is added to
    the residual stream (`post`)."""

    pre: NormConfig | None = None
    post: NormConfig | None = None


class CacheKind(StrEnum):
    """What layers need of a sequence: all of its keys and values, those of its last tokens, or a recurrent state."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """A decoder layer: what mixes tokens (attention, a recurrent layer, or both) and feed-forward, each added to the
    residual stream.

    - `mixer`, `feed_forward`: None for a layer without; it has one of them at least.

    - `parallel`: both read the same normalised input (`mixer_norms.pre`), and their sum is added.
    - `residual_multiplier`: of what is added.
    - `learnt_scale`: the checkpoint has a number by which the residual stream is multiplied after the layer.
    """

    mixer: Mixer | None
    feed_forward: FeedForwardConfig | SquaredReluConfig | None
    mixer_norms: SublayerNorms
    feed_forward_norms: SublayerNorms
    parallel: bool = False
    residual_multiplier: float = 1.0
    learnt_scale: bool = False

    @property
    def attention(self) -> AttentionConfig | None:
        """The mixer, or the part of it, that is attention."""
        if isinstance(self.mixer, SideBySide):
            return self.mixer.attention
        return self.mixer if isinstance(self.mixer, AttentionConfig) else None

    @property
    def recurrent(self) -> RecurrentConfig | None:
        """The mixer, or the part of it, that keeps a state."""
        if isinstance(self.mixer, SideBySide):
            return self.mixer.recurrent
        return None if isinstance(self.mixer, AttentionConfig) else self.mixer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only model.

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

    @property
    def attention(self) -> tuple[AttentionConfig, ...]:
        """Of the layers that have attention, in their order."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def feed_forward(self) -> tuple[FeedForwardConfig | SquaredReluConfig, ...]:
        """Of the layers that have a feed-forward part, in their order."""
        return tuple(layer.feed_forward for layer in self.layers if layer.feed_forward is not None)

    @property
    def keeps_states(self) -> bool:
        """Whether any layer keeps a recurrent state."""
        return any(layer.recurrent is not None for layer in self.layers)

    def with_layers(self, change: Callable[[LayerConfig], LayerConfig]) -> ModelConfig:
        """The same model with every layer changed."""
        return replace(self, layers=tuple(change(layer) for layer in self.layers))


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers of a model whose keys and values share pages, as they need the same tokens of a sequence and have pages of
    the same shape; or those that keep a recurrent state. `window`: tokens that a query sees, its own among them; None
    for the other kinds.

    What a page of a group takes is `runner.sizing.GroupMemory`, the pages that a runner has for it `PoolSpec`."""

    kind: CacheKind
    layers: tuple[int, ...]
    window: int | None = None


def group_of_layers(config: ModelConfig) -> tuple[int | None, ...]:
    """Of each layer, the number of the group in `cache_groups` that has pages for it; None without attention."""
    groups = enumerate(cache_groups(config))
    number_of = {
        layer: number for number, group in groups if group.kind is not CacheKind.STATE for layer in group.layers
    }
    return tuple(number_of.get(layer) for layer in range(config.num_layers))


def cache_groups(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The groups of a model's layers: full attention first, then windows by their size, then those that keep a state.
    Layers whose kv heads differ in number or size are in separate groups, in the order of the layers."""
    alike: dict[tuple[int | None, int, int], list[int]] = {}
    for number, layer in enumerate(config.layers):
        if (attention := layer.attention) is not None:
            alike.setdefault((attention.window, attention.num_kv_heads, attention.head_dim), []).append(number)
    paged = tuple(
        CacheGroup(CacheKind.FULL if window is None else CacheKind.WINDOW, tuple(layers), window)
        for (window, _, _), layers in sorted(alike.items(), key=lambda group: group[0][0] or 0)
    )
    kept = tuple(number for number, layer in enumerate(config.layers) if layer.recurrent is not None)
    return (*paged, CacheGroup(CacheKind.STATE, kept)) if kept else paged


def num_paged_groups(config: ModelConfig) -> int:
    """How many of `cache_groups` have pages: all but the one for states, which is the last."""
    return sum(group.kind is not CacheKind.STATE for group in cache_groups(config))
