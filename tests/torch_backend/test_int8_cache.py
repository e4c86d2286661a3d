"""A runner whose keys, or keys and values, are kept in int8, against transformers on the same checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.kv_scale_checkpoints import add_tensors
from helpers.plan_driver import PlanDriver
from helpers.tiny_models import make_tiny_checkpoint
from transformers import AutoModelForCausalLM

from sglang_jax.architectures.tensor_names import ParameterKind
from sglang_jax.checkpoint.opening import open_checkpoint
from sglang_jax.config import AttentionBackend, Device, Dtype, EngineConfig, KVCacheDtype
from sglang_jax.errors import CheckpointError, ConfigError
from sglang_jax.runner.kv_scales import LENGTH, ROWS, calibration_tokens
from sglang_jax.runner.plan import PromptLogprobs
from torch_backend import building, create_runner, loading
from torch_backend.key_means import calibration_batch
from torch_backend.kv_pages import LayerMemory

PROMPT = np.random.default_rng(2).integers(3, 380, 60).tolist()
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 32
SAGE = {"attention_backend": AttentionBackend.SAGE}
INT8 = {"kv_cache_dtype": KVCacheDtype.INT8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")


def options(folder: Path, **changes: object) -> EngineConfig:
    values: dict[str, object] = {
        "model_path": str(folder),
        "device": Device.CPU,
        "dtype": Dtype.FLOAT32,
        "max_total_tokens": 640,
        "max_running_requests": 2,
        "chunked_prefill_size": 16,
    }
    return EngineConfig.model_validate(values | changes)


@pytest.mark.parametrize(
    ("changes", "name", "attention", "sizes"),
    [
        (SAGE, "int8 keys, float32 values", "sage", HEAD_DIM + 4 + 4 * HEAD_DIM),
        (INT8, "int8", "numba", 2 * (HEAD_DIM + 4)),
        (SAGE | INT8, "int8", "sage", 2 * (HEAD_DIM + 4)),
        (INT8 | {"attention_backend": AttentionBackend.REFERENCE}, "int8", "reference", 2 * (HEAD_DIM + 4)),
    ],
    ids=lambda value: "",
)
def test_logprobs_are_close_to_transformers(
    folder: Path, changes: dict[str, object], name: str, attention: str, sizes: int
) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logprobs = torch.log_softmax(oracle(torch.tensor([PROMPT])).logits[0], -1).numpy()
    config = options(folder, **changes)
    runner = create_runner(config, open_checkpoint(config.model_path, config.load_format, seed=0))
    report = runner.report()
    assert report.details["kv_cache_dtype"] == name
    assert report.details["attention"] == attention
    assert report.kv_bytes == 41 * 16 * LAYERS * KV_HEADS * sizes
    driver = PlanDriver(runner)
    request = driver.admit(PROMPT)
    for first in range(0, 48, 16):
        wanted = PromptLogprobs(0, 0, np.array(PROMPT[first + 1 : first + 17], np.int32))
        driver.step([(request, 16)], prompt_logprobs=[wanted])
    found = np.concatenate([part.logprobs for part in request.prompt_logprobs])
    expected = logprobs[np.arange(48), PROMPT[1:49]]
    differences = np.abs(found - expected)  # for logprobs between -14 and -5
    assert differences.mean() < 0.025
    assert differences.max() < 0.12
    assert differences.mean() > 1e-4, "keys are in 8 bits"
    runner.close()


def test_the_mean_covers_keys_of_the_whole_context(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As rotated by transformers: sequences whose starts are evenly spread over the possible positions."""
    kept: list[LayerMemory] = []
    give = loading.give_key_means

    def give_and_keep(forward: object, kv: list[LayerMemory], *rest: object, **named: object) -> None:
        give(forward, kv, *rest, **named)
        kept.extend(kv)

    monkeypatch.setattr(loading, "give_key_means", give_and_keep)
    config = options(folder, context_length=400, **SAGE)
    create_runner(config, open_checkpoint(config.model_path, config.load_format, seed=0)).close()
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    begins = torch.linspace(0, 400 - LENGTH, ROWS).long()
    tokens = torch.from_numpy(calibration_tokens(384)).long()
    with torch.no_grad():
        cache = oracle(tokens, position_ids=begins[:, None] + torch.arange(LENGTH), use_cache=True).past_key_values
    for layer, memory in zip(cache.layers, kept, strict=True):
        assert memory.pages is not None
        assert memory.pages.token_scales is not None
        torch.testing.assert_close(memory.pages.token_scales.key_mean, layer.keys.mean((0, 2)), rtol=1e-4, atol=1e-5)


def test_a_context_shorter_than_a_calibration_sequence(folder: Path) -> None:
    config = options(folder, context_length=24)
    checkpoint = open_checkpoint(config.model_path, config.load_format, seed=0)
    batch = calibration_batch(checkpoint.config, 16, 24, torch.device("cpu"))
    assert batch.kv_lens.tolist() == [24] * ROWS
    assert int(batch.positions.max()) == 23
    assert len(set(batch.write_slots.tolist())) == 24 * ROWS


def test_keys_that_are_not_finite_are_named_by_layer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = building.load_weights

    def load_and_break(model: torch.nn.Module, *rest: object, **named: object) -> None:
        load(model, *rest, **named)
        for name, parameter in model.named_parameters():
            if "layers.1" in name and "norm" in name:
                parameter.data.fill_(torch.nan)

    monkeypatch.setattr(building, "load_weights", load_and_break)
    config = options(folder, **SAGE)
    with pytest.raises(ConfigError, match=r"mean of keys cannot be calibrated: those of layers 1 are not finite"):
        create_runner(config, open_checkpoint(config.model_path, config.load_format, seed=0))


def test_float8_keys_and_sage_do_not_go_together(folder: Path) -> None:
    config = options(folder, kv_cache_dtype=KVCacheDtype.FLOAT8_E4M3, **SAGE)
    with pytest.raises(ConfigError, match="sage stores keys in int8: kv_cache_dtype must be auto or int8"):
        create_runner(config, open_checkpoint(config.model_path, config.load_format, seed=0))


def test_the_log_says_that_the_checkpoints_scales_are_unused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        config = options(folder, **INT8)
        create_runner(config, open_checkpoint(config.model_path, config.load_format, seed=0)).close()
    assert any("with one scale per token" in message for message in caplog.messages)


def test_means_of_the_checkpoint_replace_calibrated_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Means that a first start calibrated, written into the file: a second start serves the same without
    calibration. With other means only the rounding of keys differs."""
    folder = make_tiny_checkpoint(tmp_path, "qwen3")
    calibrated, kept = loading.give_key_means, []

    def give_and_keep(forward: object, kv: list[LayerMemory], *rest: object, **named: object) -> None:
        calibrated(forward, kv, *rest, **named)
        kept.extend(layer.pages.token_scales.key_mean.numpy() for layer in kv)

    monkeypatch.setattr(loading, "give_key_means", give_and_keep)
    own = logprobs_of(folder)
    monkeypatch.setattr(loading, "give_key_means", None)  # must not be called
    means = {f"model.layers.{layer}.self_attn.k_mean": mean for layer, mean in enumerate(kept)}
    add_tensors(folder, means)
    with caplog.at_level(logging.INFO):
        assert np.array_equal(logprobs_of(folder), own)
    assert "Using the checkpoint's means of keys" in caplog.messages
    add_tensors(folder, {name: mean + 0.5 for name, mean in means.items()})
    other = logprobs_of(folder)
    assert not np.array_equal(other, own)
    assert np.abs(other - own).max() < 0.12


def logprobs_of(folder: Path) -> np.ndarray:
    config = options(folder, **SAGE)
    runner = create_runner(config, open_checkpoint(config.model_path, config.load_format, seed=0))
    driver = PlanDriver(runner)
    request = driver.admit(PROMPT[:17])
    driver.step([(request, 16)], prompt_logprobs=[PromptLogprobs(0, 0, np.array(PROMPT[1:17], np.int32))])
    runner.close()
    return np.concatenate([part.logprobs for part in request.prompt_logprobs])


@pytest.mark.parametrize(
    ("shape", "layers", "told"),
    [
        ((KV_HEADS, HEAD_DIM), (0,), r"missing: model.layers.1.self_attn.k_mean \(other means of keys are present\)"),
        ((KV_HEADS,), (0, 1), r"misshapen: model.layers.0.self_attn.k_mean is \(2,\), it must be \(2, 32\)"),
    ],
)
def test_means_of_a_wrong_shape_are_named(
    shape: tuple[int, ...], layers: tuple[int, ...], told: str, tmp_path: Path
) -> None:
    folder = make_tiny_checkpoint(tmp_path, "qwen3")
    add_tensors(folder, {f"model.layers.{layer}.self_attn.k_mean": np.zeros(shape, np.float32) for layer in layers})
    with pytest.raises(CheckpointError, match=told):
        open_checkpoint(str(folder))


def test_means_that_are_not_finite_are_named(tmp_path: Path) -> None:
    folder, mean = make_tiny_checkpoint(tmp_path, "qwen3"), np.zeros((KV_HEADS, HEAD_DIM), np.float32)
    broken = np.full_like(mean, np.nan)
    add_tensors(folder, {"model.layers.0.self_attn.k_mean": mean, "model.layers.1.self_attn.k_mean": broken})
    with pytest.raises(CheckpointError, match=r"must be finite; these are not:\n  .*layers.1.self_attn.k_mean: nan$"):
        logprobs_of(folder)


def test_the_jax_backend_ignores_means(tmp_path: Path) -> None:
    """Its int8 has one scale per head and no mean."""
    folder, mean = make_tiny_checkpoint(tmp_path, "qwen3"), np.zeros((KV_HEADS, HEAD_DIM), np.float32)
    add_tensors(folder, {f"model.layers.{layer}.self_attn.k_mean": mean for layer in range(LAYERS)})
    checkpoint = open_checkpoint(str(folder))
    assert not checkpoint.kv_parameters().has(ParameterKind.SCALE)
