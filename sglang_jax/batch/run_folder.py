"""What a run leaves beside its output, so that the next one goes on with it: a lock, and what the run was about."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import msgspec

from sglang_jax.batch.append_file import cannot_write, sync_folder
from sglang_jax.errors import BatchError

HASHED_BLOCKS = 16
HASHED_BLOCK_BYTES = 256 * 1024
"""How much of the input is looked at to know it again: blocks at even distances, the first and the last among them."""

VERSION = 1

OptionValue = str | int | float | bool | None


class InputIdentity(msgspec.Struct, frozen=True):
    """By what an input is known again, wherever it lies."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What a run is about. `options`: those that what is written depends on, by the names of their flags."""

    version: int
    input: InputIdentity
    options: dict[str, OptionValue]


def identify(path: Path) -> InputIdentity:
    """Looks at a bounded part of the file, so that a large one costs no more than a small one."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        last = max(0, size - HASHED_BLOCK_BYTES)
        for block in range(HASHED_BLOCKS):
            file.seek(last * block // (HASHED_BLOCKS - 1))
            digest.update(file.read(HASHED_BLOCK_BYTES))
    return InputIdentity(size, digest.hexdigest())


class RunFolder:
    """The folder `OUTPUT.run`, held by one run at a time.

    **Raises:** `BatchError` while another process holds it.
    """

    def __init__(self, output: Path) -> None:
        self._output = output
        self.path = output.with_name(output.name + ".run")
        try:
            self.path.mkdir(exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise BatchError(f"cannot write {self.path}: {error.strerror}; choose another --output") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._lock, 32, 0).decode(errors="replace").strip()
            os.close(self._lock)
            raise BatchError(
                f"another run (process {holder or 'unknown'}) writes {output}; wait for it, or choose another --output"
            ) from error
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        except OSError as error:
            os.close(self._lock)
            raise cannot_write(self.path, error) from error

    def claim(self, written: list[Path], identity: InputIdentity, options: Mapping[str, OptionValue]) -> None:
        """Notes what this run is about, or checks that it goes on with what was begun.

        **Raises:** `BatchError` if the input or an option has changed, or a file of `written` is there and was not
        written by a run that this folder knows of.
        """
        manifest = Manifest(VERSION, identity, dict(options))
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

    def _write(self, path: Path, manifest: Manifest) -> None:
        draft = path.with_suffix(".draft")
        content = msgspec.json.format(msgspec.json.encode(manifest)) + b"\n"
        try:
            with draft.open("wb", buffering=0) as file:
                file.write(content)
                os.fsync(file.fileno())
            if draft.stat().st_size < len(content):  # a disk that is nearly full takes a part
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            draft.replace(path)
            sync_folder(self.path)
            sync_folder(self._output.parent)
        except OSError as error:
            raise cannot_write(path, error) from error

    def close(self) -> None:
        """Lets another run have the folder."""
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def check_same(begun: Manifest, now: Manifest, output: Path | str, folder: Path | str) -> None:
    """Raises `BatchError` if a run is not about the same as the one that was begun."""
    remedy = f"to start over, choose another --output, or remove the output and {folder}"
    if begun.version != now.version:
        raise BatchError(f"{output} was started by another version of this program; {remedy}")
    if begun.input != now.input:
        sizes = f"{begun.input.size} bytes then, {now.input.size} now"
        raise BatchError(f"the input is not the one that {output} was started with ({sizes}); {remedy}")
    for name in [*begun.options, *(set(now.options) - set(begun.options))]:
        then, value = begun.options.get(name), now.options.get(name)
        if then != value:
            flag = f"--{name.replace('_', '-')}"
            raise BatchError(
                f"{output} was started with {flag} {_shown(then)}, now it is {_shown(value)}; "
                f"use the same value again; {remedy}"
            )


def read_manifest(content: bytes, path: Path | str) -> Manifest:
    """A manifest as it was written; `path` is for the error. Raises `BatchError`."""
    try:
        return msgspec.json.decode(content, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BatchError(f"{path} is damaged ({error}); remove it only together with the output of that run") from error


def _shown(value: OptionValue) -> str:
    return "unset" if value is None else repr(value) if isinstance(value, str) else str(value).lower()
