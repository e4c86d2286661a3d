"""Llama 4 (2025), text: attention without positions in every fourth layer, and experts in all or some layers, of which
each token chooses one.

The other layers attend within chunks of `attention_chunk_size` tokens, and layers without positions scale queries from
`floor_scale` tokens on. Neither is supported, so the context is limited to tokens for which neither has an effect.
"""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields, Defaults
from sglang_jax.architectures.experts_form import read_experts
from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.kinds.attention import QKNorm
from sglang_jax.architectures.kinds.experts import ExpertsConfig, ExpertScores
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import Family, Multimodal
from sglang_jax.architectures.rotated_layers import rotated_layers
from sglang_jax.architectures.tensor_names import EXPERT, LLAMA_NAMES, Part, Stacked, TensorName
from sglang_jax.errors import CheckpointError, quote

_NAME = "llama4_text"
_DEFAULTS = Defaults(
    num_kv_heads=8, head_dim=128, max_position=4096 * 32, eps=1e-5, theta=5e5, bos_token_id=1, eos_token_id=2
)
_CHUNKED, _WHOLE = "chunked_attention", "full_attention"


def configure(fields: JsonFields) -> ModelConfig:
    common = CommonFields.read(fields, _DEFAULTS)
    bias = fields.boolean("attention_bias") or False
    plain = replace(common.attention(), interleaved_rope=True, bias=bias, out_bias=bias)
    norms = fields.boolean("use_qk_norm") is not False
    rotating = replace(plain, qk_norm=QKNorm(norm=common.norm(), weight=False) if norms else None)
    without = replace(plain, rope=None)
    experts = _experts(common)
    dense = replace(common.feed_forward(), size=fields.size("intermediate_size_mlp", 16384))
    sparse = _sparse_layers(common)
    rotates = rotated_layers(common)
    layers = [
        common.pre_norm_layer(rotating if rotates[number] else without, experts if number in sparse else dense)
        for number in range(common.num_layers)
    ]
    context, why = _context(common, rotates)
    return replace(common.model(_NAME, layers), max_position=context, shortened=why)


def _experts(common: CommonFields) -> ExpertsConfig:
    fields = common.fields
    experts = read_experts(common, num_experts=16, chosen=1)
    if experts.chosen > 1:
        raise CheckpointError(f"{fields.file}: num_experts_per_tok is {experts.chosen}; only 1 is supported")
    return replace(experts, scores=ExpertScores.SIGMOID, scores_of_inputs=True, shared_size=experts.size)


def _sparse_layers(common: CommonFields) -> frozenset[int]:
    """The layers with experts: `moe_layers`, or else every `interleave_moe_layer_step`-th."""
    fields = common.fields
    every = fields.size("interleave_moe_layer_step", 1)
    if fields.value("moe_layers") is not None:
        given = frozenset(fields.integers("moe_layers"))
        if unknown := sorted(given - set(range(common.num_layers))):
            raise CheckpointError(
                f"{fields.file}: moe_layers has {', '.join(map(quote, unknown))}; there are {common.num_layers} "
                "layers, numbered from 0"
            )
        return given
    return frozenset(range(every - 1, common.num_layers, every))


def _context(common: CommonFields, rotates: list[bool]) -> tuple[int, str]:
    """The longest supported context, and why it is shorter than the model's; empty if it is not."""
    fields, declared = common.fields, common.max_position
    found = [(declared, "")]
    chunk = fields.count_or("attention_chunk_size", 8192)
    kinds = common.kinds_of_layers(_CHUNKED, _WHOLE) or tuple(_CHUNKED if each else _WHOLE for each in rotates)
    if chunk and _CHUNKED in kinds:
        found.append((chunk, f"attention in chunks of {chunk} tokens (attention_chunk_size) is not supported"))
    floor = fields.size("floor_scale", 8192)
    if _scales_queries(fields) and not all(rotates):
        found.append((floor - 1, f"queries that are scaled from token {floor} on (floor_scale) are not supported"))
    context, why = min(found, key=lambda limit: limit[0])
    if context < 1:
        raise CheckpointError(f"{fields.file}: {fields.within}floor_scale is {floor}; it must be at least 2")
    return context, why and f"the context is {context} tokens, not {declared}: {why}"


def _scales_queries(fields: JsonFields) -> bool:
    """Whether layers without positions scale queries. The first files have 4 for true."""
    tuning = fields.value("attn_temperature_tuning")
    return (tuning is None or bool(tuning)) and fields.number_or("attn_scale", 0.1) != 0


_EXPERTS = "feed_forward.experts"
_EACH = f"{_EXPERTS}.{EXPERT}"
"""Of quantised folders; others have one tensor for all experts."""

_GATE_UP = (Stacked(f"{_EXPERTS}.gate_up_proj", transposed=True),)
_DOWN = (Stacked(f"{_EXPERTS}.down_proj", transposed=True),)

FAMILY = Family(
    name=_NAME,
    class_name="Llama4ForCausalLM",
    configure=configure,
    names={
        **LLAMA_NAMES,
        Part.GATE: TensorName("feed_forward.gate_proj"),
        Part.UP: TensorName("feed_forward.up_proj"),
        Part.DOWN: TensorName("feed_forward.down_proj"),
        Part.ROUTER: TensorName("feed_forward.router"),
        Part.EXPERT_GATE: TensorName(f"{_EACH}.gate_proj", stacked=_GATE_UP),
        Part.EXPERT_UP: TensorName(f"{_EACH}.up_proj", stacked=_GATE_UP),
        Part.EXPERT_DOWN: TensorName(f"{_EACH}.down_proj", stacked=_DOWN),
        Part.SHARED_GATE: TensorName("feed_forward.shared_expert.gate_proj"),
        Part.SHARED_UP: TensorName("feed_forward.shared_expert.up_proj"),
        Part.SHARED_DOWN: TensorName("feed_forward.shared_expert.down_proj"),
    },
    multimodal=Multimodal(class_name="Llama4ForConditionalGeneration"),
)
