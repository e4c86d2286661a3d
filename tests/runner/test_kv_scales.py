"""8-bit caches with a checkpoint's scales, on both backends, against transformers with keys and values rounded in the
same way."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import kv_scale_checkpoints as oracle
from helpers.kv_scale_checkpoints import add_tensors, fitting_scales, logits_with, make_uneven_checkpoint, scale_tensors
from helpers.plan_driver import PlanDriver
from numpy.typing import NDArray

from sglang_jax import Engine, SamplingParams
from sglang_jax.checkpoint.opening import open_checkpoint
from sglang_jax.config import Backend, EngineConfig
from sglang_jax.errors import CheckpointError
from sglang_jax.jax_runner import create_runner as create_jax_runner
from sglang_jax.runner.plan import PromptLogprobs
from torch_backend import create_runner as create_torch_runner

pytestmark = pytest.mark.slow

TOKENS = np.random.default_rng(2).integers(3, 380, 49).tolist()
CREATE = {Backend.JAX: create_jax_runner, Backend.TORCH: create_torch_runner}
ROUNDED = {"fp8_e4m3": oracle.round_to_float8, "int8": oracle.round_to_int8}
WORST = {"fp8_e4m3": oracle.worst_float8, "int8": oracle.worst_int8}
CASES = [(Backend.JAX, "fp8_e4m3"), (Backend.JAX, "int8"), (Backend.TORCH, "fp8_e4m3")]

Logprobs = NDArray[np.float64]
"""Of each token of `TOKENS` after those before it."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """kv heads that differ by factors of up to 1000, without scales."""
    return make_uneven_checkpoint(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def exact(plain: Path) -> Logprobs:
    """From a cache that does not round."""
    return of_tokens(logits_with(plain, TOKENS, np.ones((2, 4, 2), np.float32)))


@pytest.fixture(scope="module")
def scales(plain: Path) -> dict[str, NDArray[np.float32]]:
    return {dtype: fitting_scales(plain, TOKENS, dtype) for dtype in ROUNDED}


@pytest.fixture(scope="module")
def bounds(plain: Path, exact: Logprobs, scales: dict[str, NDArray[np.float32]]) -> dict[str, float]:
    """How far logprobs are off if every key and value is wrong by half a step, the most that rounding does."""
    return {
        dtype: distance(of_tokens(logits_with(plain, TOKENS, scales[dtype], change)), exact)
        for dtype, change in WORST.items()
    }


@pytest.fixture(scope="module")
def folders(
    plain: Path, tmp_path_factory: pytest.TempPathFactory, scales: dict[str, NDArray[np.float32]]
) -> dict[str, Path]:
    """Checkpoints with scales of each dtype."""
    root = tmp_path_factory.mktemp("scaled")
    return {dtype: with_scales(plain, root / dtype, found) for dtype, found in scales.items()}


def of_tokens(logprobs: NDArray[np.float64]) -> Logprobs:
    return logprobs[np.arange(len(TOKENS) - 1), TOKENS[1:]]


def with_scales(plain: Path, folder: Path, scales: NDArray[np.float32]) -> Path:
    return add_tensors(Path(shutil.copytree(plain, folder)), scale_tensors(scales))


def options(backend: Backend, folder: Path, kv_cache_dtype: str, **changes: object) -> EngineConfig:
    values: dict[str, object] = {
        "model_path": str(folder),
        "backend": backend,
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_dtype": kv_cache_dtype,
        "max_total_tokens": 128,
        "max_running_requests": 1,
        "chunked_prefill_size": 32,
        "skip_warmup": True,
    }
    return EngineConfig.model_validate(values | changes)


def logprobs_of(backend: Backend, folder: Path, kv_cache_dtype: str) -> Logprobs:
    """In two chunks, so that the second reads the KV of the first."""
    config = options(backend, folder, kv_cache_dtype)
    runner = CREATE[backend](config, open_checkpoint(config.model_path))
    try:
        driver = PlanDriver(runner)
        request = driver.admit(TOKENS)
        for first, count in ((0, 32), (32, len(TOKENS) - 32)):
            targets = np.array(TOKENS[first + 1 : first + count + 1], np.int32)
            driver.step([(request, count)], prompt_logprobs=[PromptLogprobs(0, 0, targets)])
        return np.concatenate([found.logprobs for found in request.prompt_logprobs]).astype(np.float64)
    finally:
        runner.close()


def distance(found: Logprobs, expected: Logprobs) -> float:
    """Root of the mean square."""
    return float(np.sqrt(np.mean((found - expected) ** 2)))


@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_logprobs_are_those_of_keys_and_values_rounded_by_these_scales(
    plain: Path,
    folders: dict[str, Path],
    scales: dict[str, NDArray[np.float32]],
    bounds: dict[str, float],
    exact: Logprobs,
    backend: Backend,
    dtype: str,
) -> None:
    assert (scales[dtype].max(1) / scales[dtype].min(1)).min() > 100
    found = logprobs_of(backend, folders[dtype], dtype)
    rounded = of_tokens(logits_with(plain, TOKENS, scales[dtype], ROUNDED[dtype]))
    # A key or value at the border of two steps may go to either: one in some ten thousand, by one step.
    assert distance(found, rounded) < 0.02 * bounds[dtype]
    assert 0.1 * bounds[dtype] < distance(found, exact) < bounds[dtype]


@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_the_order_of_heads_matters(
    plain: Path,
    tmp_path: Path,
    scales: dict[str, NDArray[np.float32]],
    bounds: dict[str, float],
    exact: Logprobs,
    backend: Backend,
    dtype: str,
) -> None:
    """Scales of other heads exceed the bound above."""
    folder = with_scales(plain, tmp_path / "model", scales[dtype][:, ::-1])
    assert distance(logprobs_of(backend, folder, dtype), exact) > 3 * bounds[dtype]


@pytest.mark.parametrize("backend", CREATE)
def test_scales_change_nothing_where_the_cache_does_not_have_8_bits(
    folders: dict[str, Path], exact: Logprobs, backend: Backend
) -> None:
    assert logprobs_of(backend, folders["fp8_e4m3"], "auto") == pytest.approx(exact, abs=2e-4)


@pytest.mark.parametrize(
    ("backend", "dtype", "tp_size"), [(*case, 1) for case in CASES] + [(Backend.TORCH, "fp8_e4m3", 2)]
)
def test_an_engine_uses_the_scales(
    plain: Path,
    folders: dict[str, Path],
    scales: dict[str, NDArray[np.float32]],
    bounds: dict[str, float],
    backend: Backend,
    dtype: str,
    tp_size: int,
) -> None:
    with Engine(config=options(backend, folders[dtype], dtype, tp_size=tp_size)) as engine:
        output = engine.generate(TOKENS, SamplingParams(max_new_tokens=1), return_logprob=True, logprob_start_len=0)
    assert output.prompt_logprobs is not None
    found = np.array([token.logprob for token in output.prompt_logprobs[1:]])
    rounded = of_tokens(logits_with(plain, TOKENS, scales[dtype], ROUNDED[dtype]))
    assert distance(found, rounded) < 0.02 * bounds[dtype]


@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_numbers_that_cannot_be_scales_are_refused(
    plain: Path, tmp_path: Path, scales: dict[str, NDArray[np.float32]], backend: Backend, dtype: str
) -> None:
    broken = scales[dtype].copy()
    broken[1, 2, 0] = np.nan
    folder = with_scales(plain, tmp_path / "model", broken)
    with pytest.raises(CheckpointError, match=r"positive and finite.*\n  model\.layers\.1\.self_attn\.k_scale: nan$"):
        logprobs_of(backend, folder, dtype)


def test_int8_on_torch_computes_its_own_scales(
    plain: Path, tmp_path: Path, scales: dict[str, NDArray[np.float32]], caplog: pytest.LogCaptureFixture
) -> None:
    """One for each token: the checkpoint's scales of heads change nothing, and a log line says so."""
    folder = with_scales(plain, tmp_path / "model", scales["int8"] * np.float32(100))
    with caplog.at_level("INFO"):
        found = logprobs_of(Backend.TORCH, folder, "int8")
    assert any("those of the checkpoint are not used" in message for message in caplog.messages)
    assert np.array_equal(found, logprobs_of(Backend.TORCH, plain, "int8"))
