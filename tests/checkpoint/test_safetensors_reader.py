"""Safetensors folders as transformers and safetensors write them."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.tiny_models import ARCHITECTURES, make_tiny_checkpoint, make_tiny_model
from safetensors.numpy import save_file

from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.checkpoint.safetensors_reader import SafetensorsReader
from sglang_jax.errors import CheckpointError


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_tensor_reads_as_transformers_wrote_it(tmp_path: Path, architecture: str, dtype: str) -> None:
    folder = make_tiny_checkpoint(tmp_path, architecture, dtype=dtype, max_shard_size="60KB", seed=3)
    assert len(list(folder.glob("*.safetensors"))) > 1
    reader = SafetensorsReader(folder)
    state = make_tiny_model(architecture, seed=3).to(getattr(torch, dtype)).state_dict()
    assert reader.names() == state.keys()
    for name, value in state.items():
        read = reader.read(name)
        assert read.dtype.name == dtype
        assert reader.shape(name) == read.shape
        np.testing.assert_array_equal(read.astype(np.float32), value.float().numpy())


def test_a_shard_of_a_tensor_is_read(tmp_path: Path) -> None:
    values = np.arange(60, dtype=np.float32).reshape(6, 10).astype(ml_dtypes.bfloat16)
    save_file({"a": values, "b": np.ones((3,), dtype=np.float32)}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    np.testing.assert_array_equal(reader.read("a", (slice(2, 5), slice(3, None))), values[2:5, 3:])
    np.testing.assert_array_equal(reader.read("a", (slice(None, 2),)), values[:2])
    with pytest.raises(IndexError, match="2 axes"):
        reader.read("b", (slice(0, 1), slice(0, 1)))


def test_files_without_an_index_are_joined_and_may_not_overlap(tmp_path: Path) -> None:
    save_file({"a": np.ones((2,), dtype=np.float32)}, tmp_path / "one.safetensors")
    save_file({"b": np.zeros((2,), dtype=np.float32)}, tmp_path / "two.safetensors")
    assert SafetensorsReader(tmp_path).names() == {"a", "b"}
    save_file({"b": np.zeros((2,), dtype=np.float32)}, tmp_path / "three.safetensors")
    with pytest.raises(CheckpointError, match=r"b is in two files: .*three.* and .*two"):
        SafetensorsReader(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \.safetensors file in"):
        SafetensorsReader(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, max_shard_size="100KB")
    (folder / "model-00002-of-00006.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"files that do not exist: model-00002-of-00006\.safetensors"):
        open_checkpoint(str(folder))


def test_an_index_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    save_file({"a": np.ones((2,), dtype=np.float32)}, tmp_path / "one.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"missing from their files: b \(in one\.safetensors\)"):
        SafetensorsReader(tmp_path)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        SafetensorsReader(tmp_path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": np.ones((64,), dtype=np.float32)}, file)
    whole = file.read_bytes()
    for length in [0, 4, 20, len(whole) - 1]:
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="cut short"):
            SafetensorsReader(tmp_path)
    file.write_bytes(whole[:8] + b"x" + whole[9:])
    with pytest.raises(CheckpointError, match="no valid safetensors header"):
        SafetensorsReader(tmp_path)


def test_an_unused_dtype_is_refused(tmp_path: Path) -> None:
    save_file({"a": np.ones((2,), dtype=np.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"a in .* is stored as I8; supported: BF16, F16, F32"):
        SafetensorsReader(tmp_path).read("a")
