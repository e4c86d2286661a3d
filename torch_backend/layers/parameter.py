"""Parameters of layers: how they are declared before weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from sglang_jax.architectures.tensor_names import ParameterKind, Part
from sglang_jax.checkpoint.reader import Role
from torch_backend.layers.shard import ModelShard


def parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """A weight without a value: a shape on the meta device."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


def drop_value(value: nn.Parameter) -> nn.Parameter:
    """Replaces a weight whose value is kept elsewhere by its shape."""
    return parameter(tuple(value.shape), value.dtype)


@dataclass(frozen=True, slots=True)
class ParameterSource:
    """The parts of the model, by the manifest's names, that are concatenated along a parameter's rows. `role`: which
    array of a stored matrix the parameter is; None for plain values."""

    parts: tuple[Part, ...]
    kind: ParameterKind
    role: Role | None = None


class Loadable(nn.Module):
    """A module that declares its parameters' parts, from which loaders know what to read. `shard`: which part of the
    model its parameters are of; None for that of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.shard: ModelShard | None = None
        self.sources: dict[str, ParameterSource] = {}

    def declare(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *parts: Part,
        kind: ParameterKind = ParameterKind.WEIGHT,
        role: Role | None = None,
    ) -> nn.Parameter:
        """Declares a parameter `name`, and returns it without a value."""
        self.sources[name] = ParameterSource(parts, kind, role)
        return parameter(shape, dtype)
