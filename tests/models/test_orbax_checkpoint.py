"""Orbax checkpoints: exact round trips, and errors that name what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.family_cases import FAMILIES, HYBRIDS, LATENT
from helpers.quick_programs import xla_flags
from helpers.small_configs import small_config
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax.architectures.manifest import Manifest
from sglang_jax.checkpoint import ModelConfig, RopeConfig, RopeKind
from sglang_jax.checkpoint.dummy_reader import DummyReader
from sglang_jax.checkpoint.hf_config import load_hf_config
from sglang_jax.errors import CheckpointError
from sglang_jax.jax_runner.orbax_checkpoint import restore_orbax, save_orbax
from sglang_jax.jax_runner.weights import load_weights
from sglang_jax.layers.sharding import make_mesh
from sglang_jax.models import AttentionImplementation, Transformer, build_model, parameters

ROOT = Path(__file__).parents[2]

FORM: dict[str, Any] = {
    "architecture": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope": RopeConfig(kind=RopeKind.YARN, theta=1e6, factor=4.0, original_max_position=64, mscale=0.7),
    "attention_bias": True,
    "qk_norm": True,
    "eos_token_ids": (1, 2),
}
CONFIG = small_config(**FORM)


def build(config: ModelConfig, dtype: str, platform: str = "cpu") -> Transformer:
    return build_model(config, dtype=jnp.dtype(dtype), attention=AttentionImplementation.XLA, platform=platform)


def loaded(config: ModelConfig, dtype: str) -> Transformer:
    model = build(config, dtype)
    load_weights(model, DummyReader(config, seed=3), config, make_mesh(jax.devices()[:1]))
    return model


def values(model: Transformer) -> dict[str, np.ndarray]:
    return {str(path): np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(nnx.state(model))}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tied", [True, False])
def test_restored_weights_are_bit_exact(tmp_path: Path, dtype: str, tied: bool) -> None:
    config = replace(CONFIG, tie_word_embeddings=tied)
    model = loaded(config, dtype)
    save_orbax(tmp_path / "saved", config, model)
    restored = build(config, dtype)
    restore_orbax(tmp_path / "saved", restored, config, make_mesh(jax.devices()[:1]))
    before, after = values(model), values(restored)
    assert before.keys() == after.keys()
    for name, expected in before.items():
        assert after[name].dtype == expected.dtype
        np.testing.assert_array_equal(after[name], expected, err_msg=name)


def test_restores_for_another_platform_and_dtype(tmp_path: Path) -> None:
    model = loaded(CONFIG, "float32")
    save_orbax(tmp_path, CONFIG, model)
    restored = build(CONFIG, "bfloat16", platform="tpu")
    restore_orbax(tmp_path, restored, CONFIG, make_mesh(jax.devices()[:1]))
    before, after = values(model), values(restored)
    assert before.keys() - after.keys() == {"('head', 'kernel')"}
    for name, array in after.items():
        assert array.dtype == jnp.bfloat16
        np.testing.assert_array_equal(array, before[name].astype(jnp.bfloat16), err_msg=name)


def test_weights_are_placed_by_their_axes(tmp_path: Path) -> None:
    save_orbax(tmp_path, CONFIG, loaded(CONFIG, "float32"))
    restored = build(CONFIG, "float32")
    mesh = make_mesh(jax.devices()[:1])
    restore_orbax(tmp_path, restored, CONFIG, mesh)
    kernel = restored.layers[0].attention.qkv.matrix.kernel.get_value()
    assert kernel.sharding.spec == jax.sharding.PartitionSpec(None, ("tensor", "expert"), None, None)
    assert kernel.sharding.mesh == mesh


_SPREAD = """
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from helpers.small_configs import small_config
from sglang_jax.architectures import NormConfig, QKNorm
from sglang_jax.architectures.kinds.recurrent import Mamba2Config
from sglang_jax.architectures.model_config import SublayerNorms
from sglang_jax.checkpoint.dummy_reader import DummyReader
from sglang_jax.jax_runner.orbax_checkpoint import restore_orbax, save_orbax
from sglang_jax.jax_runner.parallel import TensorParallel
from sglang_jax.jax_runner.weights import load_weights
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.layers.sharding import make_mesh
from sglang_jax.models import AttentionImplementation, build_model

assert len(jax.devices()) == 8
def build(config):
    return build_model(config, dtype=jnp.dtype("float32"), attention=AttentionImplementation.XLA, platform="cpu")

plain = small_config(num_heads=8, num_kv_heads=2, vocab_size=97, attention_bias=True, tie_word_embeddings=False)
norm = QKNorm(norm=NormConfig(eps=1e-5, weight_in_float32=True), whole=True)
whole_norms = plain.with_layers(lambda layer: replace(layer, mixer=replace(layer.mixer, qk_norm=norm)))
# Channels that devices have each a part of: of 7 sections of unlike length, some of them copied.
mamba = Mamba2Config(
    num_heads=8, head_dim=4, state_size=5, num_groups=2, width=4, norm=norm.norm, bias=True, out_bias=True
)
bare = {"mixer": mamba, "feed_forward": None, "feed_forward_norms": SublayerNorms()}
states = replace(plain, architecture="mamba2").with_layers(lambda layer: replace(layer, **bare))
models = ((plain, "plain", (2, 4, 8)), (whole_norms, "whole_norms", (8,)), (states, "states", (2, 4)))
for config, folder, sizes in models:
    reader = DummyReader(config, seed=3)
    whole = build(config)
    load_weights(whole, reader, config, make_mesh(jax.devices()[:1]))
    save_orbax(Path(sys.argv[1], folder), config, whole)
    for size in sizes:
        parallel = TensorParallel.of(config, Parallelism(size))
        mesh = make_mesh(jax.devices()[:size])
        expected, restored = build(parallel.config), build(parallel.config)
        load_weights(expected, reader, config, mesh)
        restore_orbax(Path(sys.argv[1], folder), restored, config, mesh)
        before, after = (nnx.to_flat_state(nnx.state(model)) for model in (expected, restored))
        for (path, wanted), (_, found) in zip(before, after, strict=True):
            wanted, found = wanted.get_value(), found.get_value()
            assert found.sharding.is_equivalent_to(wanted.sharding, wanted.ndim), path
            np.testing.assert_array_equal(found, wanted, err_msg=str(path))
"""


def test_sharded_over_more_devices_than_kv_heads(tmp_path: Path) -> None:
    """Heads are copied and the vocabulary padded in the same way as when the model is loaded from tensors by name."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags("--xla_force_host_platform_device_count=8"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    }
    command = [sys.executable, "-c", _SPREAD, str(tmp_path / "saved")]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert finished.returncode == 0, finished.stderr


def test_other_files_are_copied_with_the_weights(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer.json"
    source.write_text("{}")
    save_orbax(tmp_path / "saved", CONFIG, loaded(CONFIG, "bfloat16"), [source])
    assert (tmp_path / "saved" / "tokenizer.json").read_text() == "{}"


def test_misshapen_missing_and_extra_tensors_are_named(tmp_path: Path) -> None:
    save_orbax(tmp_path, CONFIG, loaded(CONFIG, "bfloat16"))
    other = small_config(**FORM | {"intermediate_size": 64, "attention_out_bias": True, "qk_norm": False})
    with pytest.raises(CheckpointError) as caught:
        restore_orbax(tmp_path, build(other, "bfloat16"), other, make_mesh(jax.devices()[:1]))
    message = str(caught.value)
    assert "misshapen: layers.1.feed_forward.down.kernel is (48, 32), the config requires (64, 32)" in message
    assert "missing: layers.0.attention.output.bias (32,)" in message
    assert "extra: layers.1.attention.key_norm.scale (16,)" in message


def test_does_not_overwrite(tmp_path: Path) -> None:
    model = loaded(CONFIG, "bfloat16")
    save_orbax(tmp_path, CONFIG, model)
    with pytest.raises(CheckpointError, match="exists already"):
        save_orbax(tmp_path, CONFIG, model)


def test_unfinished_conversion(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="weights is missing"):
        restore_orbax(tmp_path, build(CONFIG, "bfloat16"), CONFIG, make_mesh(jax.devices()[:1]))


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "is of format None"),
        ('{"format_version": 99}', "is of format 99, this version reads 1"),
    ],
)
def test_bad_markers(tmp_path: Path, marker: str | None, message: str) -> None:
    (tmp_path / "weights").mkdir()
    if marker is not None:
        (tmp_path / "sglang_jax_orbax.json").write_text(marker)
    with pytest.raises(CheckpointError, match=message):
        restore_orbax(tmp_path, build(CONFIG, "bfloat16"), CONFIG, make_mesh(jax.devices()[:1]))


def test_markers_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """They also held the model's config, which is in config.json next to them."""
    save_orbax(tmp_path, CONFIG, loaded(CONFIG, "bfloat16"))
    path = tmp_path / "sglang_jax_orbax.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_config": {"architecture": "qwen3"}}))
    restore_orbax(tmp_path, build(CONFIG, "bfloat16"), CONFIG, make_mesh(jax.devices()[:1]))


def test_shapes_are_those_of_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model built differently from its config's manifest is an error, and not only when it is loaded."""
    layer = CONFIG.layers[0]
    wider = replace(layer, feed_forward=replace(layer.feed_forward, size=layer.feed_forward.size + 8))
    build(replace(CONFIG, layers=(wider, *CONFIG.layers[1:])), "float32")
    monkeypatch.setattr(parameters, "manifest_of", lambda config: Manifest(CONFIG))
    with pytest.raises(ValueError, match=r"layers\.0\.feed_forward\.down\.kernel is built as .* the manifest has"):
        build(replace(CONFIG, layers=(wider, *CONFIG.layers[1:])), "float32")
    unbiased = CONFIG.with_layers(lambda each: replace(each, mixer=replace(each.mixer, bias=False)))
    with pytest.raises(ValueError, match=r"the model is built without ParameterName\(part=<Part.QUERY"):
        build(unbiased, "float32")


@pytest.mark.parametrize("name", ["qwen3_5", "falcon_h1", "qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_layers_with_states_and_experts_are_restored_bit_exact(name: str, tmp_path: Path) -> None:
    config = load_hf_config(make_tiny_checkpoint(tmp_path / "hf", (FAMILIES | HYBRIDS | LATENT)[name].architecture))
    model, restored = loaded(config, "float32"), build(config, "float32")
    save_orbax(tmp_path / "saved", config, model)
    restore_orbax(tmp_path / "saved", restored, config, make_mesh(jax.devices()[:1]))
    before, after = values(model), values(restored)
    assert before.keys() == after.keys()
    for path, expected in before.items():
        np.testing.assert_array_equal(after[path], expected, err_msg=path)
