"""8-bit matrices that multiply rows rounded to 8 bits, next to float64, and the choice of the steps that round."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.small_configs import small_config
from helpers.tiny_models import make_tiny_checkpoint
from numpy.typing import NDArray

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.checkpoint.encoding import ActivationScales, Encoding
from sglang_jax.checkpoint.quantization import FLOAT8_ROWS, INT4_GROUPS, INT8_ROWS
from sglang_jax.config import EngineConfig
from sglang_jax.errors import ConfigError
from sglang_jax.jax_runner.building import JaxBackend
from sglang_jax.jax_runner.loading import load_rank as load_on_jax
from sglang_jax.jax_runner.rounding import describe_rounding, rounding_of
from sglang_jax.layers.layout import TwoAxisLayout
from sglang_jax.layers.matrix import ScaledMatrix
from sglang_jax.layers.sharding import make_mesh
from sglang_jax.models import AttentionImplementation
from sglang_jax.runner.assembly import open_models
from sglang_jax.runner.protocol import Runner
from torch_backend.loading import load_rank as load_on_torch

INT8_BY_TOKEN = replace(INT8_ROWS, activations=ActivationScales.TOKEN)
BFLOAT16 = jnp.dtype(jnp.bfloat16)
ROWS, HIDDEN = 8, 96


def loaded(encoding: Encoding, seed: int) -> tuple[ScaledMatrix, NDArray[np.float64]]:
    """Gate and up as on a TPU, which round rows in steps of 8 or more, and their weights `[hidden, 2 * inner]`."""
    rng = np.random.default_rng(seed)
    outputs = [(Axis.GATE_OR_UP, 2), (Axis.INTERMEDIATE, 40)]
    matrix = ScaledMatrix(encoding, [(Axis.HIDDEN, HIDDEN)], outputs, (Part.GATE, Part.UP), BFLOAT16, ROWS)
    values = jnp.asarray(rng.integers(-127, 128, (HIDDEN, 2, 40))).astype(encoding.value_type.value)
    scales = jnp.asarray(rng.uniform(0.001, 0.01, (2, 40)), jnp.float32)
    matrix.values.set_value(values)
    matrix.scales.set_value(scales)
    matrix.repack(TwoAxisLayout())
    return matrix, (np.asarray(values, np.float64) * np.asarray(scales, np.float64)).reshape(HIDDEN, -1)


def rows_of(count: int, seed: int) -> jax.Array:
    """Rows of very different sizes, and one of zeros."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.uniform(-6, 6, (count, 1))
    sizes[2] = 0
    return jnp.asarray(rng.standard_normal((count, HIDDEN)) * sizes, BFLOAT16)


@pytest.mark.parametrize(
    ("encoding", "largest", "relative", "absolute"),
    [(INT8_ROWS, 127, 0, 1 / 2), (FLOAT8_ROWS, 448, 2**-4, 2**-10)],
    ids=["int8", "float8"],
)
def test_products_are_as_exact_as_rounding_to_8_bits_of_each_row_allows(
    encoding: Encoding, largest: float, relative: float, absolute: float
) -> None:
    """Next to float64, and next to the product of rows that numpy rounds."""
    matrix, weights = loaded(encoding, seed=0)
    x = rows_of(ROWS, seed=1)
    found = np.asarray(matrix.multiply(x), np.float64).reshape(ROWS, -1)
    exact = np.asarray(x, np.float64)
    steps = np.abs(exact).max(1, keepdims=True) / largest
    most = np.maximum(np.abs(exact) * relative, steps * absolute) @ np.abs(weights)
    assert (np.abs(found - exact @ weights) <= 1.001 * most).all()
    sizes = np.abs(np.asarray(x, np.float32)).max(1, keepdims=True)
    values = np.asarray(x, np.float32) * (np.float32(largest) / np.maximum(sizes, np.float32(1e-30)))
    rounded = (
        np.rint(values).astype(np.float64) if largest == 127 else values.astype(jnp.float8_e4m3fn).astype(np.float64)
    )
    assert (np.abs(found - steps * (rounded @ weights)) <= 1e-3 * most).all()
    assert not (np.abs(found - exact @ weights) <= 1e-3 * most).all()
    fewer = np.asarray(matrix.multiply(x[1:]), np.float64).reshape(ROWS - 1, -1)
    assert (np.abs(fewer - exact[1:] @ weights) <= 1e-3 * most[1:]).all()


def test_a_row_that_is_not_finite_stays_so_and_spares_the_others() -> None:
    matrix, _ = loaded(INT8_ROWS, seed=2)
    x = rows_of(ROWS, seed=3)
    broken = x.at[1, 5].set(jnp.inf).at[4, 7].set(jnp.nan)
    found, expected = (np.asarray(matrix.multiply(each)).reshape(ROWS, -1) for each in (broken, x))
    assert not np.isfinite(found[[1, 4]]).any()
    np.testing.assert_array_equal(np.delete(found, [1, 4], 0), np.delete(expected, [1, 4], 0))


def options(**given: Any) -> EngineConfig:
    return EngineConfig.model_validate({"model_path": "demo"} | given)


def rows_by(kind: str, dtype: Any = BFLOAT16, **given: Any) -> list[int | None]:
    """The minimum rows for int8 of a checkpoint that leaves activations, int8 of one that rounds them, and float8."""
    device: Any = SimpleNamespace(platform="cpu" if kind == "cpu" else "tpu", device_kind=kind)
    rounding = rounding_of(options(**given), device, jnp.dtype(dtype))
    assert rounding(INT4_GROUPS) is None
    return [rounding(each) for each in (INT8_ROWS, INT8_BY_TOKEN, FLOAT8_ROWS)]


def test_steps_round_where_the_checkpoint_does_and_the_chip_is_faster() -> None:
    never = [None, None, None]
    assert rows_by("TPU v6 lite") == [None, 512, None]
    assert rows_by("TPU7x") == [None, None, 512]
    assert rows_by("TPU v6 lite", tpu_activations="rounded") == [512, 512, None]
    assert rows_by("TPU v6 lite", tpu_activations="exact") == never
    assert rows_by("TPU v4") == rows_by("cpu") == rows_by("TPU v99") == never
    assert rows_by("TPU v6 lite", jnp.float32) == never
    assert rows_by("TPU v6 lite", enable_deterministic_inference=True) == never
    assert rows_by("TPU v6 lite", deterministic="tp") == never
    with pytest.raises(ConfigError, match="needs dtype bfloat16, got float32"):
        rows_by("TPU v6 lite", jnp.float32, tpu_activations="rounded")


def test_the_log_names_what_rounds_and_a_model_without_such_matrices_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device: Any = SimpleNamespace(platform="tpu", device_kind="TPU v6 lite")
    auto, asked = options(), options(tpu_activations="rounded")
    model = small_config()
    with caplog.at_level(logging.INFO):
        describe_rounding(auto, model, lambda name: INT8_BY_TOKEN, rounding_of(auto, device, BFLOAT16))
        describe_rounding(auto, model, lambda name: INT8_ROWS, rounding_of(auto, device, BFLOAT16))
    assert caplog.messages == ["Steps of 512 tokens or more round activations to int8 for matrices of it"]
    with pytest.raises(ConfigError, match=r"no matrices .* \(int8 on v6e, float8_e4m3fn on tpu7x\): choose auto"):
        describe_rounding(asked, model, lambda name: FLOAT8_ROWS, rounding_of(asked, device, BFLOAT16))


def test_the_matrices_of_a_model_know_which_steps_round(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3")
    device: Any = SimpleNamespace(platform="tpu", device_kind="TPU7x")
    mesh = make_mesh(jax.devices()[:1])

    def found(**given: Any) -> set[int | None]:
        config = options(model_path=str(tmp_path), dtype="bfloat16", quantization="fp8", **given)
        models = open_models(config, open_checkpoint(str(tmp_path)))
        backend = JaxBackend(config, [device], mesh, BFLOAT16, AttentionImplementation.XLA, None)
        modules = [module for _, module in nnx.iter_modules(backend.build(models).model)]
        return {module.min_rounded_rows for module in modules if isinstance(module, ScaledMatrix)}

    assert found() == {512}
    assert found(tpu_activations="exact") == {None}


@pytest.mark.parametrize("load", [load_on_jax, load_on_torch])
def test_other_devices_refuse_the_option(load: Callable[..., Runner], tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3")
    config = options(model_path=str(tmp_path), tpu_activations="rounded", device="cpu")
    with pytest.raises(ConfigError, match="tpu_activations rounded needs a TPU, the device is a cpu: choose auto"):
        load(config, open_checkpoint(str(tmp_path)))
