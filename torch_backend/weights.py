"""Loads checkpoints into models: each rank reads its part of each tensor, and no more.

Modules say what their parameters are made of (`layers.parameter`), the manifest where that lies in the checkpoint. So
no layer's structure is repeated here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.sections import rows_of_device
from sglang_jax.architectures.manifest import ParameterName, ParameterSpec, manifest_of
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.checkpoint import ParameterReader, TensorReader, check_tensors
from sglang_jax.checkpoint.quantization import Quantization
from sglang_jax.checkpoint.reader import Array, Role
from torch_backend.kv_pages import LayerMemory
from torch_backend.layers.layout import Layout, Packed, PackedAndBlocks
from torch_backend.layers.matrix import InBlocks, PlainMatrix, ScaledMatrix
from torch_backend.layers.packed import packing_works
from torch_backend.layers.parameter import Loadable
from torch_backend.layers.shard import ModelShard
from torch_backend.models.transformer import Transformer


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """A slice of each axis of a parameter. `role`: see `MadeOf`."""

    name: ParameterName
    index: tuple[slice, ...]
    role: Role | None = None

    def read(self, reader: ParameterReader) -> Array:
        """Numbers, or what the part has of the array with its role."""
        if self.role is None:
            return reader.read(self.name, self.index)
        return reader.read_array(self.name, self.role, self.index)


class KeptBlocks(Protocol):
    """A matrix that is kept as the checkpoint stores it."""

    @property
    def nbytes(self) -> int:
        """Bytes that this takes; known before."""
        ...

    @property
    def plain(self) -> PlainMatrix:
        """The same matrix in numbers."""
        ...

    def read(self) -> InBlocks | None:
        """Reads the matrix, whose bias has been read; None if it cannot be kept so."""
        ...


def load_weights(
    model: Transformer,
    reader: TensorReader,
    config: ModelConfig,
    *,
    pack: bool = True,
    kept: Sequence[KeptBlocks] = (),
    quantization: Quantization | None = None,
) -> Layout | None:
    """Gives every parameter of `model` its value, of the model's dtype, on its device.

    At any time the host holds no more than one parameter beside those of a model on the host. On a CPU, matrices are
    then packed (see `Transformer.arrange`) where torch can do it, unless `pack` is false; `kept` matrices are held both
    packed and in the blocks of the checkpoint. `quantization`: see `ParameterReader`; the model was built with its
    encodings. Returns the layout, None where matrices stay plain.

    **Raises:** `CheckpointError` naming tensors that are missing, extra or misshapen.
    """
    check_tensors(reader, config)
    parameters = ParameterReader(reader, config, quantization)
    for module, name, parts in sources(model, config):
        empty: nn.Parameter = module.get_parameter(name)
        value = _read(parameters, parts, empty.shape, empty.dtype).to(model.device)
        setattr(module, name, nn.Parameter(value, requires_grad=False))
    if model.tied:
        model.tie()
    for module in model.modules():
        if isinstance(module, ScaledMatrix):
            module.choose_product(model.device, model.embedding.weight.dtype)
    if not (pack and packs(model)):
        return None
    blocks: dict[PlainMatrix, InBlocks] = {each.plain: found for each in kept if (found := each.read()) is not None}
    layout = PackedAndBlocks(blocks) if blocks else Packed()
    model.arrange(layout)
    return layout


def load_kv_parameters(
    kv: Iterable[LayerMemory], reader: ParameterReader, shard: ModelShard, factor: float | None = None
) -> None:
    """Gives the pages of every layer what the checkpoint has for them, of this rank's kv heads, times `factor`; where
    it has nothing, the default."""
    for number, memory in enumerate(kv):
        for (part, kind), value in ({} if memory.pages is None else memory.pages.parameters).items():
            name = ParameterName(part, kind, number)
            found = reader.read(name, _index(shard, reader.spec(name)))
            value.copy_(torch.tensor(found * np.float32(1.0 if factor is None else factor)))


def weight_bytes(model: Transformer, kept: Sequence[KeptBlocks] = ()) -> int:
    """Bytes that the weights of `model` take once `load_weights` is done with it; known before."""
    plain = sum(parameter.nbytes for parameter in model.parameters())
    # Packed matrices replace plain ones, but for tied embeddings.
    twice = model.embedding.weight.nbytes if model.tied and packs(model) else 0
    return plain + twice + sum(each.nbytes for each in kept)


def matrices_in_8_bits(model: Transformer, config: ModelConfig) -> dict[ParameterName, str]:
    """The matrices whose values are in memory as they are stored, with a scale of each row, and the type of these."""
    return {
        part.name: str(module.get_parameter(name).dtype).removeprefix("torch.")
        for module, name, parts in sources(model, config)
        for part in parts
        if part.role is Role.VALUES
    }


def packs(model: Transformer) -> bool:
    """Whether matrices of `model` are packed: on a CPU where torch can do it."""
    return model.device.type == "cpu" and packing_works(model.embedding.weight.dtype)


def _read(reader: ParameterReader, parts: list[ParameterPart], shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The parts one after the other along their rows; zeros where a vocabulary does not reach the end.

    **Raises:** `ValueError` if the model was built with another shape than the manifest has.
    """
    value = torch.zeros(shape, dtype=dtype)
    target = _as_numpy(value)
    first, spec = 0, reader.spec(parts[0].name)
    rows = np.swapaxes(target, 0, 1) if spec.places else target  # those of experts are their second axis
    for part in parts:
        found = part.read(reader)
        found = np.swapaxes(found, 0, 1) if spec.places else found
        rows[first : first + len(found)] = found
        first += len(found)
    filled_up = Axis.VOCABULARY in spec.axes[0]
    if first != len(rows) and not filled_up:
        raise ValueError(f"{parts[0].name} and what lies behind it have {first} rows, and the model {tuple(shape)}")
    return value


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
"""A parameter, by its module and name, and what it is made of."""


def sources(model: Transformer, config: ModelConfig, *, tied_head: bool = False) -> Iterator[Source]:
    """Every parameter that has a value of its own; with `tied_head` a head too that shares the embeddings'."""
    whole: list[nn.Module] = [model.embedding, model.final_norm]
    if tied_head or not model.tied:
        whole.append(model.head.linear.matrix)
    modules: list[tuple[int | None, nn.Module]] = [(None, module) for module in whole]
    for count, layer in enumerate(model.decoder_layers):
        modules += [(count, module) for module in layer.modules()]
    for number, module in modules:
        if isinstance(module, Loadable):
            for name, made_of in module.sources.items():
                names = [ParameterName(part, made_of.kind, number) for part in made_of.parts]
                parts = [
                    ParameterPart(each, index, made_of.role)
                    for each in names
                    for index in _indices(model.shard, config, each)
                ]
                yield module, name, parts


def _indices(shard: ModelShard, config: ModelConfig, name: ParameterName) -> list[tuple[slice, ...]]:
    """The rank's part of a parameter: of heads, of columns of the feed-forward layer, of rows of the vocabulary; of
    channels that are several sections a part of each, one behind the other."""
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
