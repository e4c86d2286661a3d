"""Scales for int8 that are calibrated on the model, against transformers, on one device and on several."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.calibration import calibrated
from helpers.kv_scale_checkpoints import (
    KV_HEADS,
    LAYERS,
    add_tensors,
    make_uneven_checkpoint,
    scale_tensors,
)
from helpers.quick_programs import xla_flags
from helpers.tiny_models import make_tiny_checkpoint, make_tiny_model
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from sglang_jax.errors import ConfigError
from sglang_jax.jax_runner.kv_scales import LENGTH, MARGIN, ROWS, calibration_batch

ROOT = Path(__file__).parents[2]
VOCABULARY = 384


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_uneven_checkpoint(tmp_path_factory.mktemp("uneven"))


@torch.inference_mode()
def largest_in_transformers(folder: Path) -> NDArray[np.float32]:
    """`[layers, kv_heads, 2]`: the longest pair of a key, before its rotation, and the largest value."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    projected: dict[str, torch.Tensor] = {}
    for layer in range(LAYERS):
        for name in ("k_proj", "v_proj"):
            module = getattr(model.model.layers[layer].self_attn, name)
            module.register_forward_hook(
                lambda _, __, out, name=f"{layer}{name}": projected.update({name: out.unflatten(-1, (KV_HEADS, -1))})
            )
    model(torch.from_numpy(calibration_batch(VOCABULARY, LENGTH, 16, 1).tokens.reshape(ROWS, LENGTH)).long())
    found = np.empty((LAYERS, KV_HEADS, 2), np.float32)
    for layer in range(LAYERS):
        keys = projected[f"{layer}k_proj"].unflatten(-1, (2, -1))
        found[layer, :, 0] = keys.norm(dim=-2).amax((0, 1, 3))
        found[layer, :, 1] = projected[f"{layer}v_proj"].abs().amax((0, 1, 3))
    return found


@pytest.mark.parametrize(("family", "rotated"), [("falcon_h1", 16), ("qwen3_5_text", 8)])
def test_scales_of_a_model_with_states_fit_the_keys_and_values_that_transformers_caches(
    family: str, rotated: int, tmp_path: Path
) -> None:
    """For heads with a partial rotation the rest counts by itself."""
    folder = make_tiny_checkpoint(tmp_path, family)
    tokens = torch.from_numpy(calibration_batch(VOCABULARY, LENGTH, 16, 1).tokens.reshape(ROWS, LENGTH)).long()
    with torch.inference_mode():
        layers = make_tiny_model(family)(tokens, use_cache=True).past_key_values.layers
    expected = []
    for layer in layers:
        keys = getattr(layer, "keys", None)
        if keys is not None:
            first, second, rest = keys.tensor_split((rotated // 2, rotated), dim=-1)
            lengths = torch.cat((torch.hypot(first, second), rest.abs()), dim=-1)
            expected.append(torch.stack([part.amax((0, 2, 3)) for part in (lengths, layer.values.abs())], dim=1))
    found = calibrated(folder)
    assert len(found) == len(expected)
    np.testing.assert_allclose(found, torch.stack(expected) * (MARGIN / 127), rtol=1e-4)


@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_scales_fit_the_largest_keys_and_values(folder: Path, page_size: int) -> None:
    """Keys are compared before their rotation, which keeps the length of each pair."""
    expected = largest_in_transformers(folder) * (MARGIN / 127)
    np.testing.assert_allclose(calibrated(folder, page_size=page_size), expected, rtol=1e-5)


def test_bfloat16_gives_nearly_the_same_scales(folder: Path) -> None:
    np.testing.assert_allclose(calibrated(folder, dtype="bfloat16"), calibrated(folder), rtol=0.05)


def test_a_head_of_zeros_has_a_scale_other_than_zero(folder: Path) -> None:
    zeros = ("model.layers.1.self_attn.v_proj.weight", slice(8, 16), 0.0)
    found, before = calibrated(folder, change=zeros), calibrated(folder)
    assert found[1, 1, 1] == 1.0
    before[1, 1, 1] = 1.0
    np.testing.assert_allclose(found, before, rtol=1e-5)


def test_keys_that_are_not_finite_are_an_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="those of layers 1 are not finite"):
        calibrated(folder, change=("model.layers.1.self_attn.k_proj.weight", slice(3, 4), np.inf))


_PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from helpers.plan_driver import PlanDriver
from helpers.calibration import calibrated
from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.config import EngineConfig
from sglang_jax.jax_runner import create_runner

plain, scaled = map(Path, sys.argv[1:])
tokens = np.random.default_rng(2).integers(3, 380, 49).tolist()

def generated(folder, tp_size):
    config = EngineConfig(
        model_path=str(folder), backend="jax", device="cpu", dtype="float32", kv_cache_dtype="int8", tp_size=tp_size,
        max_total_tokens=128, max_running_requests=1, chunked_prefill_size=32, skip_warmup=True,
    )
    runner = create_runner(config, open_checkpoint(config.model_path))
    driver = PlanDriver(runner)
    return driver.generate(driver.admit(tokens), 12, chunk=32)

alone, expected = calibrated(plain), generated(scaled, 1)
np.testing.assert_allclose(calibrated(plain, 2), alone, rtol=1e-5)
for devices in (2, 8):
    assert generated(scaled, devices) == expected, devices
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_and_eight_devices_give_the_same_as_one(folder: Path, tmp_path: Path) -> None:
    """With calibrated scales, and with a checkpoint's of another type; of eight devices two have each kv head."""
    scaled = tmp_path / "scaled"
    shutil.copytree(folder, scaled)
    scheme = {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False}
    add_tensors(scaled, scale_tensors(calibrated(folder) * np.float32(127 / 448)), scheme=scheme)
    paths = [str(ROOT), str(ROOT / "tests")]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags("--xla_force_host_platform_device_count=8"),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    finished = subprocess.run(
        [sys.executable, "-c", _PROGRAM, folder, scaled],
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
