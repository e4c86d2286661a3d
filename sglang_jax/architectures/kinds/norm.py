"""Norms and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class NormKind(StrEnum):
    """The divisor of a norm."""

    RMS = "rms"
    """The root of the mean square (Zhang and Sennrich 2019)."""
    LAYER = "layer"
    """The standard deviation, after subtracting the mean (Ba et al. 2016); without a bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """A norm and its weight.

    - `weight_in_float32`: multiply by the weight in float32, before rounding to the dtype of activations. Otherwise the
      result is rounded first.
    - `offset`: added to the stored weight when it is loaded; 1 if a checkpoint stores w for a weight of 1 + w.
    """

    eps: float
    kind: NormKind = NormKind.RMS
    weight_in_float32: bool = False
    offset: float = 0.0
