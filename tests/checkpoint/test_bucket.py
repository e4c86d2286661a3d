"""Checkpoints in a bucket, read by gcsfs over HTTP from a local stand-in for Google Cloud Storage."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.bucket import Bucket, serve_bucket
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax.architectures.pooling import Pooling
from sglang_jax.checkpoint import ORBAX_MARKER, Checkpoint, SourceKind, bucket, open_checkpoint, resolve_model
from sglang_jax.checkpoint.resolve import resolve_tokenizer
from sglang_jax.checkpoint.safetensors_reader import INDEX_FILE, SINGLE_FILE, SafetensorsReader
from sglang_jax.checkpoint.tokenizer import load_tokenizer
from sglang_jax.config import LoadFormat
from sglang_jax.errors import CheckpointError

ADDRESS = "gs://models/tiny/llama"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("local"), max_shard_size="100KB")


@pytest.fixture
def served(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(local, tmp_path / "bucket/tiny/llama")
    with serve_bucket(tmp_path / "bucket", monkeypatch) as found:
        yield found


def folder(served: Bucket) -> Path:
    return served.root / "tiny/llama"


def reader_of(checkpoint: Checkpoint) -> SafetensorsReader:
    assert isinstance(checkpoint.reader, SafetensorsReader)
    return checkpoint.reader


def test_a_bucket_reads_like_a_folder(local: Path, served: Bucket) -> None:
    here, there = open_checkpoint(str(local)), open_checkpoint(f"{ADDRESS}/")
    assert there.config == here.config
    assert there.generation_defaults == here.generation_defaults
    assert there.source.address == ADDRESS
    text = "Hello wörld <|im_start|>"
    assert load_tokenizer(there.source).encode(text) == load_tokenizer(here.source).encode(text)
    assert load_tokenizer(resolve_tokenizer(ADDRESS)).encode(text) == load_tokenizer(here.source).encode(text)
    expected, found = reader_of(here), reader_of(there)
    assert found.names() == expected.names()
    for name in expected.names():
        np.testing.assert_array_equal(found.read(name), expected.read(name))


def test_a_bucket_says_how_vectors_are_made(served: Bucket) -> None:
    modules = [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"}]
    (folder(served) / "modules.json").write_text(json.dumps(modules))
    (folder(served) / "1_Pooling").mkdir()
    (folder(served) / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    pooler = open_checkpoint(ADDRESS).config.pooler
    assert pooler is not None
    assert pooler.pooling is Pooling.MEAN


def test_opening_reads_only_headers_and_a_shard_only_its_rows(
    local: Path, served: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_jax.checkpoint.safetensors_reader._FIRST_BYTES", 512)
    reader = reader_of(open_checkpoint(ADDRESS))
    files = sorted(local.glob("*.safetensors"))
    headers = sum(max(8 + int.from_bytes(file.read_bytes()[:8], "little"), 512) for file in files)
    assert served.bytes_of(".safetensors") == headers
    name = "model.layers.1.mlp.gate_proj.weight"
    rows, columns = reader.shape(name)
    served.sent.clear()
    part = reader.read(name, (slice(3, 7),))
    assert served.bytes_of(".safetensors") == 4 * columns * part.itemsize
    served.sent.clear()
    part = reader.read(name, (slice(3, 7), slice(2, 5)))
    assert served.bytes_of(".safetensors") == 4 * columns * part.itemsize  # whole rows
    np.testing.assert_array_equal(part, SafetensorsReader(local).read(name)[3:7, 2:5])
    assert rows > 7


def test_long_ranges_are_read_in_parts(local: Path, served: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of(open_checkpoint(ADDRESS))
    monkeypatch.setattr(bucket, "_PART", 1000)
    served.sent.clear()
    name = "model.embed_tokens.weight"
    np.testing.assert_array_equal(reader.read(name), SafetensorsReader(local).read(name))
    assert len(served.sent) > 10
    assert max(count for _, _, count in served.sent) == 1000


def test_small_files_are_copied_once_for_each_version(served: Bucket) -> None:
    first = resolve_model(ADDRESS).path
    assert served.bytes_of("config.json") > 0
    served.sent.clear()
    assert resolve_model(ADDRESS).path == first
    assert served.sent == []
    served.generation += 1
    (folder(served) / "config.json").write_text("{}")
    assert resolve_model(ADDRESS).path != first
    assert (resolve_model(ADDRESS).path / "config.json").read_text() == "{}"


def test_dummy_weights_need_no_weights_in_the_bucket(served: Bucket) -> None:
    for file in folder(served).glob("*.safetensors"):
        file.unlink()
    assert open_checkpoint(ADDRESS, LoadFormat.DUMMY).config.num_layers > 0
    assert served.bytes_of(".safetensors") == 0
    with pytest.raises(CheckpointError, match="names files that do not exist: model-00001-of"):
        open_checkpoint(ADDRESS)


def test_an_orbax_checkpoint_is_known_by_its_marker(served: Bucket) -> None:
    (folder(served) / ORBAX_MARKER).write_text("{}")
    assert resolve_model(ADDRESS).kind is SourceKind.ORBAX


# -- What cannot be read -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "gs://",
        "gs://M",
        "gs://models//a",
        "gs://models/../other",
        "gs://models/a/./b",
        "gs://models/a\nb",
        "gs://a b/c",
    ],
)
def test_malformed_addresses_are_refused(address: str, served: Bucket) -> None:
    with pytest.raises(CheckpointError, match="is not a bucket address; give gs://BUCKET/PATH"):
        resolve_model(address)


def test_other_storages_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"s3://models/a: checkpoints are read from gs://BUCKET/PATH"):
        resolve_model("s3://models/a")


def test_without_gcsfs_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"reading gs://models/a needs gcsfs, .* pip install -e '\.\[gcs\]'"):
        resolve_model("gs://models/a")


def test_missing_files_are_named(served: Bucket) -> None:
    for address in ("gs://models/none", "gs://others/tiny"):
        with pytest.raises(CheckpointError, match=f"{address} does not exist"):
            resolve_model(address)
    with pytest.raises(CheckpointError, match=r"gs://models/tiny holds no checkpoint: .*; it has llama/"):
        resolve_model("gs://models/tiny")
    with pytest.raises(CheckpointError, match="revision 'v1' is only for repositories on the hub"):
        resolve_model(ADDRESS, revision="v1")
    with pytest.raises(CheckpointError, match=f"load_format is orbax, but {ADDRESS} is a checkpoint in safetensors"):
        resolve_model(ADDRESS, LoadFormat.ORBAX)


def test_gguf_files_are_read_from_disk(served: Bucket) -> None:
    (served.root / "gguf").mkdir()
    (served.root / "gguf/a.gguf").write_bytes(b"GGUF")
    for address in ("gs://models/gguf", "gs://models/gguf/a.gguf"):
        with pytest.raises(CheckpointError, match=r"GGUF files are read from folders of this machine"):
            resolve_model(address)


@pytest.mark.parametrize(("status", "reason"), [(401, "HttpError"), (403, "Forbidden"), (400, "HttpError")])
def test_a_bucket_that_denies_access(served: Bucket, status: int, reason: str) -> None:
    served.failures = [status] * 100
    with pytest.raises(CheckpointError, match=f"{ADDRESS}/.* cannot be read .*has this machine's.*{reason}"):
        resolve_model(ADDRESS)


def test_transient_failures_are_retried(served: Bucket) -> None:
    served.failures = [503]
    assert resolve_model(ADDRESS).kind is SourceKind.SAFETENSORS


def test_truncated_responses_are_an_error(served: Bucket) -> None:
    reader = reader_of(open_checkpoint(ADDRESS))
    served.cut = 1
    with pytest.raises(
        CheckpointError, match=rf"{ADDRESS}/model-.*safetensors: \d+ bytes were received instead of \d+"
    ):
        reader.read("model.norm.weight")


def test_a_checkpoint_replaced_while_it_is_read_is_an_error(served: Bucket) -> None:
    reader = reader_of(open_checkpoint(ADDRESS))
    served.generation += 1
    with pytest.raises(CheckpointError, match=f"{ADDRESS}/model-.*safetensors does not exist, or was replaced"):
        reader.read("model.norm.weight")


def test_a_cache_that_cannot_be_written(served: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=f"the files of {ADDRESS} cannot be copied .*XDG_CACHE_HOME"):
        resolve_model(ADDRESS)


# -- Malicious buckets
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../other/model.safetensors", "gs://others/model.safetensors", "/etc/passwd", ""])
def test_weights_of_another_folder_are_not_read(served: Bucket, name: str) -> None:
    (folder(served) / INDEX_FILE).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(CheckpointError, match=r"not in its folder|do not exist"):
        open_checkpoint(ADDRESS)
    assert served.bytes_of(".safetensors") == 0


def test_a_header_that_claims_to_be_huge_is_not_fetched(served: Bucket) -> None:
    for file in folder(served).glob("model*"):
        file.unlink()
    served.extra.append(f"tiny/llama/{SINGLE_FILE}")
    served.sizes[f"tiny/llama/{SINGLE_FILE}"] = 2**50
    with pytest.raises(CheckpointError, match=rf"{ADDRESS}/{SINGLE_FILE}: 2 bytes were received instead of 131072"):
        open_checkpoint(ADDRESS)
    served.extra.clear()
    served.sent.clear()
    (folder(served) / SINGLE_FILE).write_bytes((2**40).to_bytes(8, "little") + bytes(200_000))
    with pytest.raises(CheckpointError, match=rf"{SINGLE_FILE} \({2**50} bytes\) is not a safetensors file.*{2**40}"):
        open_checkpoint(ADDRESS)
    assert served.bytes_of(SINGLE_FILE) <= 128 << 10


def test_oversized_config_files_are_not_fetched(served: Bucket) -> None:
    served.sizes["tiny/llama/config.json"] = 2**40
    with pytest.raises(CheckpointError, match=rf"{ADDRESS}: the files \*.json and \*.jinja have \d+ bytes"):
        resolve_model(ADDRESS)
    assert served.sent == []


def test_too_many_objects_are_refused(served: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "_MAX_OBJECTS", 5)
    with pytest.raises(CheckpointError, match=f"{ADDRESS} has more than 5 objects"):
        resolve_model(ADDRESS)


def test_object_names_that_are_not_file_names_are_skipped(served: Bucket, tmp_path: Path) -> None:
    served.extra += [f"tiny/llama/{name}" for name in ("..", "a\\b.json", "a\nb.json", "x" * 300 + ".json")]
    source = resolve_model(ADDRESS)
    assert {path.name for path in source.path.iterdir()} == {
        path.name for path in folder(served).iterdir() if path.suffix in (".json", ".jinja")
    }
    assert not list(tmp_path.rglob("*xx.json"))
