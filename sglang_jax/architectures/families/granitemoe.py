"""Granite 3 with experts (2024): Granite's multipliers, and a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.granite_form import GRANITE_EXPERTS_NAMES, read_granite_experts
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family, GgufForm
from sglang_jax.architectures.tensor_names import LLAMA_NAMES

_NAME = "granitemoe"
_DEFAULTS = Defaults(max_position=2048, bos_token_id=1, eos_token_id=2)


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS)
    bias = fields.boolean("attention_bias") or False
    scale = fields.positive("attention_multiplier", 1.0)
    layer = replace(
        common.pre_norm_layer(
            replace(common.attention(), scale=scale, bias=bias, out_bias=bias), read_granite_experts(common)
        ),
        residual_multiplier=fields.positive("residual_multiplier", 1.0),
    )
    return replace(
        common.model(_NAME, [layer] * common.num_layers),
        embedding_multiplier=fields.positive("embedding_multiplier", 1.0),
        logit_multiplier=1 / fields.positive("logits_scaling", 1.0),
    )


_GGUF_FIELDS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}

FAMILY = Family(
    name=_NAME,
    class_name="GraniteMoeForCausalLM",
    configure=configure,
    names={**LLAMA_NAMES, **GRANITE_EXPERTS_NAMES},
    gguf=GgufForm(name="granitemoe", fields=_GGUF_FIELDS, interleaved=True, experts=True),
)
