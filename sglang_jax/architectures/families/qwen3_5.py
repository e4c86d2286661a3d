"""Qwen3.5 and Qwen3.6, dense text models: gated delta nets, and gated attention in every fourth layer.

For text, positions are equal on all three axes of the multimodal rotation, so it is the plain one.
"""

from __future__ import annotations

from sglang_jax.architectures.common_fields import Defaults
from sglang_jax.architectures.delta_net_form import DELTA_NET_NAMES, SEPARATE_INPUT_NAMES, delta_net_model, read_common
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family, Multimodal
from sglang_jax.architectures.tensor_names import LLAMA_NAMES

_NAME = "qwen3_5_text"
_DEFAULTS = Defaults(max_position=32768, num_kv_heads=4, head_dim=256)


def configure(fields: JsonFields) -> ModelConfig:
    common = read_common(fields, _DEFAULTS)
    return delta_net_model(_NAME, common, [common.feed_forward()] * common.num_layers)


FAMILY = Family(
    name=_NAME,
    class_name="Qwen3_5ForCausalLM",
    configure=configure,
    names={
        **LLAMA_NAMES,
        **DELTA_NET_NAMES,
        **SEPARATE_INPUT_NAMES,
    },
    multimodal=Multimodal(class_name="Qwen3_5ForConditionalGeneration"),
)
