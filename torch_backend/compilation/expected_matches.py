"""The minimum number of places that each pass must find in a model. It follows from modules and their names, and from
which nodes of the graph depend on positions, but not from patterns. So a pass whose pattern no longer fits
transformers' code is an error, instead of silently slower."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from transformers import PreTrainedModel

from sglang_jax.config import CompilePass
from torch_backend.compilation.graph import Program, args, is_call
from torch_backend.compilation.markers import ATTENTION

_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")
_GATED = ("silu", "gelu_pytorch_tanh")


@dataclass(frozen=True, slots=True)
class ExpectedMatches:
    """The minimum number of places of each pass."""

    minimum: dict[CompilePass, int]

    @classmethod
    def of_model(cls, model: PreTrainedModel, program: Program, layers: int, marks: int = 0) -> ExpectedMatches:
        """For a model with `layers` layers of attention and its trace before any pass; `marks`: modules with partial
        results."""
        positional = _layers_with_positions(program)
        attentions = list(_attentions(model))
        inner = [_children(module) for module in model.modules()]
        gated = [each for each in inner if _has_linears(each, _GATE_UP) or "gate_up_proj" in each]
        plain = [each for each in model.modules() if _adds_block_outputs_directly(each)]
        rotated = [each for each in attentions if _layer(each) in positional and _rotates_whole_heads(each)]
        # Projections are directly followed by pages once writing pages includes the rotation.
        direct = rotated + [each for each in attentions if _layer(each) not in positional]
        merged = [each for each in direct if _has_linears(_children(each), _QKV) and not _normed_whole(each)]
        return cls(
            {
                CompilePass.NO_OPS: 0,
                CompilePass.PAGED_ATTENTION: layers,
                CompilePass.COLLECTIVES: marks,
                CompilePass.NORM: sum(_is_rms_norm(module) for module in model.modules()),
                CompilePass.ADD_NORM: sum(2 for each in inner if _is_pre_norm_layer(each)),
                CompilePass.ALL_REDUCE_ADD_NORM: 2 * len(plain) if marks else 0,
                CompilePass.ROPE: len(rotated),
                CompilePass.HEAD_NORM: sum(_normed_by_head(each) for each in direct),
                CompilePass.GATED_ACTIVATION: len(gated) if _activation(model) in _GATED else 0,
                CompilePass.MERGE_LINEARS: len(merged)
                + (sum(_has_linears(each, _GATE_UP) for each in gated) if _activation(model) in _GATED else 0),
            }
        )


def _children(module: nn.Module) -> dict[str, nn.Module]:
    return dict(module.named_children())


def _has_linears(children: dict[str, nn.Module], names: tuple[str, ...]) -> bool:
    """Whether all of them exist, and either all have a bias or none."""
    found = [children[name] for name in names if name in children]
    linears = [each for each in found if isinstance(each, nn.Linear)]
    return len(linears) == len(names) and len({each.bias is None for each in linears}) == 1


def _attentions(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Modules that compute attention: they have the index of their layer and a scale of scores."""
    for module in model.modules():
        if {"layer_idx", "scaling"} <= vars(module).keys():
            yield module


def _layer(attention: nn.Module) -> Any:
    return vars(attention)["layer_idx"]


def _layers_with_positions(program: Program) -> set[int]:
    """Layers whose queries depend on positions other than through earlier attention."""
    depends: dict[fx.Node, bool] = {}
    found = set()
    for node in program.body.nodes:
        depends[node] = node.name == "positions" or any(depends[each] for each in node.all_input_nodes)
        if is_call(node, ATTENTION):
            if depends[args(node)[0]]:
                found.add(args(node)[4])
            depends[node] = False
    return found


def _is_rms_norm(module: nn.Module) -> bool:
    weighted = isinstance(vars(module)["_parameters"].get("weight"), nn.Parameter)
    return type(module).__name__.endswith("RMSNorm") and weighted


def _is_pre_norm_layer(children: dict[str, nn.Module]) -> bool:
    """Whether both its norms read a sum: of attention's output, and of the layer's output before the next norm."""
    names = ("input_layernorm", "post_attention_layernorm")
    return all(name in children and _is_rms_norm(children[name]) for name in names)


def _adds_block_outputs_directly(layer: nn.Module) -> bool:
    """Whether its norms read sums of the residual stream and a block's output, without a norm or factor in between."""
    children = _children(layer)
    norms = sum(_is_rms_norm(each) for each in children.values())
    return _is_pre_norm_layer(children) and norms == 2 and vars(layer).get("residual_multiplier", 1.0) == 1.0


def _head_norms(attention: nn.Module) -> list[nn.Parameter]:
    children = _children(attention)
    norms = [children[name] for name in ("q_norm", "k_norm") if name in children]
    return [each.get_parameter("weight") for each in norms if _is_rms_norm(each)]


def _normed_by_head(attention: nn.Module) -> bool:
    weights = _head_norms(attention)
    return len(weights) == 2 and all(weight.numel() == _head_dim(attention) for weight in weights)


def _normed_whole(attention: nn.Module) -> bool:
    """Whether norms between projections and heads prevent merging the projections into one matrix."""
    return any(weight.numel() != _head_dim(attention) for weight in _head_norms(attention))


def _head_dim(attention: nn.Module) -> Any:
    return vars(attention).get("head_dim")


def _rotates_whole_heads(attention: nn.Module) -> bool:
    """Whether its module rotates pairs half a head apart, tested by a call, and its config rotates whole heads."""
    rotate = vars(sys.modules[type(attention).__module__]).get("rotate_half")
    if rotate is None:
        return False
    numbers = torch.arange(4.0)
    halves = torch.tensor([-2.0, -3.0, 0.0, 1.0])
    config = vars(attention).get("config")
    rope = {} if config is None else config.to_dict().get("rope_parameters") or {}
    return bool(torch.equal(rotate(numbers), halves)) and rope.get("partial_rotary_factor", 1.0) == 1.0


def _activation(model: PreTrainedModel) -> Any:
    values = model.config.to_dict()
    return values.get("hidden_activation") or values.get("hidden_act")
