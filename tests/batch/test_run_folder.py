"""How an input is recognised, and what a folder says about its run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_jax.batch.run_folder import HASHED_BLOCK_BYTES, HASHED_BLOCKS, RunFolder, identify
from sglang_jax.errors import BatchError

SIZE = 6_000_000


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(bytes(range(250)) * (SIZE // 250))
    return path


@pytest.mark.parametrize("block", [0, 1, 7, 14, 15])
@pytest.mark.parametrize("place", [0, HASHED_BLOCK_BYTES - 1])
def test_a_changed_byte_in_any_sampled_block_makes_another_input(large: Path, block: int, place: int) -> None:
    before = identify(large)
    assert identify(large) == before
    start = (SIZE - HASHED_BLOCK_BYTES) * block // (HASHED_BLOCKS - 1)
    with large.open("r+b") as file:
        file.seek(start + place)
        file.write(b"\xff")
    assert identify(large).sha256 != before.sha256
    assert identify(large).size == SIZE


def test_the_cost_of_a_large_input_is_bounded(tmp_path: Path) -> None:
    """A sparse file of a terabyte."""
    path = tmp_path / "holes"
    with path.open("wb") as file:
        file.truncate(2**40)
    assert identify(path).size == 2**40


def test_an_input_is_recognised_at_any_path(large: Path) -> None:
    before = identify(large)
    assert identify(large.rename(large.with_name("moved"))) == before


def test_a_damaged_manifest_is_named(large: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with RunFolder(output) as folder:
        folder.claim([output], identify(large), {"model_path": "m"})
        folder.claim([output], identify(large), {"model_path": "m"})
    manifest = tmp_path / "out.jsonl.run" / "manifest.json"
    assert json.loads(manifest.read_text())["options"] == {"model_path": "m"}
    manifest.write_text("{")
    with RunFolder(output) as folder, pytest.raises(BatchError, match=r"manifest\.json is damaged"):
        folder.claim([output], identify(large), {"model_path": "m"})


def test_a_run_of_another_version_is_refused(large: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    with RunFolder(output) as folder:
        folder.claim([output], identify(large), {})
        manifest = tmp_path / "out.jsonl.run" / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 99'))
        with pytest.raises(BatchError, match="another version"):
            folder.claim([output], identify(large), {})


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.run").write_text("a file")
    with pytest.raises(BatchError, match=r"cannot write .*out\.jsonl\.run.*--output"):
        RunFolder(tmp_path / "out.jsonl")
