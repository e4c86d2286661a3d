"""What `enable_deterministic_inference` refuses before a model is built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.small_configs import small_config

from sglang_jax.architectures.kinds.norm import NormConfig
from sglang_jax.architectures.kinds.recurrent import Mamba2Config, ShortConvConfig
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.config import EngineConfig
from sglang_jax.errors import ConfigError
from sglang_jax.runner.determinism import refuse_with_determinism, shards_of


def config(**options: Any) -> EngineConfig:
    return EngineConfig(model_path="demo", **{"enable_deterministic_inference": True} | options)


def with_states() -> ModelConfig:
    model = small_config()
    recurrent = replace(model.layers[0], mixer=ShortConvConfig(channels=32, width=3))
    return replace(model, layers=(recurrent, *model.layers[1:]))


def test_what_rounds_by_the_step_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"does not support model_impl transformers.* choose native"):
        refuse_with_determinism(config(model_impl="transformers"), small_config())
    with pytest.raises(ConfigError, match=r"^deterministic tp does not support model_impl"):
        refuse_with_determinism(config(model_impl="transformers", deterministic="tp"), small_config())
    with pytest.raises(ConfigError, match=r"does not support tpu_activations rounded.* choose auto"):
        refuse_with_determinism(config(tpu_activations="rounded"), small_config())
    in_bfloat16 = {"mamba_ssm_dtype": "bfloat16"}
    with pytest.raises(ConfigError, match="needs mamba_ssm_dtype float32, got bfloat16"):
        refuse_with_determinism(config(**in_bfloat16), with_states())
    refuse_with_determinism(config(**in_bfloat16), small_config())
    refuse_with_determinism(config(), with_states())
    refuse_with_determinism(config(**in_bfloat16, enable_deterministic_inference=False), with_states())


def mamba2(groups: int) -> ModelConfig:
    model = small_config(num_heads=8, num_kv_heads=2, intermediate_size=96)
    recurrent = Mamba2Config(
        num_heads=8, head_dim=8, state_size=4, num_groups=1, width=3, norm=NormConfig(eps=1e-5), norm_groups=groups
    )
    return replace(model, layers=(replace(model.layers[0], mixer=recurrent), *model.layers[1:]))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (small_config(num_heads=8, num_kv_heads=2, intermediate_size=96), 8),
        (small_config(num_heads=8, num_kv_heads=2, intermediate_size=100), 4),
        (small_config(num_heads=9, num_kv_heads=3, intermediate_size=96), 3),
        (small_config(num_heads=5, num_kv_heads=1, intermediate_size=96), None),
        (mamba2(8), 8),
        (mamba2(2), 2),
        (mamba2(1), None),
    ],
)
def test_every_shard_is_computed_without_the_others(model: ModelConfig, expected: int | None) -> None:
    assert shards_of(config(deterministic="tp"), model) == expected
    assert shards_of(config(deterministic="batch", tp_size=3), model) is None
    message = (
        "cannot divide this model" if expected is None else f"in {expected} shards, got tp_size 6: choose one of 1, "
    )
    with pytest.raises(ConfigError, match=message):
        shards_of(config(deterministic="tp", tp_size=6), model)
