"""Weights of a traced model by transformers' names, from a checkpoint or random."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings

from sglang_jax.checkpoint.reader import Index, TensorReader
from sglang_jax.checkpoint.tied_head import head_differs
from sglang_jax.errors import CheckpointError, cut
from torch_backend.compilation.graph import Weight

_MAX_NAMED = 6

_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Names in any model of tensors that older versions of transformers saved, and that are computed now."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's slice of the whole model's parameter `name`."""

    name: str
    index: Index


@dataclass(frozen=True, slots=True)
class CheckpointWeights:
    """Reads weights by transformers' names. `names`: their names in the checkpoint; `cuts`: slices of the parameters
    that a rank does not read whole, by their names in its model."""

    reader: TensorReader
    names: dict[str, str]
    cuts: Mapping[str, Cut] = field(default_factory=dict)

    @classmethod
    def of(cls, model: PreTrainedModel, reader: TensorReader) -> CheckpointWeights:
        """Finds every parameter of the model, with or without the prefix of its body, and reads saved buffers. Raises
        `CheckpointError` naming tensors that are missing, misshapen, or not in the model."""
        there = _under_present_names(model, reader.names())
        prefix = f"{model.base_model_prefix}."
        names, missing = {}, []
        for name, parameter in model.named_parameters():
            found = there.get(name) or there.get(name.removeprefix(prefix))
            if found is None:
                missing.append(name)
                continue
            names[name] = found
            if reader.shape(found) != tuple(parameter.shape):
                raise CheckpointError(
                    f"{found} is {reader.shape(found)} in the checkpoint, but {tuple(parameter.shape)} in the model"
                )
        if missing:
            raise CheckpointError(f"the checkpoint lacks tensors of the model: {_list_names(missing)}")
        further = _further_names(model)
        extra = {old for new, old in there.items() if new not in further} - set(names.values())
        ignored = [re.compile(each) for each in (*_BUFFERS, *(model._keys_to_ignore_on_load_unexpected or ()))]
        extra = {name for name in extra if not any(pattern.search(name) for pattern in ignored)}
        if extra:
            raise CheckpointError(
                f"the checkpoint has tensors that the model does not have: {_list_names(sorted(extra))}"
            )
        _read_buffers(model, reader, there)
        return cls(reader, names)

    def read(self, weight: Weight) -> torch.Tensor:
        """Returns the weight on the host, in its dtype."""
        value = torch.empty(weight.shape, dtype=weight.dtype)
        target = value.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if weight.dtype == torch.bfloat16 else None
        array = value.numpy() if target is None else target
        first = 0
        for part in weight.parts:
            cut = self.cuts.get(part, Cut(part, ()))
            found = self.reader.read(self.names[cut.name], cut.index)
            if weight.offset:
                found = found.astype(np.float32) + np.float32(weight.offset)
            array[first : first + len(found)] = found
            first += len(found)
        return value


def has_own_head(model: PreTrainedModel, reader: TensorReader) -> bool:
    """Whether the checkpoint has different matrices for tied weights of the model; transformers then unties them."""
    there, prefix = _under_present_names(model, reader.names()), f"{model.base_model_prefix}."

    def called(name: str) -> str:
        return there.get(name) or there.get(name.removeprefix(prefix)) or name

    return any(head_differs(reader, called(head), called(source)) for head, source in _tied(model).items())


def _tied(model: PreTrainedModel) -> dict[str, str]:
    """Names of tied parameters, and the names of the parameters that they share."""
    tied: dict[str, str] = model.all_tied_weights_keys
    return tied


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """Random values: norms near 1, noticeable biases, activations near 1. A function of seed, name and shape."""

    shapes: dict[str, tuple[int, ...]]
    seed: int = 0
    cuts: Mapping[str, Cut] = field(default_factory=dict)

    @classmethod
    def of(cls, model: PreTrainedModel, seed: int = 0) -> RandomWeights:
        return cls({name: tuple(parameter.shape) for name, parameter in model.named_parameters()}, seed)

    def tensor(self, name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), self.seed))
        noise = torch.randn(self.shapes[name], generator=generator)
        if noise.dim() > 1:
            return noise * (0.5 if "embed" in name else noise.shape[-1] ** -0.5)
        return 0.2 * noise + (0.0 if name.endswith("bias") else 1.0)

    def read(self, weight: Weight) -> torch.Tensor:
        cuts = [self.cuts.get(part, Cut(part, ())) for part in weight.parts]
        together = torch.cat([self.tensor(cut.name)[cut.index] for cut in cuts])
        return (together + weight.offset).to(weight.dtype)


def _under_present_names(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Maps this transformers version's names to the checkpoint's. Tensors that transformers would merge or split while
    loading keep theirs, and are then reported as missing."""
    renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    return {apply_renamings(name, renamings): name for name in sorted(names)}


def _read_buffers(model: PreTrainedModel, reader: TensorReader, there: Mapping[str, str]) -> None:
    """Loads buffers that transformers saves with a model, because they may have been trained."""
    prefix, saved = f"{model.base_model_prefix}.", model.state_dict().keys()
    for name, buffer in model.named_buffers():
        found = there.get(name) or there.get(name.removeprefix(prefix))
        if found is None or name not in saved or not buffer.is_floating_point():
            continue
        if reader.shape(found) != tuple(buffer.shape):
            raise CheckpointError(
                f"{found} is {reader.shape(found)} in the checkpoint, but {tuple(buffer.shape)} in the model"
            )
        buffer.copy_(torch.from_numpy(np.array(reader.read(found), dtype=np.float32)))


def _further_names(model: PreTrainedModel) -> set[str]:
    """Additional names that the checkpoint may contain: tied parameters, and buffers."""
    prefix = f"{model.base_model_prefix}."
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    every |= {name for name, _ in model.named_buffers()}
    return every | {name.removeprefix(prefix) for name in every}


def _list_names(names: Sequence[str] | Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return cut(", ".join(names[:_MAX_NAMED])) + more
