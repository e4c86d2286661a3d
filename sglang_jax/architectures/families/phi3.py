"""Phi-3 (2024): Llama's layers; checkpoints store q, k and v in one tensor, and gate and up in another."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family, GgufForm
from sglang_jax.architectures.tensor_names import LLAMA_NAMES, Part, TensorName

_NAME = "phi3"
_DEFAULTS = Defaults(max_position=4096, eps=1e-5, bos_token_id=1, eos_token_id=32000)
_QKV, _GATE_UP = TensorName("self_attn.qkv_proj", "attn_qkv"), TensorName("mlp.gate_up_proj", "ffn_up")
_NAMES = {
    **LLAMA_NAMES,
    Part.QUERY: _QKV,
    Part.KEY: _QKV,
    Part.VALUE: _QKV,
    Part.GATE: _GATE_UP,
    Part.UP: _GATE_UP,
}


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS)
    window = common.effective_window(fields.count("sliding_window"))
    layer = common.pre_norm_layer(replace(common.attention(), window=window), common.feed_forward())
    return common.model(_NAME, [layer] * common.num_layers)


FAMILY = Family(
    name=_NAME,
    class_name="Phi3ForCausalLM",
    configure=configure,
    names=_NAMES,
    gguf=GgufForm(name="phi3", fields={"sliding_window": "attention.sliding_window"}),
)
