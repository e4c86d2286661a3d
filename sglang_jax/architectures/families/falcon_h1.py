"""Falcon-H1 (TII, 2025): attention and Mamba-2 in parallel in each layer, and multipliers for most matrices."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.feed_forward import FeedForwardConfig
from sglang_jax.architectures.kinds.recurrent import Mamba2Config
from sglang_jax.architectures.mamba_form import is_set, mamba_names, mamba_of_hybrid
from sglang_jax.architectures.model_config import LayerConfig, ModelConfig, ParallelMixer, SublayerNorms
from sglang_jax.architectures.registry import Family
from sglang_jax.architectures.tensor_names import LLAMA_NAMES, Part, TensorName
from sglang_jax.errors import CheckpointError, quote

_NAME = "falcon_h1"
_DEFAULTS = Defaults(max_position=8192, num_kv_heads=8, eps=1e-5, bos_token_id=1, eos_token_id=2)


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS)
    bias = fields.boolean("attention_bias") or False
    attention = replace(
        common.attention(),
        bias=bias,
        out_bias=bias,
        input_multiplier=_multiplier(fields, "attention_in_multiplier"),
        key_multiplier=_multiplier(fields, "key_multiplier"),
        output_multiplier=_multiplier(fields, "attention_out_multiplier"),
    )
    norms = SublayerNorms(pre=common.norm())
    layer = LayerConfig(
        mixer=ParallelMixer(attention=attention, recurrent=_mamba(common)),
        feed_forward=_feed_forward(common),
        mixer_norms=norms,
        feed_forward_norms=norms,
    )
    return replace(
        common.model(_NAME, [layer] * common.num_layers),
        embedding_multiplier=_multiplier(fields, "embedding_multiplier"),
        logit_multiplier=_multiplier(fields, "lm_head_multiplier"),
    )


def _mamba(common: CommonFields) -> Mamba2Config:
    fields = common.fields
    mamba = mamba_of_hybrid(fields, common.hidden_size, fields.count_or("mamba_d_ssm", 1024))
    gate, value, written, read, steps = _multipliers(fields, "ssm_multipliers", 5)
    return replace(
        mamba,
        norm=common.norm() if fields.boolean("mamba_rms_norm") else None,
        norm_groups=mamba.num_groups,
        norm_before_gate=is_set(fields, "mamba_norm_before_gate", default=True),
        out_bias=fields.boolean("projectors_bias") or False,
        input_multiplier=_multiplier(fields, "ssm_in_multiplier"),
        part_multipliers=(gate, value, written, read, steps),
        output_multiplier=_multiplier(fields, "ssm_out_multiplier"),
    )


def _feed_forward(common: CommonFields) -> FeedForwardConfig:
    gate, output = _multipliers(common.fields, "mlp_multipliers", 2)
    bias = common.fields.boolean("mlp_bias") or False
    return replace(common.feed_forward(bias=bias), gate_multiplier=gate, output_multiplier=output)


def _multiplier(fields: JsonFields, name: str) -> float:
    found = fields.number(name)
    return 1.0 if found is None else found


def _multipliers(fields: JsonFields, name: str, count: int) -> list[float]:
    """Reads `count` numbers, by default 1. Raises `CheckpointError` for anything else."""
    found = fields.value(name)
    if found is None:
        return [1.0] * count
    if not isinstance(found, list) or len(found) != count or not all(isinstance(x, (int, float)) for x in found):
        raise CheckpointError(f"{fields.file}: {name} is {quote(found)}, it must be {count} numbers")
    return [float(number) for number in found]


FAMILY = Family(
    name=_NAME,
    class_name="FalconH1ForCausalLM",
    configure=configure,
    names={
        **LLAMA_NAMES,
        **mamba_names("mamba"),
        Part.FINAL_NORM: TensorName("model.final_layernorm"),
        Part.FEED_FORWARD_NORM: TensorName("pre_ff_layernorm"),
        Part.GATE: TensorName("feed_forward.gate_proj"),
        Part.UP: TensorName("feed_forward.up_proj"),
        Part.DOWN: TensorName("feed_forward.down_proj"),
    },
)
