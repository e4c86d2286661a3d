"""How checkpoints call the tensors of a model: the parts that a model has, and a family's names for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Part(StrEnum):
    """What a parameter is in the model, whatever a checkpoint calls it."""

    EMBEDDING = "embedding"
    FINAL_NORM = "final_norm"
    HEAD = "head"
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
    EXPERT_GATE = "expert_gate"
    EXPERT_UP = "expert_up"
    EXPERT_DOWN = "expert_down"
    SHARED_GATE = "shared_gate"
    SHARED_UP = "shared_up"
    SHARED_DOWN = "shared_down"
    SHARED_ROUTER = "shared_router"
    LAYER_SCALE = "layer_scale"


class Kind(StrEnum):
    """Of a part's parameters: the last word of their names."""

    WEIGHT = "weight"
    BIAS = "bias"
    SCALE = "scale"
    """What a kv head's keys or values are stored divided by, in a cache of 8 bits."""
    MEAN = "mean"
    """Of each kv head's keys: what a cache that keeps them in int8 subtracts. No quantiser writes one yet."""


EXPERT = "{expert}"
"""In a tensor's name, where the number of an expert stands."""


@dataclass(frozen=True, slots=True)
class Stacked:
    """One tensor with a part of all experts of a layer, `[experts, rows, columns]`, or their biases `[experts, rows]`.

    - `hf`: its name, without layer; biases have `_bias` behind it.
    - `transposed`: it is `[experts, columns, rows]`.
    - `alternating`: parts that share it do so row by row, and otherwise one follows the other.
    """

    hf: str
    transposed: bool = False
    alternating: bool = False


@dataclass(frozen=True, slots=True)
class TensorName:
    """A tensor's name without layer and kind, in Hugging Face folders and, where that is known, in GGUF files.

    - `bare`: its Hugging Face name does not end with the kind.
    - `layers`: what its Hugging Face name begins with, before the number of a layer.
    - `stacked`: of a part of experts, what may hold it in place of a tensor for each. GGUF files have one too, as plain
      as can be.
    - `also`: another Hugging Face name of the same tensor, which a folder may have instead.
    """

    hf: str
    gguf: str | None = None
    bare: bool = False
    layers: str = "model.layers"
    stacked: tuple[Stacked, ...] = ()
    also: str | None = None


TensorNames = Mapping[Part, TensorName]
"""Parts with the same name lie in one tensor, one after the other along its rows, in the order of `Part`."""

OF_EXPERTS = frozenset({Part.EXPERT_GATE, Part.EXPERT_UP, Part.EXPERT_DOWN})
"""Parts that every expert has."""

WHOLE_MODEL = frozenset({Part.EMBEDDING, Part.FINAL_NORM, Part.HEAD})

LLAMA_NAMES: TensorNames = {
    Part.EMBEDDING: TensorName("model.embed_tokens", "token_embd"),
    Part.FINAL_NORM: TensorName("model.norm", "output_norm"),
    Part.HEAD: TensorName("lm_head", "output"),
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
"""Most families' names; others change some of them."""

OPTIONAL = {Kind.SCALE: "scales of keys and values", Kind.MEAN: "means of keys"}
"""Kinds that a checkpoint may lack: it has all parameters of such a kind, or none."""

_SCALES = (
    ("self_attn.k_scale", "self_attn.v_scale"),  # compressed-tensors
    ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),  # ModelOpt
    ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale"),
    ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),  # AutoFP8, Quark
    ("self_attn.kv_scale", "self_attn.kv_scale"),  # one for both: the first versions of AutoFP8
    ("self_attn.attn.kv_scale", "self_attn.attn.kv_scale"),
)

OPTIONAL_NAMES: Mapping[tuple[Part, Kind], tuple[str, ...]] = {
    (Part.KEY, Kind.SCALE): tuple(keys for keys, _ in _SCALES),
    (Part.VALUE, Kind.SCALE): tuple(values for _, values in _SCALES),
    (Part.KEY, Kind.MEAN): ("self_attn.k_mean",),
}
"""What quantisers call optional parameters, whatever the family: one of these names, behind `model.layers.N.`."""

STACKED_GATE_UP, STACKED_DOWN = Stacked("mlp.experts.gate_up_proj"), Stacked("mlp.experts.down_proj")
"""As transformers 5 has them in memory, and saves them if `save_original_format` is false."""

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
"""Of families with experts that have Qwen's names. transformers 5 stacks experts; its folders have those of each as a
rule."""

LATENT_NAMES: TensorNames = {
    Part.QUERY_LATENT: TensorName("self_attn.q_a_proj"),
    Part.QUERY_LATENT_NORM: TensorName("self_attn.q_a_layernorm"),
    Part.QUERY_UP: TensorName("self_attn.q_b_proj"),
    Part.LATENT: TensorName("self_attn.kv_a_proj_with_mqa"),
    Part.KEY_ROTATED: TensorName("self_attn.kv_a_proj_with_mqa"),
    Part.LATENT_NORM: TensorName("self_attn.kv_a_layernorm"),
    Part.KEY_UP: TensorName("self_attn.kv_b_proj"),
}
"""Of latent attention. Queries that rotate, and values, lie in the tensors of other queries, and of keys."""

POST_NORM_NAMES: TensorNames = {
    **LLAMA_NAMES,
    Part.ATTENTION_POST_NORM: TensorName("post_attention_layernorm", "post_attention_norm"),
    Part.FEED_FORWARD_POST_NORM: TensorName("post_feedforward_layernorm", "post_ffw_norm"),
}
"""Of families that norm what attention and feed-forward give, and not what they take."""


def hf_name(name: TensorName, kind: Kind, layer: int | None) -> str:
    """The whole name in a Hugging Face folder; `layer` is None for a tensor of the whole model."""
    stem = name.hf if layer is None else f"{name.layers}.{layer}.{name.hf}"
    return stem if name.bare else f"{stem}.{kind}"


def gguf_name(name: TensorName, kind: Kind, layer: int | None) -> str | None:
    """The whole name in a GGUF file; None where it is not known."""
    if name.gguf is None:
        return None
    return f"{name.gguf}.{kind}" if layer is None else f"blk.{layer}.{name.gguf}.{kind}"
