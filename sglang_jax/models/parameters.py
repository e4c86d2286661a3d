"""The parameters of a model beside the manifest that they follow from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flax import nnx

from sglang_jax.architectures.manifest import ParameterName, manifest_of
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint.reader import Role
from sglang_jax.layers.block_matrix import BLOCK_AXES
from sglang_jax.layers.parameter import Parameter
from sglang_jax.models.transformer import Transformer

HEAD = ParameterName(Part.HEAD)
"""Made of the embeddings where these are tied to it."""


_BETWEEN = ("matrix", "many")
"""What lies between a layer and the arrays of its matrix: no part of the names that Orbax checkpoints have."""


@dataclass(frozen=True, slots=True)
class ModelParameter:
    """A parameter that is read from a checkpoint.

    - `path`: where it is in the model, with dots; arrays of a matrix are their layer's.
    - `names`: what the manifest calls the parts that it is made of.
    """

    path: str
    value: Parameter
    names: tuple[ParameterName, ...]


def parameters_of(model: Transformer) -> Iterator[ModelParameter]:
    """Every parameter that is made of a checkpoint's, in the order of the model's state."""
    for path, value in nnx.to_flat_state(nnx.state(model)):
        if value.parts:
            layer = int(path[1]) if path[0] == "layers" else None
            names = tuple(ParameterName(part, value.kind, layer) for part in value.parts)
            place = ".".join(str(step) for step in path if step not in _BETWEEN)
            yield ModelParameter(place, value, names)


def matrices_in_8_bits(model: Transformer) -> dict[ParameterName, str]:
    """The matrices whose values are in memory as they are stored, with a scale of each row, and the type of these."""
    return {
        name: parameter.value.dtype.name
        for parameter in parameters_of(model)
        if parameter.value.role is Role.VALUES and not set(BLOCK_AXES) & set(parameter.value.axes)
        for name in parameter.names
    }


def check_shapes(model: Transformer) -> None:
    """Looks whether a model as it was built has the parameters of its manifest, each in its shape.

    **Raises:** `ValueError` naming the first that differs.
    """
    manifest = manifest_of(model.config)
    missing = dict(manifest.specs)
    for parameter in parameters_of(model):
        axes = [axis for axis in parameter.value.axes if axis not in BLOCK_AXES]
        shape, built = manifest.fused_shape(parameter.names, axes), parameter.value.shape[: len(axes)]
        if built != shape:
            raise ValueError(f"{parameter.path} is built as {built}, the manifest has {shape}")
        for name in parameter.names:
            missing.pop(name, None)  # a matrix may be several arrays
    if not model.has_own_head:
        missing.pop(HEAD)
    if missing:
        raise ValueError(f"the model is built without {', '.join(map(str, missing))}")
