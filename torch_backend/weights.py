"""Loads checkpoints into models: each rank reads only its shard of each tensor. Modules declare their parameters' parts
(`layers.parameter`), the manifest where these are: no structure is repeated here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.sections import rows_of_device
from sglang_jax.architectures.manifest import ParameterName, ParameterSpec, manifest_of
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint import ParameterReader, TensorReader, check_tensors
from sglang_jax.checkpoint.quantization import Quantization
from sglang_jax.checkpoint.reader import Array, Index, Role
from sglang_jax.runner.freed_memory import FreedMemory
from torch_backend import host_memory
from torch_backend.kv_pages import LayerMemory
from torch_backend.layers.bfloat16 import Bfloat16Matrix
from torch_backend.layers.expert_matrices import Bfloat16Experts, BlockExperts, GroupedExperts, ScaledExperts
from torch_backend.layers.experts import Experts
from torch_backend.layers.grouped import GroupedMatrix
from torch_backend.layers.layout import PackedLayout
from torch_backend.layers.matrix import PlainMatrix, QuantisedMatrix, ScaledMatrix, TwoFormMatrix
from torch_backend.layers.packed import packing_works
from torch_backend.layers.parameter import Loadable
from torch_backend.layers.shard import ModelShard
from torch_backend.models.transformer import Head, Transformer

_WEIGHTS_AT_ONCE = 2**24
"""Weights to read at a time: reading a whole parameter as float32 to round it would hold it in memory three times."""


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """A slice of each axis of a parameter. `role`: see `ParameterSource`."""

    name: ParameterName
    index: tuple[slice, ...]
    role: Role | None = None


def load_weights(
    model: Transformer,
    reader: TensorReader,
    config: ModelConfig,
    *,
    pack: bool = True,
    quantization: Quantization | None = None,
) -> PackedLayout | None:
    """Gives every parameter of `model` its value, in the model's dtype, on its device. The host never holds more than
    one matrix besides those of a model on the host. On a CPU where torch can, matrices are then packed (see
    `Transformer.repack`), unless `pack` is false.

    `quantization`: see `ParameterReader`; the model was built with its encodings. Returns the layout, or None if
    matrices stay plain. Raises `CheckpointError` naming tensors that are missing, extra or misshapen.
    """
    check_tensors(reader, config)
    parameters = ParameterReader(reader, config, quantization)
    freed = FreedMemory()
    for together in _by_matrix(sources(model, config)):
        for (module, name, _), value in zip(together, _read(parameters, together), strict=True):
            setattr(module, name, nn.Parameter(value.to(model.device), requires_grad=False))
            freed.add(value.nbytes)
    for module in model.modules():
        if isinstance(module, Bfloat16Matrix) and not module.weight.is_meta:  # as that of a tied head
            freed.add(module.weight.nbytes)
            module.weight = nn.Parameter(host_memory.moved(module.weight), requires_grad=False)
    freed.give_back()
    if model.tied:
        model.tie()
    for module in model.modules():
        if isinstance(module, ScaledMatrix):
            module.choose_product(model.device, model.dtype)
        if isinstance(module, ScaledExperts) and not model.fixed:
            module.choose_product(model.device)
        if isinstance(module, QuantisedMatrix | GroupedMatrix | BlockExperts | GroupedExperts):
            module.pack()
            freed.add(sum(each.nbytes for each in module.parameters()))
    for module in model.modules():
        if isinstance(module, Experts):
            module.choose_product(model.device)
    freed.give_back()
    if not (pack and packs(model)):
        return None
    layout = PackedLayout()
    model.repack(layout)
    return layout


def load_kv_parameters(
    kv: Iterable[LayerMemory], reader: ParameterReader, shard: ModelShard, factor: float | None = None
) -> None:
    """Copies the checkpoint's KV parameters of this rank's kv heads, times `factor`, into the pages of every layer.
    Parameters that the checkpoint lacks keep their default."""
    for number, memory in enumerate(kv):
        for (part, kind), value in ({} if memory.pages is None else memory.pages.parameters).items():
            name = ParameterName(part, kind, number)
            found = reader.read(name, _index(shard, reader.spec(name)))
            value.copy_(torch.tensor(found * np.float32(1.0 if factor is None else factor)))


def weight_bytes(model: Transformer) -> int:
    """Bytes of the weights of `model` after `load_weights`, known before."""
    plain = sum(parameter.nbytes for parameter in model.parameters())
    # Packed matrices replace plain ones, except tied embeddings.
    tables = [each.matrix for each in model.embeddings] if model.tied and packs(model) else []
    twice = sum(each.weight.nbytes for each in tables if isinstance(each, PlainMatrix))
    return plain + twice


def bytes_in_blocks(model: Transformer) -> int:
    """Bytes of the blocks that quantised matrices keep in addition to their values."""
    kept = [module for module in model.modules() if isinstance(module, TwoFormMatrix)]
    return sum(module.get_parameter(role.value).nbytes for module in kept for role in module.encoding.roles)


def matrices_as_stored(model: Transformer, config: ModelConfig) -> dict[ParameterName, str]:
    """The matrices that stay as stored, in 8 bits with a scale per row, in blocks, or in bfloat16 in a model of
    float32, and the type of their values."""
    found = {
        part.name: _stored_type(module, name)
        for module, name, parts in sources(model, config)
        for part in parts
        if (part.role is Role.VALUES and not isinstance(module, TwoFormMatrix)) or _stays_in_bfloat16(module, name)
    }
    table, head = ParameterName(Part.EMBEDDING), ParameterName(Part.HEAD)
    if model.tied and table in found:
        found[head] = found[table]
    return found


def _stored_type(module: nn.Module, name: str) -> str:
    if isinstance(module, QuantisedMatrix | BlockExperts):
        return module.encoding.values.value
    if isinstance(module, GroupedMatrix | GroupedExperts):
        return module.kind.value
    return str(module.get_parameter(name).dtype).removeprefix("torch.")


def _stays_in_bfloat16(module: nn.Module, name: str) -> bool:
    stays = isinstance(module, Bfloat16Matrix | Bfloat16Experts)
    return stays and module.get_parameter(name).dtype == torch.bfloat16


def packs(model: Transformer) -> bool:
    """Whether matrices of `model` are packed: on a CPU where torch can."""
    return model.device.type == "cpu" and packing_works(model.dtype)


def _by_matrix(parameters: Iterable[Source]) -> Iterator[list[Source]]:
    """Groups the parameters that are arrays of one matrix; other parameters are groups of one."""

    def matrix(source: Source) -> object:
        module, name, parts = source
        return module, [(part.name, part.index, name if part.role is None else None) for part in parts]

    for _, group in groupby(parameters, matrix):
        yield list(group)


def _read(reader: ParameterReader, parameters: Sequence[Source]) -> list[torch.Tensor]:
    """Reads a parameter, or the arrays of a matrix, each part once, in the order of rows; rows past the vocabulary are
    zero. Raises `ValueError` if the model was built with another shape than the manifest's."""
    empty = [module.get_parameter(name) for module, name, _ in parameters]
    values = [torch.zeros(each.shape, dtype=each.dtype) for each in empty]
    [(_, _, parts), *_] = parameters
    spec = reader.spec(parts[0].name)
    axis = 1 if spec.places else 0  # the rows of experts are the second axis
    targets = {own[0].role: _as_numpy(value) for (_, _, own), value in zip(parameters, values, strict=True)}
    first = 0
    for part in parts:
        last = first
        for index in _pieces(reader.spec(part.name), part.index):
            for role, found in _arrays(reader, part.name, index, targets).items():
                begin = first if spec.places else last
                end = begin + found.shape[axis]
                experts = slice(index[0].start - part.index[0].start, index[0].stop - part.index[0].start)
                targets[role][(experts, slice(begin, end)) if spec.places else slice(begin, end)] = found
            last = end
        first = last
    if first != empty[0].shape[axis] and Axis.VOCABULARY not in spec.axes[0]:
        shape = tuple(empty[0].shape)
        raise ValueError(f"{parts[0].name} and what lies behind it have {first} rows, and the model {shape}")
    return values


def _pieces(spec: ParameterSpec, index: Index) -> Iterator[Index]:
    """Slices of rows to read at once: of whole heads if the rows belong to heads, or of whole experts."""
    first, last, _ = index[0].indices(spec.shape[0])
    unit = math.prod(spec.sizes[0][1:])
    units = max(_WEIGHTS_AT_ONCE // max(unit * math.prod(spec.shape[1:]), 1), 1)
    for start in range(first, last, units * unit):
        yield (slice(start, min(start + units * unit, last)), *index[1:])


def _arrays(
    reader: ParameterReader, name: ParameterName, index: Index, targets: Mapping[Role | None, Array]
) -> Mapping[Role | None, Array]:
    """Reads the arrays of a slice of a matrix, or its plain values, by what those of the whole are in the model."""
    found: dict[Role | None, Array] = {}
    if of_matrix := [role for role in targets if role is not None]:
        group = _group_in_model(targets[Role.VALUES], index)
        found.update(reader.read_arrays(name, of_matrix, index, group=group).items())
    else:
        found[None] = reader.read(name, index)
    return found


def _group_in_model(values: Array, index: Index) -> int | None:
    """Weights of a block of the model's `values` of a matrix, or of all experts, of which `index` is a part with all
    columns; None without blocks, which are an axis more than the matrix has."""
    if values.ndim == len(index):
        return None
    first, last = index[-1].start, index[-1].stop
    group: int = (last - first) // values.shape[-2]
    return group


def _as_numpy(tensor: torch.Tensor) -> Array:
    """A numpy view of a tensor on the host."""
    match tensor.dtype:
        case torch.bfloat16:
            words: NDArray[np.int16] = tensor.view(torch.int16).numpy()
            return words.view(ml_dtypes.bfloat16)
        case torch.float8_e4m3fn:
            octets: NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
            return octets.view(ml_dtypes.float8_e4m3fn)
        case _:
            return tensor.numpy()


Source = tuple[nn.Module, str, list[ParameterPart]]
"""A parameter, by its module and name, and the checkpoint parts that make it up."""


def sources(model: Transformer, config: ModelConfig) -> Iterator[Source]:
    """Yields every parameter with its own value; a head that is tied to the embeddings has none."""
    heads: list[nn.Module] = [model.head]
    if isinstance(model.head, Head):
        heads = [linear.matrix for linear in model.head.linears]
    tables = [each.matrix for each in model.embeddings]
    added = [] if model.added is None else [model.added]
    whole = [*(table for table in tables if table not in heads), *added, model.final_norm, *heads]
    modules: list[tuple[int | None, nn.Module]] = [(None, module) for module in whole]
    for count, layer in enumerate(model.decoder_layers):
        modules += [(count, module) for module in layer.modules()]
    for number, module in modules:
        if isinstance(module, Loadable):
            for name, own in module.sources.items():
                if model.tied and module in heads and own.role is None:
                    continue
                shard = module.shard or model.shards[0]
                names = [ParameterName(part, own.kind, number) for part in own.parts]
                parts = [
                    ParameterPart(each, index, own.role) for each in names for index in _indices(shard, config, each)
                ]
                yield module, name, parts


def _indices(shard: ModelShard, config: ModelConfig, name: ParameterName) -> list[tuple[slice, ...]]:
    """The rank's slices of a parameter: of heads, of columns of the feed-forward layer, or of rows of the vocabulary;
    for channels in several sections, a slice of each section."""
    spec = manifest_of(config).specs[name]
    whole = _index(shard, spec)
    if not spec.sections:
        return [whole]
    rows = rows_of_device(spec.sections, shard.rank, shard.size)
    return [(slice(part.start, part.stop), *whole[1:]) for part in rows]


def _index(shard: ModelShard, spec: ParameterSpec) -> tuple[slice, ...]:
    index = []
    for axes, (length, *inner) in zip(spec.axes, spec.sizes, strict=True):
        width = math.prod(inner)
        part = shard.of_axis(axes[0], length)
        index.append(slice(part.start * width, part.stop * width))
    return tuple(index)
