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
    LAYER_SCALE = "layer_scale"


class Kind(StrEnum):
    """Of a part's parameters: the last word of their names."""

    WEIGHT = "weight"
    BIAS = "bias"


@dataclass(frozen=True, slots=True)
class TensorName:
    """A tensor's name without layer and kind, in Hugging Face folders and, where that is known, in GGUF files.

    - `bare`: its Hugging Face name does not end with the kind.
    - `layers`: what its Hugging Face name begins with, before the number of a layer.
    """

    hf: str
    gguf: str | None = None
    bare: bool = False
    layers: str = "model.layers"


TensorNames = Mapping[Part, TensorName]
"""Parts with the same name lie in one tensor, one after the other along its rows, in the order of `Part`."""

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
