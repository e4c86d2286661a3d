"""Weights before and after they are loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from sglang_jax.architectures.tensor_names import Kind, Part
from sglang_jax.checkpoint.reader import Role


def parameter(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """A weight yet without a value: a shape on the meta device."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


def forget(value: nn.Parameter) -> nn.Parameter:
    """The shape of a weight whose value is kept elsewhere."""
    return parameter(tuple(value.shape), value.dtype)


@dataclass(frozen=True, slots=True)
class MadeOf:
    """The parts of the model, as the manifest calls them, that lie one after the other along a parameter's rows.

    `role`: which of the arrays of a stored matrix it is; None for plain numbers."""

    parts: tuple[Part, ...]
    kind: Kind
    role: Role | None = None


class Loadable(nn.Module):
    """A module that says what its own parameters are made of, from which loaders know what to read."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[str, MadeOf] = {}

    def declare(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *parts: Part,
        kind: Kind = Kind.WEIGHT,
        role: Role | None = None,
    ) -> nn.Parameter:
        """A parameter to be kept under `name`, yet without a value."""
        self.sources[name] = MadeOf(parts, kind, role)
        return parameter(shape, dtype)
