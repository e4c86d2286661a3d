"""Keys and values in float8: the cost of rounding, and scales that are undone where keys and values are read."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.paged_model import PagedModel
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax.models import AttentionImplementation

STEPS = ({0: 10, 1: 20}, {0: 1, 1: 1}, {0: 1})


@pytest.fixture(scope="module", params=["qwen3", "falcon_h1"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only attention, and attention with a recurrent layer, whose state is not affected."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), request.param, **heads)


def run(model: PagedModel) -> np.ndarray:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 384, length) for length in (12, 21)]
    return np.concatenate(model.run(sequences, STEPS))


def with_scales(model: PagedModel, scales: np.ndarray) -> PagedModel:
    """Scales `[kv_heads, 2]` in every layer."""
    found = [path for path, _ in nnx.to_flat_state(model.state) if path[-1] == "kv_scales"]
    assert len(found) == 2
    flat = dict(nnx.to_flat_state(model.state))
    for path in found:
        flat[path] = flat[path].replace(jnp.asarray(scales, jnp.float32))
    model.state = nnx.from_flat_state(flat)
    return model


@pytest.mark.parametrize("attention", [AttentionImplementation.XLA, AttentionImplementation.REFERENCE])
def test_only_rounding_changes_the_logits(folder: Path, attention: AttentionImplementation) -> None:
    exact = run(PagedModel(folder, attention=attention))
    model = PagedModel(folder, attention=attention, kv_dtype="float8_e4m3fn")
    assert all(memory.pages.dtype.itemsize == 1 for memory in model.kv_caches)
    states = [memory.states for memory in model.kv_caches]
    assert all(pool.dtype == jnp.float32 for pool in jax.tree.leaves(states))
    difference = np.abs(run(model) - exact).max() / exact.std()
    assert 1e-4 < difference < 0.2


def test_scales_are_undone(folder: Path) -> None:
    """Powers of two leave float8's rounding unchanged, and a different one for each head and side reveals a mix-up."""
    plain = run(PagedModel(folder, kv_dtype="float8_e4m3fn"))
    scales = 2.0 ** np.array([[1, -1], [-2, 2], [0, 1], [-1, 0]])
    scaled = run(with_scales(PagedModel(folder, kv_dtype="float8_e4m3fn"), scales))
    assert np.abs(scaled - plain).max() / plain.std() < 0.02


def test_a_step_does_not_copy_the_cache(folder: Path) -> None:
    """XLA's CPU backend would widen all pages to scatter into float8."""
    model = PagedModel(folder, kv_dtype="float8_e4m3fn", columns=2048)
    assert model.temporary_bytes() < sum(memory.pages.nbytes for memory in model.kv_caches) / 4
