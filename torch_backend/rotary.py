"""Cosines and sines of a step's positions."""

from __future__ import annotations

import torch

from sglang_jax.checkpoint.rotary import RotaryScaling
from torch_backend.operations import Rotation


class RotaryTables:
    """Rotary position embedding (Su et al. 2021) with any kind of `RotaryScaling`, computed in float32, once per step
    for all its layers: tables of 131,072 positions would take 64 MiB."""

    def __init__(self, scaling: RotaryScaling, device: torch.device) -> None:
        self._frequencies = torch.tensor(scaling.frequencies(), dtype=torch.float32, device=device)
        self._factor = scaling.attention_factor()
        self._stretch = scaling.dynamic_stretch()
        if self._stretch is not None:
            self._exponents = torch.tensor(self._stretch.exponents, dtype=torch.float32, device=device)

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """Tables of `positions`, int32 `[T]`."""
        frequencies = self._frequencies
        if self._stretch is not None:
            excess = (positions + 1 - self._stretch.original_max_position).clamp(min=0)
            frequencies = frequencies * torch.pow((1 + self._stretch.growth * excess)[:, None], self._exponents)
        angles = positions[:, None] * frequencies
        return Rotation(angles.cos() * self._factor, angles.sin() * self._factor)


class NoRotation:
    """Tables that do not rotate heads of `head_dim`, for layers without positions."""

    def __init__(self, head_dim: int) -> None:
        self._half = head_dim // 2

    def __call__(self, positions: torch.Tensor) -> Rotation:
        shape = (len(positions), self._half)
        return Rotation(torch.ones(shape, device=positions.device), torch.zeros(shape, device=positions.device))
