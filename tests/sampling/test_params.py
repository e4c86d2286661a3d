"""Sampling parameters: sequences of a wrong type are refused by name, and empty ones count as absent."""

from __future__ import annotations

import pytest

from sglang_jax.errors import ParameterError
from sglang_jax.sampling.params import (
    MAX_LOGIT_BIAS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": ""}, "stop"),
        ({"stop": "x"}, "stop"),
        ({"stop": ["x", ""]}, "stop"),
        ({"stop": ["x" * (MAX_STOP_CHARACTERS + 1)]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(MAX_STOP_TOKEN_IDS + 1))}, "stop_token_ids"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)}, "logit_bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value)[:40],
)
def test_sequences_are_refused_by_name(fields: dict[str, object], param: str) -> None:
    with pytest.raises(ParameterError) as refused:
        SamplingParams(**fields)  # type: ignore[arg-type]
    assert refused.value.param == param


def test_empty_sequences_count_as_absent() -> None:
    assert SamplingParams(stop=[], stop_token_ids=[], logit_bias={}).stop == []
