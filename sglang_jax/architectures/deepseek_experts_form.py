"""Fields of DeepSeek's experts, which other families have too: chosen in groups, by balanced scores, next to shared
experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_jax.architectures.common_fields import CommonFields
from sglang_jax.architectures.experts_form import read_expert_sizes
from sglang_jax.architectures.json_fields import MAX_LAYERS, JsonFields
from sglang_jax.architectures.kinds.experts import ExpertsConfig, ExpertScores
from sglang_jax.architectures.tensor_names import EXPERTS_NAMES, Part, TensorName, TensorNames
from sglang_jax.errors import CheckpointError, quote

DEEPSEEK_EXPERTS_NAMES: TensorNames = {
    **EXPERTS_NAMES,
    Part.ROUTER_CORRECTION: TensorName("mlp.gate.e_score_correction_bias", bare=True),
    Part.SHARED_GATE: TensorName("mlp.shared_experts.gate_proj"),
    Part.SHARED_UP: TensorName("mlp.shared_experts.up_proj"),
    Part.SHARED_DOWN: TensorName("mlp.shared_experts.down_proj"),
}
"""Names of families with DeepSeek's experts and any attention."""

_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertDefaults:
    """transformers' defaults for experts. `chosen` 0: `num_experts_per_tok` is required."""

    num_experts: int
    chosen: int
    size: int
    shared: int
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1


def read_deepseek_experts(fields: JsonFields, num_layers: int, defaults: ExpertDefaults) -> ExpertsConfig:
    """Reads DeepSeek's experts: chosen in groups, with shared experts, which become one that is as large as all of
    them. Families add the activation and the scores, and call `check_groups`."""
    experts = read_expert_sizes(
        fields,
        num_layers,
        num_experts=defaults.num_experts,
        chosen=defaults.chosen or fields.required_integer("num_experts_per_tok"),
        size="moe_intermediate_size",
        default_size=defaults.size,
        counts=_COUNTS,
    )
    frequency = fields.integer("moe_layer_freq")
    if frequency not in (None, 1):
        raise CheckpointError(f"{fields.file}: moe_layer_freq is {quote(frequency)}; supported: 1")
    shared = fields.count_or("n_shared_experts", defaults.shared) or 0
    return replace(
        experts,
        scale=fields.positive("routed_scaling_factor", defaults.scale),
        groups=_groups(fields, "n_group", defaults.groups),
        chosen_groups=_groups(fields, "topk_group", defaults.chosen_groups),
        shared_size=shared * experts.size,
    )


def _groups(fields: JsonFields, name: str, default: int) -> int:
    """A field of at least 1; 1 for null, `default` if it is absent."""
    return fields.size(name, 1 if name in fields.values else default)


def read_balanced_experts(common: CommonFields, defaults: ExpertDefaults) -> ExpertsConfig:
    """Reads DeepSeek-V3's experts, with the common activation."""
    experts = read_balanced_sizes(common.fields, common.num_layers, defaults)
    return replace(experts, activation=common.activation())


def read_balanced_sizes(fields: JsonFields, num_layers: int, defaults: ExpertDefaults) -> ExpertsConfig:
    """Reads experts whose scores are sigmoids, to which a correction is added for the choice only. Families add the
    activation."""
    check_choice(fields, "scoring_func", "sigmoid")
    check_choice(fields, "topk_method", "noaux_tc")
    renormalised = fields.boolean("norm_topk_prob")
    experts = replace(
        read_deepseek_experts(fields, num_layers, defaults),
        scores=ExpertScores.SIGMOID,
        correction=True,
        renormalised=renormalised is not False,
    )
    check_groups(fields, experts)
    return experts


def check_groups(fields: JsonFields, experts: ExpertsConfig) -> None:
    """Raises `CheckpointError` unless the experts divide into groups of which enough are chosen."""
    groups, chosen_groups = experts.groups, experts.chosen_groups
    of_group, rest = divmod(experts.num_experts, groups)
    least = experts.best_of_group if groups > 1 else 1
    if rest or of_group < least or not chosen_groups <= groups or experts.chosen > chosen_groups * of_group:
        raise CheckpointError(
            f"{fields.file}: n_group {groups}, topk_group {chosen_groups} and num_experts_per_tok {experts.chosen} do "
            f"not fit {experts.num_experts} experts: groups must be of equal size, {least} experts or more, and those "
            "chosen must have enough of them"
        )


def check_choice(fields: JsonFields, name: str, *supported: str) -> str:
    """Reads a field that must be one of `supported`; the first of them if it is absent."""
    word = fields.string(name)
    if word is not None and word not in supported:
        raise CheckpointError(
            f"{fields.file}: {name} {quote(word)} is not supported; supported: {', '.join(supported)}"
        )
    return word or supported[0]


def layers_with_experts(common: CommonFields, default: int) -> list[bool]:
    """Whether each layer has experts: all except the first `first_k_dense_replace`."""
    dense = common.fields.count_or("first_k_dense_replace", default) or 0
    return [number >= dense for number in range(common.num_layers)]


def mtp_layers(fields: JsonFields, default: int) -> int:
    """Reads the number of multi-token-prediction layers after the last layer (see `ModelConfig.mtp_layers`)."""
    found = [fields.count(name, MAX_LAYERS) for name in ("num_nextn_predict_layers", "num_mtp_layers")]
    return next((count for count in found if count is not None), default)
