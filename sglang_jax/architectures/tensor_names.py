"""Names of tensors in checkpoints: the parts of models, and the families' names for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Part(StrEnum):
    """The role of a parameter in the model, independent of its name in a checkpoint."""

    EMBEDDING = "embedding"
    POSITION_EMBEDDING = "position_embedding"
    TYPE_EMBEDDING = "type_embedding"
    FINAL_NORM = "final_norm"
    HEAD = "head"
    POOLER = "pooler"
    LABELS = "labels"
    ATTENTION_NORM = "attention_norm"
    ATTENTION_POST_NORM = "attention_post_norm"
    FEED_FORWARD_NORM = "feed_forward_norm"
    FEED_FORWARD_POST_NORM = "feed_forward_post_norm"
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    OUTPUT = "output"
    QUERY_NORM = "query_norm"
    KEY_NORM = "key_norm"
    SINKS = "sinks"
    OUTPUT_GATE = "output_gate"
    QUERY_LATENT = "query_latent"
    QUERY_LATENT_NORM = "query_latent_norm"
    QUERY_UP = "query_up"
    QUERY_ROTATED = "query_rotated"
    LATENT = "latent"
    LATENT_NORM = "latent_norm"
    KEY_ROTATED = "key_rotated"
    KEY_UP = "key_up"
    VALUE_UP = "value_up"
    STATE_INPUT = "state_input"
    STATE_OUTPUT = "state_output"
    STATE_GATE = "state_gate"
    STATE_NORM = "state_norm"
    CONVOLUTION = "convolution"
    UPDATE_RATE = "update_rate"
    DECAY_INPUT = "decay_input"
    DECAY_BIAS = "decay_bias"
    DECAY_LOG = "decay_log"
    SKIP = "skip"
    GATE = "gate"
    UP = "up"
    DOWN = "down"
    ROUTER = "router"
    ROUTER_CORRECTION = "router_correction"
    EXPERTS_INPUT = "experts_input"
    EXPERTS_OUTPUT = "experts_output"
    EXPERT_GATE = "expert_gate"
    EXPERT_UP = "expert_up"
    EXPERT_DOWN = "expert_down"
    SHARED_GATE = "shared_gate"
    SHARED_UP = "shared_up"
    SHARED_DOWN = "shared_down"
    SHARED_ROUTER = "shared_router"
    LAYER_SCALE = "layer_scale"


class ParameterKind(StrEnum):
    """The kind of a part's parameter: the last word of its name."""

    WEIGHT = "weight"
    BIAS = "bias"
    SCALE = "scale"
    """Divides a kv head's keys or values when they are stored in an 8-bit cache."""
    MEAN = "mean"
    """Subtracted from a kv head's keys when they are stored in an int8 cache. No quantiser writes one yet."""


EXPERT = "{expert}"
"""Stands for the number of an expert in a tensor's name."""


@dataclass(frozen=True, slots=True)
class Stacked:
    """A tensor with a part of all experts of a layer, `[experts, rows, columns]`, or its biases, `[experts, rows]`.

    - `hf`: its name, without the layer; biases have the suffix `_bias`.
    - `transposed`: matrices are `[experts, columns, rows]`.
    - `alternating`: the rows of parts that share the tensor alternate; otherwise the parts follow each other.
    """

    hf: str
    transposed: bool = False
    alternating: bool = False


@dataclass(frozen=True, slots=True)
class TensorName:
    """A tensor's name, without layer and kind, in Hugging Face folders and in GGUF files (None if unknown).

    - `bare`: the Hugging Face name does not end with the kind.
    - `layers`: the prefix of the Hugging Face name before the number of the layer.
    - `stacked`: for a part of experts, tensors that may hold it instead of one tensor per expert. GGUF files always
      have one tensor for all experts, which is not shared, transposed or alternating.
    - `also`: another Hugging Face name that the tensor may have.
    - `as_row`: in Hugging Face folders, a vector of n numbers is `[1, n]`.
    - `after_first`: the tensor of layer n is under the number n - 1. That of the first layer has this Hugging Face
      name, without a layer.
    - `in_last_layer`: the tensor, of the whole model, is under the number of the last layer.
    """

    hf: str
    gguf: str | None = None
    bare: bool = False
    layers: str = "model.layers"
    stacked: tuple[Stacked, ...] = ()
    also: str | None = None
    as_row: bool = False
    after_first: str | None = None
    in_last_layer: bool = False


TensorNames = Mapping[Part, TensorName]
"""The names of a family. Parts with the same name share a tensor: they follow each other along its rows, in the order
in which the layer declares them."""

OF_EXPERTS = frozenset({Part.EXPERT_GATE, Part.EXPERT_UP, Part.EXPERT_DOWN})

TABLES = frozenset({Part.EMBEDDING, Part.POSITION_EMBEDDING, Part.TYPE_EMBEDDING})
"""Matrices of which rows are looked up."""

WHOLE_MODEL = TABLES | {Part.FINAL_NORM, Part.HEAD, Part.POOLER, Part.LABELS}

HEADS = frozenset({Part.HEAD, Part.POOLER, Part.LABELS})
"""Parts that follow the final norm."""

LABELS_NAME = TensorName("score", "cls.output")
"""The name of a classifier's matrix in all families of decoders."""

LLAMA_NAMES: TensorNames = {
    Part.EMBEDDING: TensorName("model.embed_tokens", "token_embd"),
    Part.FINAL_NORM: TensorName("model.norm", "output_norm"),
    Part.HEAD: TensorName("lm_head", "output"),
    Part.LABELS: LABELS_NAME,
    Part.ATTENTION_NORM: TensorName("input_layernorm", "attn_norm"),
    Part.FEED_FORWARD_NORM: TensorName("post_attention_layernorm", "ffn_norm"),
    Part.QUERY: TensorName("self_attn.q_proj", "attn_q"),
    Part.KEY: TensorName("self_attn.k_proj", "attn_k"),
    Part.VALUE: TensorName("self_attn.v_proj", "attn_v"),
    Part.OUTPUT: TensorName("self_attn.o_proj", "attn_output"),
    Part.QUERY_NORM: TensorName("self_attn.q_norm", "attn_q_norm"),
    Part.KEY_NORM: TensorName("self_attn.k_norm", "attn_k_norm"),
    Part.SINKS: TensorName("self_attn.sinks", "attn_sinks", bare=True),
    Part.GATE: TensorName("mlp.gate_proj", "ffn_gate"),
    Part.UP: TensorName("mlp.up_proj", "ffn_up"),
    Part.DOWN: TensorName("mlp.down_proj", "ffn_down"),
}
"""The names of Llama, which most families share or extend."""

OPTIONAL = {ParameterKind.SCALE: "scales of keys and values", ParameterKind.MEAN: "means of keys"}
"""Kinds that a checkpoint may lack. It has either all parameters of such a kind or none."""

_SCALES = (
    ("self_attn.k_scale", "self_attn.v_scale"),  # compressed-tensors
    ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),  # ModelOpt
    ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale"),
    ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),  # AutoFP8, Quark
    ("self_attn.kv_scale", "self_attn.kv_scale"),  # one scale for both: the first versions of AutoFP8
    ("self_attn.attn.kv_scale", "self_attn.attn.kv_scale"),
)

OPTIONAL_NAMES: Mapping[tuple[Part, ParameterKind], tuple[str, ...]] = {
    (Part.KEY, ParameterKind.SCALE): tuple(keys for keys, _ in _SCALES),
    (Part.VALUE, ParameterKind.SCALE): tuple(values for _, values in _SCALES),
    (Part.KEY, ParameterKind.MEAN): ("self_attn.k_mean",),
}
"""Quantisers' names for optional parameters, in all families: one of these, after `model.layers.N.`."""

STACKED_GATE_UP, STACKED_DOWN = Stacked("mlp.experts.gate_up_proj"), Stacked("mlp.experts.down_proj")
"""As in transformers 5 in memory, and in its folders if `save_original_format` is false."""

EXPERTS_NAMES: TensorNames = {
    **LLAMA_NAMES,
    Part.ROUTER: TensorName("mlp.gate", "ffn_gate_inp"),
    Part.EXPERT_GATE: TensorName(f"mlp.experts.{EXPERT}.gate_proj", "ffn_gate_exps", stacked=(STACKED_GATE_UP,)),
    Part.EXPERT_UP: TensorName(f"mlp.experts.{EXPERT}.up_proj", "ffn_up_exps", stacked=(STACKED_GATE_UP,)),
    Part.EXPERT_DOWN: TensorName(f"mlp.experts.{EXPERT}.down_proj", "ffn_down_exps", stacked=(STACKED_DOWN,)),
    Part.SHARED_GATE: TensorName("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    Part.SHARED_UP: TensorName("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    Part.SHARED_DOWN: TensorName("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    Part.SHARED_ROUTER: TensorName("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
}
"""Names of families with experts, after Qwen's. transformers 5 stacks experts, but usually saves a tensor for each."""

_OF_MIXTRAL = f"block_sparse_moe.experts.{EXPERT}"

MIXTRAL_NAMES: TensorNames = {
    **LLAMA_NAMES,
    Part.ROUTER: TensorName("block_sparse_moe.gate", "ffn_gate_inp", also="mlp.gate"),
    Part.EXPERT_GATE: TensorName(f"{_OF_MIXTRAL}.w1", "ffn_gate_exps", stacked=(STACKED_GATE_UP,)),
    Part.EXPERT_UP: TensorName(f"{_OF_MIXTRAL}.w3", "ffn_up_exps", stacked=(STACKED_GATE_UP,)),
    Part.EXPERT_DOWN: TensorName(f"{_OF_MIXTRAL}.w2", "ffn_down_exps", stacked=(STACKED_DOWN,)),
}
"""Names of families with experts, after Mixtral's."""

LATENT_NAMES: TensorNames = {
    Part.QUERY_LATENT: TensorName("self_attn.q_a_proj"),
    Part.QUERY_LATENT_NORM: TensorName("self_attn.q_a_layernorm"),
    Part.QUERY_UP: TensorName("self_attn.q_b_proj"),
    Part.LATENT: TensorName("self_attn.kv_a_proj_with_mqa"),
    Part.KEY_ROTATED: TensorName("self_attn.kv_a_proj_with_mqa"),
    Part.LATENT_NORM: TensorName("self_attn.kv_a_layernorm"),
    Part.KEY_UP: TensorName("self_attn.kv_b_proj"),
}
"""Names of latent attention. Rotated queries are in the tensor of the other queries, and values in that of keys."""

POST_NORM_NAMES: TensorNames = {
    **LLAMA_NAMES,
    Part.ATTENTION_POST_NORM: TensorName("post_attention_layernorm", "post_attention_norm"),
    Part.FEED_FORWARD_POST_NORM: TensorName("post_feedforward_layernorm", "post_ffw_norm"),
}
"""Names of families that normalise outputs of attention and feed-forward parts, not inputs."""


def with_model_prefix(names: Collection[str], prefix: str = "model.") -> dict[str, str]:
    """Tensors of a decoder without its head, whose names may lack the prefix: names in a checkpoint with a head → names
    in this one."""
    if any(name.startswith(prefix) for name in names):
        return {name: name for name in names}
    whole = (f"{LABELS_NAME.hf}.", "lm_head.")
    return {name if name.startswith(whole) else f"{prefix}{name}": name for name in names}


def hf_name(name: TensorName, kind: ParameterKind, layer: int | None) -> str:
    """The complete name in a Hugging Face folder. `layer`: None for a tensor of the whole model."""
    stem = name.hf if layer is None else f"{name.layers}.{layer}.{name.hf}"
    if name.after_first is not None and layer is not None:
        stem = f"{name.layers}.{layer - 1}.{name.hf}" if layer else name.after_first
    return stem if name.bare else f"{stem}.{kind}"


def gguf_name(name: TensorName, kind: ParameterKind, layer: int | None) -> str | None:
    """The complete name in a GGUF file; None if unknown."""
    if name.gguf is None:
        return None
    return f"{name.gguf}.{kind}" if layer is None else f"blk.{layer}.{name.gguf}.{kind}"
