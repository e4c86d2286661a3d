"""Scales of keys and values in checkpoints: every spelling and shape, and errors that name the fault."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers.kv_scale_checkpoints import add_tensors, kv_scales_of
from helpers.tiny_models import make_tiny_checkpoint
from numpy.typing import NDArray

from sglang_jax.architectures.tensor_names import ParameterKind
from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.config import KVCacheDtype, LoadFormat
from sglang_jax.errors import CheckpointError
from sglang_jax.runner.kv_scales import kv_scale_factor

LAYERS, KV_HEADS = 2, 4
FLOAT8, INT8 = KVCacheDtype.FLOAT8_E4M3, KVCacheDtype.INT8
SCHEME = {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False, "strategy": "tensor"}
NUMBERS = np.random.default_rng(0).uniform(0.01, 2.0, (LAYERS, KV_HEADS, 2)).astype(np.float32)

Tensors = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"num_attention_heads": 8, "num_key_value_heads": KV_HEADS}
    return make_tiny_checkpoint(tmp_path_factory.mktemp("plain"), "llama", **heads)


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "model"))


def named(keys: str, values: str, numbers: NDArray[Any] = NUMBERS, shape: tuple[int, ...] = (KV_HEADS,)) -> Tensors:
    """Tensors of all layers named as in one layer; a shape of one number takes the first head's."""
    count = int(np.prod(shape))
    return {
        f"model.layers.{layer}.{name}": numbers[layer, :count, side].reshape(shape)
        for layer in range(LAYERS)
        for side, name in enumerate((keys, values))
    }


def read(folder: Path, dtype: KVCacheDtype = FLOAT8) -> NDArray[np.float32]:
    """The scales that the cache gets: the checkpoint's numbers times the factor."""
    checkpoint = open_checkpoint(str(folder))
    factor = kv_scale_factor(checkpoint, dtype)
    assert factor is not None
    found = kv_scales_of(checkpoint)
    assert found.dtype == np.float32
    return found * np.float32(factor)


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale"),
        ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    ],
)
def test_every_spelling_is_read(folder: Path, keys: str, values: str) -> None:
    beside = {"model.layers.1.self_attn.q_scale": np.float32([3.0]), "model.layers.0.self_attn.prob_output_scale": 1}
    add_tensors(folder, named(keys, values) | {name: np.float32(value) for name, value in beside.items()})
    np.testing.assert_array_equal(read(folder), NUMBERS)


@pytest.mark.parametrize("name", ["self_attn.kv_scale", "self_attn.attn.kv_scale"])
def test_one_scale_for_both_sides(folder: Path, name: str) -> None:
    add_tensors(folder, {f"model.layers.{layer}.{name}": NUMBERS[layer, :1, 0] for layer in range(LAYERS)})
    np.testing.assert_array_equal(read(folder), np.broadcast_to(NUMBERS[:, :1, :1], NUMBERS.shape))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (KV_HEADS,), (KV_HEADS, 1, 1), (1, KV_HEADS, 1)])
def test_one_number_or_one_for_each_kv_head(folder: Path, shape: tuple[int, ...]) -> None:
    add_tensors(folder, named("self_attn.k_scale", "self_attn.v_scale", shape=shape))
    expected = NUMBERS if KV_HEADS in shape else np.broadcast_to(NUMBERS[:, :1], NUMBERS.shape)
    np.testing.assert_array_equal(read(folder), expected)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_scales_in_half_precision_are_read(folder: Path, dtype: Any) -> None:
    numbers = NUMBERS.astype(dtype)
    add_tensors(folder, named("self_attn.k_scale", "self_attn.v_scale", numbers=numbers))
    np.testing.assert_array_equal(read(folder), numbers.astype(np.float32))


def test_scales_made_for_another_type_cover_the_same_range(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    add_tensors(folder, named("self_attn.k_scale", "self_attn.v_scale"), scheme=SCHEME)
    np.testing.assert_array_equal(read(folder), NUMBERS)
    with caplog.at_level(logging.INFO):
        np.testing.assert_allclose(read(folder, INT8) * 127, NUMBERS * 448, rtol=1e-6)
    assert [record.message for record in caplog.records] == [
        "Keys and values are stored in int8: the checkpoint's scales, for fp8_e4m3, are converted to cover "
        "the same range"
    ]
    add_tensors(folder, {}, scheme=SCHEME | {"type": "int"})
    np.testing.assert_array_equal(read(folder, INT8), NUMBERS)
    np.testing.assert_allclose(read(folder) * 448, NUMBERS * 127, rtol=1e-6)


def test_scales_of_an_unstated_type_are_taken_for_the_cache_type(folder: Path) -> None:
    add_tensors(folder, named("self_attn.k_scale", "self_attn.v_scale"))
    np.testing.assert_array_equal(read(folder), read(folder, INT8))


def test_the_log_says_once_how_scales_are_used(folder: Path, plain: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert kv_scale_factor(open_checkpoint(str(plain)), KVCacheDtype.AUTO) is None
    assert kv_scale_factor(open_checkpoint(str(plain)), INT8) is None
    assert caplog.messages == []
    assert kv_scale_factor(open_checkpoint(str(plain)), FLOAT8) is None
    # unusable numbers do not matter to a cache without scales
    add_tensors(folder, named("self_attn.k_scale", "self_attn.v_scale", numbers=np.zeros_like(NUMBERS)))
    assert kv_scale_factor(open_checkpoint(str(folder)), KVCacheDtype.AUTO) is None
    add_tensors(folder, named("self_attn.k_scale", "self_attn.v_scale"))
    read(folder)
    assert caplog.messages == [
        "Keys and values are stored in fp8_e4m3 with a scale of 1: the checkpoint has no scales",
        "The checkpoint's KV scales are not used: the KV cache is not 8-bit",
        "Keys and values are stored in fp8_e4m3 with the checkpoint's scales",
    ]


def test_random_weights_have_no_scales(folder: Path) -> None:
    add_tensors(folder, named("self_attn.k_scale", "self_attn.v_scale"))
    checkpoint = open_checkpoint(str(folder), LoadFormat.DUMMY)
    assert not checkpoint.kv_parameters().has(ParameterKind.SCALE)
    assert (kv_scales_of(checkpoint) == 1).all()


def faults_of(folder: Path) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(folder))
    return str(caught.value).splitlines()[1:]


def test_layers_and_sides_without_a_scale_are_named(folder: Path) -> None:
    tensors = named("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale")
    del tensors["model.layers.1.self_attn.k_proj.output_scale"], tensors["model.layers.0.self_attn.v_proj.output_scale"]
    add_tensors(folder, tensors)
    there = "(other scales of keys and values are present)"
    assert faults_of(folder) == [
        f"  missing: model.layers.0.self_attn.v_proj.output_scale {there}",
        f"  missing: model.layers.1.self_attn.k_proj.output_scale {there}",
    ]


def test_scales_of_unknown_layers_and_duplicates_are_refused(folder: Path) -> None:
    tensors = named("self_attn.k_scale", "self_attn.v_scale")
    tensors["model.layers.2.self_attn.k_scale"] = np.float32([1.0])
    tensors["model.layers.0.self_attn.k_zero_point"] = np.float32([0.0])
    tensors["model.layers.1.self_attn.v_proj.output_scale"] = np.float32([1.0])
    add_tensors(folder, tensors)
    assert faults_of(folder) == [
        "  extra: model.layers.0.self_attn.k_zero_point (1,)",
        "  extra: model.layers.2.self_attn.k_scale (1,)",
        "  extra: model.layers.1.self_attn.v_proj.output_scale and model.layers.1.self_attn.v_scale are scales of the "
        "same values",
    ]


def test_misshapen_scales_are_named(folder: Path) -> None:
    tensors = named("self_attn.k_scale", "self_attn.v_scale")
    tensors["model.layers.0.self_attn.k_scale"] = np.ones(8, np.float32)  # the number of query heads
    tensors["model.layers.1.self_attn.v_scale"] = np.ones((KV_HEADS, KV_HEADS), np.float32)
    add_tensors(folder, tensors)
    wanted = "it must be one number, or one for each of 4 kv heads"
    assert faults_of(folder) == [
        f"  misshapen: model.layers.0.self_attn.k_scale is (8,), {wanted}",
        f"  misshapen: model.layers.1.self_attn.v_scale is (4, 4), {wanted}",
    ]


def test_invalid_scales_are_named(folder: Path) -> None:
    tensors = named("self_attn.k_scale", "self_attn.v_scale", numbers=NUMBERS.copy())
    tensors["model.layers.0.self_attn.k_scale"][1] = 0.0
    tensors["model.layers.0.self_attn.v_scale"][2] = -2.0
    tensors["model.layers.1.self_attn.k_scale"][[0, 3]] = np.nan, np.inf
    # devices flush it to 0
    tensors["model.layers.1.self_attn.v_scale"][0] = 1e-40
    add_tensors(folder, tensors)
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    assert str(caught.value).splitlines() == [
        "scales of keys and values must be positive and finite; these are not:",
        "  model.layers.0.self_attn.k_scale: 0",
        "  model.layers.0.self_attn.v_scale: -2",
        "  model.layers.1.self_attn.k_scale: nan, inf",
        "  model.layers.1.self_attn.v_scale: 9.99995e-41",
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_bits": 4}, "type 'float' of 4 bits"),
        ({"type": "int", "symmetric": False}, "symmetric False"),
        ({"dynamic": True}, "dynamic True"),
        ({"dynamic": "local"}, "quantization_config.kv_cache_scheme.dynamic is 'local'"),
    ],
)
def test_unsupported_kv_cache_schemes_are_refused(folder: Path, change: dict[str, object], words: str) -> None:
    add_tensors(folder, named("self_attn.k_scale", "self_attn.v_scale"), scheme=SCHEME | change)
    assert open_checkpoint(str(folder)).kv_parameters().has(ParameterKind.SCALE)
    with pytest.raises(CheckpointError, match=words):
        read(folder)


def test_quantised_weights_are_still_refused(folder: Path) -> None:
    add_tensors(folder, {}, scheme=SCHEME)
    config = folder / "config.json"
    whole = config.read_text()
    group = '"config_groups": {"group_0": {"targets": ["Linear"], "weights": %s}}'
    config.write_text(whole.replace('"config_groups": {}', group % "null"))
    open_checkpoint(str(folder))
    config.write_text(whole.replace('"config_groups": {}', group % '{"num_bits": 8}'))
    with pytest.raises(CheckpointError, match="format 'dense' of quantised weights is not supported"):
        open_checkpoint(str(folder))
