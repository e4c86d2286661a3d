"""How weights are read from a checkpoint: several at a time, within a limit, and copied in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.checkpoint.opening import open_checkpoint
from sglang_jax.checkpoint.reader import Array, Index, PlainReader, TensorReader
from sglang_jax.errors import CheckpointError
from sglang_jax.jax_runner import weights
from sglang_jax.layers.sharding import make_mesh
from sglang_jax.models import AttentionImplementation, Transformer, build_model
from sglang_jax.models.parameters import parameters_of


class CountingReader(PlainReader):
    """Reads as `inner`, and counts on how many threads at once. The first `together` reads wait for one another;
    `broken`: a tensor that cannot be read."""

    def __init__(self, inner: TensorReader, together: int = 1, broken: str | None = None) -> None:
        self._inner = inner
        self._broken = broken
        self._together = threading.Barrier(together)
        self._begun = 0
        self._lock = threading.Lock()
        self._reading = 0
        self.most = 0
        self.names, self.shape = inner.names, inner.shape

    def read(self, name: str, index: Index | None = None) -> Array:
        with self._lock:
            self._reading += 1
            self._begun += 1
            waits = self._begun <= self._together.parties
            self.most = max(self.most, self._reading)
        if waits:
            self._together.wait(60)
        time.sleep(0.002)  # so that concurrent reads are observed
        with self._lock:
            self._reading -= 1
        if name == self._broken:
            raise CheckpointError(f"{name} cannot be read")
        return self._inner.read(name, index)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, TensorReader]:
    checkpoint = open_checkpoint(str(make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")))
    assert checkpoint.reader is not None
    return checkpoint.config, checkpoint.reader


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(weights, "cpu_cores", lambda: list(range(6)))
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("weights")]


def loaded(config: ModelConfig, reader: TensorReader) -> Transformer:
    model = build_model(config, dtype=jnp.dtype("bfloat16"), attention=AttentionImplementation.XLA, platform="cpu")
    weights.load_weights(model, reader, config, make_mesh(jax.devices("cpu")[:1]))
    return model


def values(model: Transformer) -> list[np.ndarray]:
    return [np.asarray(each.value.get_value()) for each in parameters_of(model)]


def test_several_tensors_are_read_at_a_time(
    opened: tuple[ModelConfig, TensorReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, reader = opened
    found = []
    for limit, cores, most in ((1, 6, 1), (2**30, 6, 3), (2**30, 2, 1)):
        monkeypatch.setattr(weights, "_MAX_HELD", limit)
        monkeypatch.setattr(weights, "cpu_cores", lambda cores=cores: list(range(cores)))
        counting = CountingReader(reader, most)
        found.append(values(loaded(config, counting)))
        assert counting.most == most
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            np.testing.assert_array_equal(one.view(np.uint16), other.view(np.uint16))


def test_a_tensor_that_cannot_be_read_ends_the_loading(opened: tuple[ModelConfig, TensorReader]) -> None:
    config, reader = opened
    broken = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(CheckpointError, match=r"down_proj\.weight cannot be read"):
        loaded(config, CountingReader(reader, broken=broken))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
@pytest.mark.parametrize("shape", [(3, 5, 64), (2, 65, 1), (130, 2, 3), (0, 4, 5)])
def test_a_copy_is_in_order(order: tuple[int, ...], shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape).view(ml_dtypes.bfloat16)
    turned = array.transpose(order)
    copy = weights._in_order(turned)
    assert copy.flags.c_contiguous
    assert not np.shares_memory(copy, array)
    np.testing.assert_array_equal(copy.view(np.uint16), np.array(turned, order="C").view(np.uint16))


def test_values_equal_those_of_the_file_in_the_models_type(opened: tuple[ModelConfig, TensorReader]) -> None:
    config, reader = opened
    down = next(
        np.asarray(each.value.get_value())
        for each in parameters_of(loaded(config, reader))
        if "down" in str(each.names[0]).lower()
    )
    stored = reader.read("model.layers.0.mlp.down_proj.weight")
    np.testing.assert_array_equal(down.view(np.uint16), stored.astype(ml_dtypes.bfloat16).T.view(np.uint16))
