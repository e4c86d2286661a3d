"""The GGUF container, against the `gguf` package's reader, and damaged files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from helpers.gguf_files import write_gguf

from sglang_jax.checkpoint import resolve_model
from sglang_jax.checkpoint.gguf_file import open_gguf
from sglang_jax.errors import CheckpointError


def test_the_embedded_model_reads_as_by_the_reference_reader() -> None:
    path = resolve_model("demo").path
    reference = gguf.GGUFReader(path)
    file = open_gguf(path)
    own = {name: field.contents() for name, field in reference.fields.items() if not name.startswith("GGUF.")}
    assert file.metadata == own
    assert [*file.tensors] == [tensor.name for tensor in reference.tensors]
    for theirs in reference.tensors:
        ours = file.tensors[theirs.name]
        assert (ours.shape, ours.kind) == (tuple(reversed(theirs.shape.tolist())), theirs.tensor_type)
        np.testing.assert_array_equal(file.raw(ours).reshape(-1), theirs.data.view(np.uint8).reshape(-1))


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    metadata = {"a.flag": True, "a.count": 7, "a.ratio": 0.5, "a.name": "é", "a.list": [1, 2, 3], "a.words": ["x", ""]}
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensors = {"first": (values, GGMLQuantizationType.F32), "second": (values[0], GGMLQuantizationType.F32)}
    return write_gguf(tmp_path / "small.gguf", "llama", metadata, tensors)


def test_values_of_every_type_are_read(small_file: Path) -> None:
    file = open_gguf(small_file)
    assert file.metadata == {
        "general.architecture": "llama",
        "a.flag": True,
        "a.count": 7,
        "a.ratio": 0.5,
        "a.name": "é",
        "a.list": [1, 2, 3],
        "a.words": ["x", ""],
    }
    np.testing.assert_array_equal(file.raw(file.tensors["second"]).view(np.float32), [0, 1, 2, 3])
    assert file.require("a.count", float) == 7.0
    with pytest.raises(CheckpointError, match=r"a\.name should be a int, it is 'é'"):
        file.get("a.name", int)
    with pytest.raises(CheckpointError, match=r"a\.none is missing"):
        file.require("a.none", int)


def test_a_file_truncated_anywhere_is_refused(small_file: Path, tmp_path: Path) -> None:
    whole = small_file.read_bytes()
    cut = tmp_path / "cut.gguf"
    data_ends = open_gguf(small_file).tensors["second"]
    for length in [0, 3, 20, 30, 60, 100, 200, data_ends.offset - 1, data_ends.offset + data_ends.num_bytes - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut short|not a"):
            open_gguf(cut)


def test_other_files_and_versions_are_refused(small_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match="not a little-endian GGUF file of version 2 or 3"):
        open_gguf(other)
    raw = bytearray(small_file.read_bytes())
    raw[4] = 1
    other.write_bytes(raw)
    with pytest.raises(CheckpointError, match="version 2 or 3"):
        open_gguf(other)


def test_a_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "part.gguf", "llama", {"split.count": 3}, {})
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        open_gguf(path)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, "llama", {"a.count": 1}, {})
    assert open_gguf(path).metadata["a.count"] == 1
    write_gguf(path, "llama", {"a.count": 2, "a.more": 1}, {})
    assert open_gguf(path).metadata["a.count"] == 2
