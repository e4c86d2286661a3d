"""What `enable_deterministic_inference` refuses before a model is built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.small_configs import small_config

from sglang_jax.architectures.kinds.recurrent import ShortConvConfig
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.config import EngineConfig
from sglang_jax.errors import ConfigError
from sglang_jax.runner.determinism import refuse_with_determinism


def config(**options: Any) -> EngineConfig:
    return EngineConfig(model_path="demo", **{"enable_deterministic_inference": True} | options)


def with_states() -> ModelConfig:
    model = small_config()
    recurrent = replace(model.layers[0], mixer=ShortConvConfig(channels=32, width=3))
    return replace(model, layers=(recurrent, *model.layers[1:]))


def test_what_rounds_by_the_step_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"does not support model_impl transformers.* choose native"):
        refuse_with_determinism(config(model_impl="transformers"), small_config())
    in_bfloat16 = {"mamba_ssm_dtype": "bfloat16"}
    with pytest.raises(ConfigError, match="needs mamba_ssm_dtype float32, got bfloat16"):
        refuse_with_determinism(config(**in_bfloat16), with_states())
    refuse_with_determinism(config(**in_bfloat16), small_config())
    refuse_with_determinism(config(), with_states())
    refuse_with_determinism(config(**in_bfloat16, enable_deterministic_inference=False), with_states())
