"""The folder next to a run's output that lets a later run resume: a lock, and a manifest of the input and options."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import msgspec

from sglang_jax.batch.append_file import cannot_write
from sglang_jax.errors import BatchError
from sglang_jax.server.durable import FolderLock, LockedError, replace_file, sync_folder

HASHED_BLOCKS = 16
HASHED_BLOCK_BYTES = 256 * 1024
"""Blocks of the input that are hashed to recognise it: at even distances, including the first and the last."""

VERSION = 1

OptionValue = str | int | float | bool | None


class InputIdentity(msgspec.Struct, frozen=True):
    """Recognises an input independently of its path."""

    size: int
    sha256: str


class RunManifest(msgspec.Struct, frozen=True):
    """The input and options of a run. `options`: those that change the output, by the names of their flags."""

    version: int
    input: InputIdentity
    options: dict[str, OptionValue]


def identify(path: Path) -> InputIdentity:
    """Reads a bounded part of the file, so that large files cost no more than small ones."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        last = max(0, size - HASHED_BLOCK_BYTES)
        for block in range(HASHED_BLOCKS):
            file.seek(last * block // (HASHED_BLOCKS - 1))
            digest.update(file.read(HASHED_BLOCK_BYTES))
    return InputIdentity(size, digest.hexdigest())


class RunFolder:
    """The folder `OUTPUT.run`, locked by one run at a time. Raises `BatchError` while another process has the lock."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self.path = output.with_name(output.name + ".run")
        try:
            self.path.mkdir(exist_ok=True)
        except OSError as error:
            raise BatchError(f"cannot write {self.path}: {error.strerror}; choose another --output") from error
        try:
            self._lock = FolderLock(self.path)
        except LockedError as error:
            raise BatchError(
                f"another run (process {error.holder or 'unknown'}) writes {output}; wait for it, or choose another "
                "--output"
            ) from error
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def claim(self, written: list[Path], identity: InputIdentity, options: Mapping[str, OptionValue]) -> None:
        """Writes the manifest of a new run, or checks that a resumed run has the same one. Raises `BatchError` if the
        input or an option has changed, or if a file in `written` has content and no run recorded in this folder."""
        manifest = RunManifest(VERSION, identity, dict(options))
        path = self.path / "manifest.json"
        if not path.exists():
            for file in written:
                if file.exists() and file.stat().st_size:
                    raise BatchError(
                        f"{file} exists, but no run recorded in {self.path} wrote it: choose another --output"
                    )
            self._write(path, manifest)
            return
        check_same(read_manifest(path.read_bytes(), path), manifest, self._output, self.path)

    def _write(self, path: Path, manifest: RunManifest) -> None:
        try:
            replace_file(path, msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
            sync_folder(self._output.parent)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def check_same(started: RunManifest, now: RunManifest, output: Path | str, folder: Path | str) -> None:
    """Raises `BatchError` if the input or an option differs from those of the started run."""
    remedy = f"to start over, choose another --output, or remove the output and {folder}"
    if started.version != now.version:
        raise BatchError(f"{output} was started by another version of this program; {remedy}")
    if started.input != now.input:
        sizes = f"{started.input.size} bytes then, {now.input.size} now"
        raise BatchError(f"the input is not the one that {output} was started with ({sizes}); {remedy}")
    for name in [*started.options, *(set(now.options) - set(started.options))]:
        then, value = started.options.get(name), now.options.get(name)
        if then != value:
            flag = f"--{name.replace('_', '-')}"
            raise BatchError(
                f"{output} was started with {flag} {_format(then)}, now it is {_format(value)}; "
                f"use the same value again; {remedy}"
            )


def read_manifest(content: bytes, path: Path | str) -> RunManifest:
    """Decodes a manifest; `path` is for the error. Raises `BatchError`."""
    try:
        return msgspec.json.decode(content, type=RunManifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BatchError(f"{path} is damaged ({error}); remove it only together with the output of that run") from error


def _format(value: OptionValue) -> str:
    return "unset" if value is None else repr(value) if isinstance(value, str) else str(value).lower()
