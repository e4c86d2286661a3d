"""Defaults of sampling fields that a model's authors recommend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_jax.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Values for fields of `SamplingParams` from generation_config.json; None for fields that it does not set."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def recommended(self) -> dict[str, float]:
        values = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
        }
        return {name: value for name, value in values.items() if value is not None}


def with_defaults(chosen: Mapping[str, Any], defaults: GenerationDefaults) -> SamplingParams:
    """The fields that a request sets, then the model's defaults, then neutral values. `chosen` takes precedence even if
    its value is neutral, so it is a mapping: `SamplingParams` cannot distinguish a temperature of 1 that was set from
    one that was not. Raises `ParameterError`."""
    return SamplingParams(**{**defaults.recommended(), **chosen})
