"""How both backends read matrices: each part once, although values and scales are computed from it, and in pieces."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers.tiny_models import make_tiny_checkpoint
from numpy.typing import NDArray

from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.checkpoint import Checkpoint, open_checkpoint
from sglang_jax.checkpoint.quantization import INT8_ROWS, Quantization
from sglang_jax.checkpoint.reader import Array, Index, PlainReader, TensorReader, whole_index
from sglang_jax.jax_runner import weights as jax_weights
from sglang_jax.jax_runner.parallel import TensorParallel
from sglang_jax.layers.sharding import make_mesh
from sglang_jax.models import AttentionImplementation, build_model
from sglang_jax.models.parameters import parameters_of
from sglang_jax.runner.quantization import encodings_of
from torch_backend import weights as torch_weights
from torch_backend.attention.native import NativeAttention
from torch_backend.models import build_model as build_torch_model
from torch_backend.native_operations import NativeOperations

Arrays = dict[str, NDArray[np.uint8]]
"""The bytes of each array of a model."""


class CountingReader(PlainReader):
    """Counts for each number of each tensor how often it was read."""

    def __init__(self, inner: TensorReader) -> None:
        self._inner = inner
        self.names, self.shape = inner.names, inner.shape
        self.counts = {name: np.zeros(inner.shape(name), np.uint8) for name in inner.names()}

    def read(self, name: str, index: Index | None = None) -> Array:
        self.counts[name][whole_index(self.shape(name), index)] += 1
        return self._inner.read(name, index)


def bytes_of(array: Array) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def loaded_by_jax(
    checkpoint: Checkpoint, reader: TensorReader, quantization: Quantization | None, devices: int = 1
) -> Arrays:
    model = build_model(
        TensorParallel.of(checkpoint.config, Parallelism(devices)).config,
        dtype=jnp.dtype("bfloat16"),
        attention=AttentionImplementation.XLA,
        encodings=encodings_of(checkpoint, quantization),
    )
    jax_weights.load_weights(model, reader, checkpoint.config, make_mesh(jax.devices()[:devices]), quantization)
    return {each.path: bytes_of(np.asarray(each.value.get_value())) for each in parameters_of(model)}


def loaded_by_torch(checkpoint: Checkpoint, reader: TensorReader, quantization: Quantization | None) -> Arrays:
    model = build_torch_model(
        checkpoint.config,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        operations=NativeOperations(),
        attention=NativeAttention(),
        encodings=encodings_of(checkpoint, quantization),
    )
    torch_weights.load_weights(model, reader, checkpoint.config, pack=False, quantization=quantization)
    return {name: bytes_of(torch_weights._as_numpy(each)) for name, each in model.named_parameters()}


def assert_same(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], name)


@pytest.mark.parametrize("quantization", [None, Quantization(INT8_ROWS)], ids=["plain", "int8"])
@pytest.mark.parametrize("architecture", ["qwen2", "phi3", "qwen3_moe", "falcon_h1", "gpt_oss"])
def test_each_number_is_read_once_and_pieces_make_the_same_arrays(
    architecture: str, quantization: Quantization | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(str(make_tiny_checkpoint(tmp_path, architecture)))
    assert checkpoint.reader is not None
    # Gate and up of gpt-oss alternate in one tensor.
    most = 2 if architecture == "gpt_oss" else 1
    for load, backend in ((loaded_by_jax, jax_weights), (loaded_by_torch, torch_weights)):
        found = []
        for weights_at_once in (2**24, 3000, 1):
            monkeypatch.setattr(backend, "_WEIGHTS_AT_ONCE", weights_at_once)
            reader = CountingReader(checkpoint.reader)
            found.append(load(checkpoint, reader, quantization))
            assert {name: int(counts.max()) for name, counts in reader.counts.items() if counts.max() > most} == {}
        for others in found[1:]:
            assert_same(others, found[0])


def test_all_devices_together_read_each_number_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(str(make_tiny_checkpoint(tmp_path, "qwen3_moe")))
    assert checkpoint.reader is not None
    quantization = Quantization(INT8_ROWS)
    one = loaded_by_jax(checkpoint, checkpoint.reader, quantization)
    monkeypatch.setattr(jax_weights, "_WEIGHTS_AT_ONCE", 3000)
    reader = CountingReader(checkpoint.reader)
    assert_same(loaded_by_jax(checkpoint, reader, quantization, devices=2), one)
    assert {name for name, counts in reader.counts.items() if counts.max() > 1} == set()


class WideningReader(PlainReader):
    """Numbers in float32, each time in new memory: as from a file in blocks."""

    def __init__(self, inner: TensorReader) -> None:
        self._inner = inner
        self.names, self.shape = inner.names, inner.shape

    def read(self, name: str, index: Index | None = None) -> Array:
        return self._inner.read(name, index).astype(np.float32)


def test_no_whole_matrix_is_in_memory_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of numpy's memory, in bytes for each weight of one of the large matrices: it does not include torch's,
    and includes part of what JAX keeps. With whole matrices it would be 13 and more."""
    sizes = {"vocab_size": 512, "num_hidden_layers": 1, "intermediate_size": 8192}
    checkpoint = open_checkpoint(str(make_tiny_checkpoint(tmp_path, "qwen2", **sizes)))
    assert checkpoint.reader is not None
    reader, quantization, weights = WideningReader(checkpoint.reader), Quantization(INT8_ROWS), 8192 * 64
    for load, backend, most in ((loaded_by_jax, jax_weights, 8), (loaded_by_torch, torch_weights, 1)):
        monkeypatch.setattr(backend, "_WEIGHTS_AT_ONCE", weights // 32)
        tracemalloc.start()
        load(checkpoint, reader, quantization)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < most * weights
