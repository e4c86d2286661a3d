"""Norms and their weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class NormKind(StrEnum):
    """The divisor of a norm."""

    RMS = "rms"
    """The root of the mean square (Zhang and Sennrich 2019)."""
    LAYER = "layer"
    """The standard deviation, after subtracting the mean (Ba et al. 2016)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormConfig:
    """A norm and its weight.

    - `weight_in_float32`: multiply by the weight in float32, before rounding to the dtype of activations. Otherwise the
      result is rounded first.
    - `offset`: added to the stored weight when it is loaded; 1 if a checkpoint stores w for a weight of 1 + w.
    - `bias`: a vector is added to the result of a `LAYER` norm of the residual stream.
    - `replaces_sum`: the residual stream goes on with the norm of the sum, not with the sum. A norm before each part
      is then the norm after the part before it, as in the first transformers (Vaswani et al. 2017).
    """

    eps: float
    kind: NormKind = NormKind.RMS
    weight_in_float32: bool = False
    offset: float = 0.0
    bias: bool = False
    replaces_sum: bool = False
