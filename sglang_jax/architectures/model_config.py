"""The description of a model for both backends: a list of layers, and the parts before and after them."""

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
    """Only the first pairs of a head rotate, with the frequencies of a whole head (Gemma 4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021) and its long-context variants.

    Fields that a kind does not use keep their default. `original_max_position` is the context length before scaling;
    `turning`: fraction of the pairs that rotate (`PROPORTIONAL`). `rotated`: fraction of a head, from its start, that
    rotates like a head of that size; the rest has no positions.
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

    def longest_context(self, max_position: int) -> int:
        """Tokens that the scaling reaches, for a model that declares `max_position`. Of YaRN it is what the model was
        tuned to; `dynamic` and `linear` scaling stretch the context by their factor."""
        if self.kind not in (RopeKind.YARN, RopeKind.DYNAMIC, RopeKind.LINEAR):
            return max_position
        return max(max_position, int((self.original_max_position or max_position) * self.factor))

    def rotated_numbers(self, head_dim: int) -> int:
        """Numbers of a head that rotate."""
        return int(head_dim * self.rotated)


class NormKind(StrEnum):
    """The divisor of a norm."""

    RMS = "rms"
    """The root of the mean square (Zhang and Sennrich 2019)."""
    LAYER = "layer"
    """The standard deviation, after subtracting the mean (Ba et al. 2016); without a bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """A norm and its weight.

    - `wide`: multiply by the weight in float32, before rounding to the dtype of activations. Otherwise the
      result is rounded first.
    - `offset`: added to the stored weight when it is loaded; 1 if a checkpoint stores w for a weight of 1 + w.
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

    - `head_dim` may differ from hidden size / heads; all three numbers may differ between layers.
    - `scale` multiplies scores; `soft_cap` makes them `soft_cap * tanh(score / soft_cap)`.
    - `rope`: None for a layer without positions.
    - `interleaved_rope`: the checkpoint's rotary pairs are adjacent; rows are rearranged into halves when loaded.
    - `window`: maximum keys that a query attends to, its own included; None for all.
    - `sinks`: each head has a learnt score that is added to the softmax's denominator, without a value.
    - `value_norm`: each head's value is divided by its root mean square; the norm has no weight.
    - `output_gate`: each head's output is multiplied by the sigmoid of a projection of the input; in a checkpoint,
      its rows follow those of the head's query.
    - `input_multiplier`, `key_multiplier`, `output_multiplier`: multipliers of the input, of keys, and of the output.
    - `values_are_keys`: values have no separate projection; they are the keys before norm and rotation.
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
    """The dtype of a state array."""

    ACTIVATIONS = "activations"
    """The dtype of the model's activations."""
    RECURRENT = "recurrent"
    """`mamba_ssm_dtype`, by default float32."""


LAST_INPUTS = "tail"
"""Name of a convolution's state array, `[width - 1, channels]`."""


@dataclass(frozen=True, slots=True)
class StateArray:
    """One array of a layer's recurrent state: `shape` of one slot. `spread`: the axis of
    `shape` that is divided among devices that share the layer."""

    name: str
    shape: tuple[int, ...]
    dtype: StateDtype
    spread: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig:
    """A gated short convolution (LFM2): `out(c * conv(b * x))`. b, c and x are projections of the input; the
    convolution runs over the last `width` tokens of each channel separately.

    - `bias`: of both projections and of the convolution.
    - `shards`: devices that share it (`recurrent_shards.spread`); channels of its parameters are ordered by device.
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
    """A gated delta net (Yang et al. 2024): each head has a matrix `[key_dim, value_dim]`, which decays at each token
    and is then corrected towards the token's value at the token's key.

    Queries, keys and values pass through a convolution over the last `width` tokens and a SiLU; each key head serves
    `num_value_heads / num_key_heads` neighbouring value heads. `norm` applies to each head's output, which is then
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
    """Mamba-2 (Dao and Gu 2024): each head has a matrix `[state_size, head_dim]`, which decays at each token, and to
    which the token's input is added along a direction of the state.

    One projection computes a gate, the input, the directions that are written and read, and each head's step size.
    A group of adjacent heads shares directions. Inputs and directions pass through a convolution over the last
    `width` tokens and a SiLU.

    - `norm`: over each of `norm_groups` parts of the output; None without a norm. `norm_before_gate`: the norm is
      applied before the output is multiplied by the SiLU of the gate.
    - `least_step`, `most_step`: bounds of step sizes.
    - `bias`: of the input projection; `out_bias`: of the output projection; `conv_bias`: of the convolution.
    - `input_multiplier`, `output_multiplier`: of the layer's input and output; `part_multipliers`: of the parts of
      the projection: gate, input, directions written, directions read, step sizes.
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
"""Layers that mix tokens through a recurrent state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """Attention and a recurrent layer with the same input; their outputs are added (Falcon-H1)."""

    attention: AttentionConfig
    recurrent: RecurrentConfig


Mixer = AttentionConfig | RecurrentConfig | SideBySide
"""The part of a layer that mixes tokens."""


def _tail(width: int, channels: int) -> StateArray:
    """The previous inputs that a convolution needs for the next token, oldest first."""
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
    """The norms of an attention or feed-forward block: of its input (`pre`), and of its output (`post`), before it is
    added to the residual stream."""

    pre: NormConfig | None = None
    post: NormConfig | None = None


class CacheKind(StrEnum):
    """What layers cache of a sequence: all keys and values, those of its last tokens, or a recurrent state."""

    FULL = "full"
    WINDOW = "window"
    STATE = "state"


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
    feed_forward: FeedForwardConfig | SquaredReluConfig | None
    mixer_norms: SublayerNorms
    feed_forward_norms: SublayerNorms
    parallel: bool = False
    residual_multiplier: float = 1.0
    learnt_scale: bool = False

    @property
    def attention(self) -> AttentionConfig | None:
        """The attention part of the mixer, if any."""
        if isinstance(self.mixer, SideBySide):
            return self.mixer.attention
        return self.mixer if isinstance(self.mixer, AttentionConfig) else None

    @property
    def recurrent(self) -> RecurrentConfig | None:
        """The recurrent part of the mixer, if any."""
        if isinstance(self.mixer, SideBySide):
            return self.mixer.recurrent
        return None if isinstance(self.mixer, AttentionConfig) else self.mixer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only model.

    - `architecture`: the name of its family (see `architectures.registry`), which has the names of tensors.
    - `embedding_multiplier`: of embeddings, rounded to their dtype. `logit_multiplier`: of logits, before `logit_cap`
      makes them `logit_cap * tanh(logit / logit_cap)`.
    - `eos_token_ids`: those of config.json and of generation_config.json.
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
    dtype: str = "bfloat16"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> tuple[AttentionConfig, ...]:
        """Attention of the layers that have it, in order."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def feed_forward(self) -> tuple[FeedForwardConfig | SquaredReluConfig, ...]:
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

    def with_layers(self, change: Callable[[LayerConfig], LayerConfig]) -> ModelConfig:
        """The same model with `change` applied to every layer."""
        return replace(self, layers=tuple(change(layer) for layer in self.layers))


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose keys and values share pages, because they need the same tokens of a sequence and have pages of the
    same shape; or the layers with a recurrent state. `window`: tokens that a query attends to, its own included; None
    for the other kinds.

    `runner.sizing.GroupMemory` has the size of a group's pages, `PoolSpec` the pages that a runner has for it."""

    kind: CacheKind
    layers: tuple[int, ...]
    window: int | None = None


def group_of_layers(config: ModelConfig) -> tuple[int | None, ...]:
    """For each layer, the index in `cache_groups` of the group with its pages; None without attention."""
    groups = enumerate(cache_groups(config))
    number_of = {
        layer: number for number, group in groups if group.kind is not CacheKind.STATE for layer in group.layers
    }
    return tuple(number_of.get(layer) for layer in range(config.num_layers))


def cache_groups(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The groups of a model's layers: full attention first, then windows by their size, then recurrent states.
    Layers with kv heads of different number or size are in separate groups, in the order of the layers."""
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
    """The number of `cache_groups` with pages: all except the one for states, which is last."""
    return sum(group.kind is not CacheKind.STATE for group in cache_groups(config))
