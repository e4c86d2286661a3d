"""Checkpoints in a bucket of Google Cloud Storage: `gs://BUCKET/PATH`, by gcsfs.

Small files (config, tokenizer, index of weights) are copied to the user's cache folder; byte ranges of weights are read
from the bucket. The copy's folder name depends on the generations of its objects, and ranges are requested by
generation too, so replacing a checkpoint while it is read is an error.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from platformdirs import user_cache_dir

from sglang_jax.checkpoint.weight_files import Bytes
from sglang_jax.errors import CheckpointError, cut, how_to_install, quote

SCHEME = "gs://"

_ADDRESS = re.compile(r"gs://([a-z0-9][a-z0-9._-]{1,221})((?:/[^/\x00-\x1f]+)*)")
_SMALL = (".json", ".jinja")
"""Endings of the files that are copied, as from a repository on the hub."""

_MAX_OBJECTS = 2000
"""Maximum objects in a folder. The largest checkpoints have some 200."""

_MAX_SMALL_BYTES = 256 << 20
"""Maximum total size of the copied files; each kind of file has its own limit too."""

_MAX_NAME = 255
_PART = 8 << 20
"""Bytes per request."""

_REQUESTS = 32
"""Concurrent requests per folder."""

_POOLING = re.compile(r"[0-9]_Pooling")

_SECONDS = 120.0
"""Timeout of one request."""


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """One version of an object in a bucket. `size`: in bytes."""

    size: int
    generation: str


class RemoteFolder:
    """The objects directly in `gs://BUCKET/PATH` at the time of opening, and those that say how sentence-transformers
    makes vectors (`1_Pooling/config.json`); implements `WeightFiles`. Raises
    `CheckpointError` if gcsfs is missing, the address is malformed, or the folder cannot be listed."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        found = _ADDRESS.fullmatch(self.address)
        if found is None or any(part in (".", "..") for part in found[2].split("/")):
            raise CheckpointError(f"{quote(address)} is not a bucket address; give gs://BUCKET/PATH")
        self.bucket, self.folder = found[1], found[2].strip("/")
        if importlib.util.find_spec("gcsfs") is None:
            raise CheckpointError(
                f"reading {self.address} needs gcsfs, which is not installed: {how_to_install('gcs')}"
            )
        import fsspec  # here: most checkpoints are files of this machine

        with _failures_of(self.address):
            self._system = fsspec.filesystem("gs", requests_timeout=_SECONDS)
            self.objects, self.folders = self._listed()
        self._pool = ThreadPoolExecutor(_REQUESTS, thread_name_prefix="bucket")

    def names(self) -> list[str]:
        return sorted(self.objects)

    def has(self, name: str) -> bool:
        return name in self.objects

    def size(self, name: str) -> int:
        return self._object(name).size

    def where(self, name: str) -> str:
        return f"{self.address}/{name}"

    def read(self, name: str, first: int, last: int) -> Bytes:
        """See `WeightFiles.read`. Long ranges are read as concurrent requests."""
        found = np.empty(last - first, np.uint8)
        parts = [(start, min(start + _PART, last)) for start in range(first, last, _PART)]

        def take(part: tuple[int, int]) -> None:
            found[part[0] - first : part[1] - first] = np.frombuffer(self._read_part(name, *part), np.uint8)

        if len(parts) == 1:
            take(parts[0])
        else:
            list(self._pool.map(take, parts))
        return found

    def copy_small(self) -> Path:
        """Copies config, tokenizer and index to a local folder, which is kept for the next start, and returns it.
        Raises `CheckpointError` if they are too large, or cannot be read or written."""
        small = {name: each for name, each in sorted(self.objects.items()) if name.endswith(_SMALL)}
        if (total := sum(each.size for each in small.values())) > _MAX_SMALL_BYTES:
            raise CheckpointError(
                f"{self.address}: the files {' and '.join('*' + end for end in _SMALL)} have {total} bytes in total, "
                "the limit is "
                f"{_MAX_SMALL_BYTES}; move files that do not belong to the model to another folder"
            )
        identity = hashlib.sha256(repr([self.address, *small.items()]).encode()).hexdigest()[:16]
        parent = Path(user_cache_dir("sglang-jax"), "buckets", self.bucket, *self.folder.split("/"))
        target = parent / identity
        if target.is_dir():
            return target
        data = {name: self.read(name, 0, each.size) for name, each in small.items()}
        try:
            parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=parent) as folder:
                whole = Path(folder, identity)
                whole.mkdir()
                for name, read in data.items():
                    (whole / name).parent.mkdir(exist_ok=True)
                    (whole / name).write_bytes(read.tobytes())
                _move(whole, target)
        except OSError as error:
            raise CheckpointError(
                f"the files of {self.address} cannot be copied to {target}: {error}; choose another cache folder "
                "with XDG_CACHE_HOME"
            ) from error
        return target

    def _listed(self) -> tuple[dict[str, RemoteObject], frozenset[str]]:
        path = f"{self.bucket}/{self.folder}".rstrip("/")
        entries = self._system.ls(path, detail=True, refresh=True, max_results=_MAX_OBJECTS + 1)
        if len(entries) > _MAX_OBJECTS:
            raise CheckpointError(f"{self.address} has more than {_MAX_OBJECTS} objects, which is not a checkpoint")
        objects, folders = {}, set()
        for entry in entries:
            name = entry["name"].removeprefix(f"{path}/")
            if entry["type"] == "directory":
                folders.add(name.strip("/"))
            elif _is_name(name):
                objects[name] = RemoteObject(int(entry["size"]), str(entry["generation"]))
        for name in filter(_POOLING.fullmatch, sorted(folders)):
            file = f"{name}/config.json"
            for entry in self._system.ls(f"{path}/{name}", detail=True, refresh=True, max_results=_MAX_OBJECTS):
                if entry["name"] == f"{path}/{file}" and entry["type"] != "directory":
                    objects[file] = RemoteObject(int(entry["size"]), str(entry["generation"]))
        return objects, frozenset(folders)

    def _object(self, name: str) -> RemoteObject:
        if name not in self.objects:
            raise CheckpointError(f"{self.where(name)} does not exist")
        return self.objects[name]

    def _read_part(self, name: str, first: int, last: int) -> bytes:
        path = f"{self.bucket}/{self.folder}/{name}" if self.folder else f"{self.bucket}/{name}"
        with _failures_of(self.where(name)):
            generation = self._object(name).generation
            data: bytes = self._system.cat_file(path, first, last, generation=generation)
        if len(data) != last - first:
            raise CheckpointError(
                f"{self.where(name)}: {len(data)} bytes were received instead of {last - first}, from byte {first} on"
            )
        return data


def is_address(path: str) -> bool:
    """Whether a path is a URL: `gs://BUCKET/PATH`, or one of an unsupported storage."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) is not None


def open_folder(address: str) -> RemoteFolder:
    """Opens the folder at an address. Raises `CheckpointError` for an unsupported storage, or as `RemoteFolder`
    does."""
    if not address.startswith(SCHEME):
        raise CheckpointError(
            f"{cut(address)}: checkpoints are read from {SCHEME}BUCKET/PATH, from folders and from the Hugging Face "
            "hub; copy it to a folder of this machine"
        )
    return RemoteFolder(address)


def _is_name(name: str) -> bool:
    """Whether an object's name is a valid file name; other objects do not belong to a checkpoint."""
    return 0 < len(name.encode()) <= _MAX_NAME and name not in (".", "..") and not re.search(r"[/\\\x00-\x1f]", name)


def _move(whole: Path, target: Path) -> None:
    """Renames a finished copy, unless another process has made the same copy meanwhile."""
    try:
        os.rename(whole, target)
    except OSError:
        if not target.is_dir():
            raise


@contextmanager
def _failures_of(place: str) -> Iterator[None]:
    import aiohttp
    from gcsfs.retry import ChecksumError, HttpError, NonRetryableError
    from google.auth.exceptions import GoogleAuthError

    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{place} does not exist, or was replaced while it was read") from error
    except (
        *(OSError, ValueError, HttpError, ChecksumError, NonRetryableError, GoogleAuthError),
        aiohttp.ClientError,
    ) as error:
        raise CheckpointError(
            f"{place} cannot be read (has this machine's account access to the bucket? `gcloud auth "
            f"application-default login` gives it yours): {type(error).__name__}: {cut(str(error))}"
        ) from error


def described(folder: RemoteFolder) -> str:
    """The first ten names in a folder, for error texts."""
    names = [*sorted(f"{name}/" for name in folder.folders), *folder.names()]
    return (", ".join(map(cut, names[:10])) or "nothing") + (f" and {len(names) - 10} more" if len(names) > 10 else "")
