"""The shard of a transformers model on one of several ranks, by transformers' own plan of tensor parallelism. Linear
layers are made smaller before the model is traced: `colwise` ones compute the rank's heads or columns, `rowwise` ones
read these, and their outputs are marked to be summed over ranks. Each rank has rows of the head, whose logits are
marked to be concatenated. Everything else, embeddings too, is whole on each rank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sglang_jax.architectures.model_config import ModelConfig
from torch_backend.compilation.markers import side_by_side_of_ranks, sum_of_ranks
from torch_backend.compilation.refusal import refused
from torch_backend.compilation.weights import Cut
from torch_backend.layers.shard import ModelShard

_COLUMNS, _ROWS = "colwise", "rowwise"
_WHOLE = ("embedding_rowwise", "replicated_with_grad_allreduce")
"""Styles of modules whose output is the same on every rank, which each can compute by itself."""

_KEYS_AND_VALUES = ("k_proj", "v_proj")
"""Projections that neighbouring ranks share if there are fewer kv heads than ranks."""


@dataclass(frozen=True, slots=True)
class RankShard:
    """The slices of parameters that the rank does not read whole, by name, and the number of modules with marks."""

    cuts: dict[str, Cut]
    marks: int


def shard_model(model: PreTrainedModel, config: ModelConfig, shard: ModelShard) -> RankShard:
    """Reduces an empty model to a rank's shard. Raises `ConfigError` for a model without a plan of only `colwise` and
    `rowwise`, or with a layer that does not divide."""
    cuts: dict[str, Cut] = {}
    marks = 0
    if shard.size == 1:
        return RankShard(cuts, marks)
    for name, module, style in _planned(model):
        if style == _ROWS:
            marks += 1
            columns = _share(model, name, module.in_features, shard)
            cuts[f"{name}.weight"] = Cut(f"{name}.weight", (slice(None), slice(columns.start, columns.stop)))
            module.weight = _empty(module.weight, (module.out_features, len(columns)))
            if not shard.first:  # the sum over ranks adds the bias once
                module.register_parameter("bias", None)
            module.register_forward_hook(lambda _, given, output: sum_of_ranks(output))
            continue
        rows = _outputs(model, name, module, config, shard)
        cuts |= _take_rows(model, name, module, rows)
    return RankShard(cuts, marks + _take_head(model, shard, cuts))


def _take_rows(model: PreTrainedModel, name: str, module: nn.Linear, rows: range) -> dict[str, Cut]:
    """Reduces a layer to some of its outputs. A weight that was tied to another becomes separate."""
    found = {}
    known = {id(parameter): own for own, parameter in model.named_parameters()}
    for own, parameter in list(module.named_parameters()):
        found[f"{name}.{own}"] = Cut(known[id(parameter)], (slice(rows.start, rows.stop),))
        setattr(module, own, _empty(parameter, (len(rows), *parameter.shape[1:])))
    return found


def _take_head(model: PreTrainedModel, shard: ModelShard, cuts: dict[str, Cut]) -> int:
    """Shards the head and returns the number of marks: 1, or 0 if its rows do not divide, so that each rank has all."""
    untyped: Any = model
    head = untyped.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.out_features % shard.size:
        return 0
    (name,) = (name for name, module in model.named_modules() if module is head)
    cuts |= _take_rows(model, name, head, _share(model, name, head.out_features, shard))
    head.register_forward_hook(lambda _, given, output: side_by_side_of_ranks(output, shard.size))
    return 1


def _planned(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear, str]]:
    """Linear layers that are sharded, with their names and styles."""
    kind, plan = model.config.model_type, model.config.base_model_tp_plan
    if not plan:
        raise refused(kind, "transformers has no plan of tensor parallelism for it: tp_size must be 1")
    for pattern, style in plan.items():
        if style in _WHOLE:
            continue
        if style not in (_COLUMNS, _ROWS):
            raise refused(
                kind,
                f"transformers' plan of tensor parallelism has {style} for {pattern}; only {_COLUMNS} and {_ROWS} are "
                "supported: tp_size must be 1",
            )
        wanted = re.compile(re.escape(f"{model.base_model_prefix}.{pattern}").replace(r"\*", r"\d+"))
        for name, module in model.named_modules():
            if wanted.fullmatch(name):
                if not isinstance(module, nn.Linear):
                    raise refused(kind, f"{name} is no linear layer that can be divided: tp_size must be 1")
                yield name, module, style


def _outputs(model: PreTrainedModel, name: str, module: nn.Linear, config: ModelConfig, shard: ModelShard) -> range:
    *path, last = name.split(".")
    if last not in _KEYS_AND_VALUES:
        return _share(model, name, module.out_features, shard)
    layer = next(int(each) for each in path if each.isdigit())
    attention = config.layers[layer].kv_attention
    assert attention is not None
    heads, size = shard.kv_heads(attention.num_kv_heads), module.out_features // attention.num_kv_heads
    return range(heads.start * size, heads.stop * size)


def _share(model: PreTrainedModel, name: str, length: int, shard: ModelShard) -> range:
    if length % shard.size:
        raise refused(
            model.config.model_type,
            f"{name} of {length} columns cannot be spread over {shard.size} processes: choose a tensor parallel size "
            "that divides it",
        )
    share = length // shard.size
    return range(shard.rank * share, (shard.rank + 1) * share)


def _empty(parameter: torch.Tensor, shape: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(parameter.new_empty(shape), requires_grad=False)
