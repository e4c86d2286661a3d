"""Sampling parameters of requests, and a reference sampler."""

from sglang_jax.sampling.defaults import GenerationDefaults, with_defaults
from sglang_jax.sampling.params import (
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    SamplingParams,
    unknown_field,
)

__all__ = [
    "MAX_LOGIT_BIAS",
    "MAX_STOP_TOKEN_IDS",
    "MAX_TOP_LOGPROBS",
    "GenerationDefaults",
    "SamplingParams",
    "unknown_field",
    "with_defaults",
]
