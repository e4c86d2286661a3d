"""The parameters of a model, matched with its manifest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flax import nnx

from sglang_jax.architectures.manifest import ParameterName, manifest_of
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint.reader import Role
from sglang_jax.layers.block_matrix import BLOCK_AXES, BlockMatrix
from sglang_jax.layers.grouped_matrix import GroupedExperts, GroupedMatrix
from sglang_jax.layers.parameter import Parameter
from sglang_jax.models.transformer import Transformer

EMBEDDING, HEAD = ParameterName(Part.EMBEDDING), ParameterName(Part.HEAD)
"""A model with tied embeddings may have no head: it then uses the embeddings."""

_BETWEEN = ("matrix", "plain")
"""Attributes between a layer and the arrays of its matrix, which names in Orbax checkpoints leave out."""


@dataclass(frozen=True, slots=True)
class ModelParameter:
    """A parameter that is read from a checkpoint, with its place in the model, with dots, as in Orbax checkpoints, and
    the manifest's names of the tensors that it consists of."""

    path: str
    value: Parameter
    names: tuple[ParameterName, ...]


def parameters_of(model: Transformer) -> Iterator[ModelParameter]:
    """Every parameter that a checkpoint fills, in the order of the model's state."""
    for path, value in nnx.to_flat_state(nnx.state(model)):
        if value.parts:
            place = ".".join(str(step) for step in path if step not in _BETWEEN)
            yield ModelParameter(place, value, _names(path, value))


def _names(path: Sequence[Any], value: Parameter) -> tuple[ParameterName, ...]:
    layer = int(path[1]) if path[0] == "layers" else None
    return tuple(ParameterName(part, value.kind, layer) for part in value.parts)


def matrices_as_stored(model: Transformer) -> dict[ParameterName, str]:
    """The matrices that are in memory only in 8 bits with a scale per row, or only in blocks, and the type of their
    values. Blocks must not be packed yet."""
    found = {
        name: parameter.value.dtype.name
        for parameter in parameters_of(model)
        if parameter.value.role is Role.VALUES and not set(BLOCK_AXES) & set(parameter.value.axes)
        for name in parameter.names
    }
    for path, module in nnx.iter_modules(model):
        if isinstance(module, BlockMatrix) and module.product.serves_all_rows:
            names = _names(path, module.arrays["values"])
            found |= dict.fromkeys(names, module.product.encoding.values.value)
        if isinstance(module, GroupedMatrix | GroupedExperts):
            found |= dict.fromkeys(_names(path, module.arrays["values"]), module.product.kind.value)
    if not model.has_own_head and EMBEDDING in found:
        found[HEAD] = found[EMBEDDING]
    return found


def check_shapes(model: Transformer) -> None:
    """Raises `ValueError` naming the first parameter whose shape is not that of the manifest, or all that the model
    lacks."""
    manifest = manifest_of(model.config)
    missing = dict(manifest.specs)
    for parameter in parameters_of(model):
        axes = [axis for axis in parameter.value.axes if axis not in BLOCK_AXES]
        shape, built = manifest.fused_shape(parameter.names, axes), parameter.value.shape[: len(axes)]
        if built != shape:
            raise ValueError(f"{parameter.path} is built as {built}, the manifest has {shape}")
        for name in parameter.names:
            missing.pop(name, None)  # several arrays may belong to one matrix
    if not model.has_own_head:
        missing.pop(HEAD)
    if missing:
        raise ValueError(f"the model is built without {', '.join(map(str, missing))}")
