"""Shared by Granite's families with experts."""

from __future__ import annotations

from dataclasses import replace

from sglang_jax.architectures.common_fields import CommonFields
from sglang_jax.architectures.experts_form import read_experts
from sglang_jax.architectures.kinds.experts import ExpertsConfig, ExpertScores
from sglang_jax.architectures.tensor_names import Part, Stacked, TensorName, TensorNames

_MODULE = "block_sparse_moe"
_GATE_UP = Stacked(f"{_MODULE}.input_linear.weight"), Stacked(f"{_MODULE}.experts.gate_up_proj")
_DOWN = Stacked(f"{_MODULE}.output_linear.weight"), Stacked(f"{_MODULE}.experts.down_proj")

GRANITE_EXPERTS_NAMES: TensorNames = {
    Part.ROUTER: TensorName(f"{_MODULE}.router.layer", "ffn_gate_inp", also=f"{_MODULE}.router"),
    Part.EXPERT_GATE: TensorName(f"{_MODULE}.input_linear", "ffn_gate_exps", stacked=_GATE_UP),
    Part.EXPERT_UP: TensorName(f"{_MODULE}.input_linear", "ffn_up_exps", stacked=_GATE_UP),
    Part.EXPERT_DOWN: TensorName(f"{_MODULE}.output_linear", "ffn_down_exps", stacked=_DOWN),
}


def read_granite_experts(common: CommonFields) -> ExpertsConfig:
    """Reads the experts. Raises `CheckpointError` as `read_experts`."""
    return replace(read_experts(common, num_experts=8, chosen=2), scores=ExpertScores.CHOSEN_SOFTMAX)
