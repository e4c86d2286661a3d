"""Files that clients upload, and files that batches write for them, in one folder of one server.

A file has a description, `ID.json`, and its content, `ID.data`. It exists once both do: the description is written
first, and the content is moved in place after it, or removed before it. So whatever a kill interrupts, a start finds
whole files and remnants, which it removes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import msgspec

from sglang_jax.errors import ConfigError, quote
from sglang_jax.server.callers import Caller
from sglang_jax.server.durable import FolderLock, LockedError, replace_file, sync_folder
from sglang_jax.server.errors import (
    FileInUseError,
    FileNotFoundHereError,
    FileTooLargeError,
    StorageError,
    StorageFullError,
)

logger = logging.getLogger(__name__)

LEAST_COUNTED = 256 * 2**10
"""A file counts as at least this many bytes, which also bounds the number of files."""

DRAFTS, DRAFT = "drafts", "draft-"
FILES, FILE = "files", "file-"
"""The folders, and how the names in them start: others are not this server's, and stay."""


class StoredFile(msgspec.Struct, frozen=True):
    """A file's description. `owner`: the name of its caller; `filename`: the client's, never a path here;
    `created_at`, `expires_at`: Unix times in seconds."""

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int | None = None


class Space:
    """Counts the bytes of all files and drafts, within the limits of the server and of each caller."""

    def __init__(self, most: int) -> None:
        self.used = 0
        self._most = most
        self._used_by: Counter[str] = Counter()

    def take(self, owner: str, size: int, most_of_owner: int | None = None) -> None:
        """Raises `StorageFullError`, with nothing taken, if `size` bytes do not fit."""
        if self.used + size > self._most:
            raise StorageFullError(
                f"the files of this server hold {self.used} bytes, and {size} more do not fit; the limit is "
                f"{self._most} (--max-files-bytes). Delete files"
            )
        if most_of_owner is not None and self._used_by[owner] + size > most_of_owner:
            raise StorageFullError(
                f"the files of this key hold {self._used_by[owner]} bytes, and {size} more do not fit; the limit is "
                f"{most_of_owner} (max_files_bytes). Delete files"
            )
        self.hold(owner, size)

    def hold(self, owner: str, size: int) -> None:
        """Counts bytes that exist already, or are given back (negative)."""
        self.used += size
        self._used_by[owner] += size
        if not self._used_by[owner]:
            del self._used_by[owner]


class Draft:
    """Content that is being written: `add` pieces, then `finish` or `drop`."""

    def __init__(self, store: FileStore, caller: Caller, path: Path) -> None:
        self.size = 0
        self._store = store
        self._caller = caller
        self._path = path
        self._counted = LEAST_COUNTED
        store.space.take(caller.name, LEAST_COUNTED, caller.max_files_bytes)
        try:
            self._file = path.open("xb", buffering=0)
        except OSError as error:
            store.space.hold(caller.name, -LEAST_COUNTED)
            raise storage_error(error) from error

    async def add(self, piece: bytes) -> None:
        """Raises `FileTooLargeError`, `StorageFullError`, `StorageError`."""
        size, most = self.size + len(piece), self._store.max_file_bytes
        if size > most:
            raise FileTooLargeError(f"the file has at least {size} bytes; the limit is {most} (--max-file-bytes)")
        more = max(0, size - self._counted)
        self._store.space.take(self._caller.name, more, self._caller.max_files_bytes)
        self._counted += more
        self.size = size
        await asyncio.to_thread(self._write, piece)

    async def finish(self, filename: str, purpose: str, lifetime: int | None) -> StoredFile:
        """Returns the stored file. `lifetime`: seconds until it expires. Raises `StorageError`."""
        now = self._store.now()
        expires_at = None if lifetime is None else now + lifetime
        file = StoredFile(self._store.new_id(), self._caller.name, filename, purpose, self.size, now, expires_at)
        await asyncio.to_thread(self._sync)
        await self._store.adopt(self._path, file, counted=self._counted)
        return file

    def drop(self) -> None:
        """Removes the draft. Does nothing after `finish`."""
        self._file.close()
        if self._path.exists():
            self._path.unlink()
            self._store.space.hold(self._caller.name, -self._counted)

    def _write(self, piece: bytes) -> None:
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            raise storage_error(error) from error

    def _sync(self) -> None:
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise storage_error(error) from error
        self._file.close()


class FileStore:
    """All files of a folder. Its methods run on one event loop. Raises `ConfigError` if the folder cannot be used, or
    another server uses it."""

    def __init__(
        self, folder: Path, *, max_file_bytes: int, max_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        self.folder = folder
        self.max_file_bytes = max_file_bytes
        self.space = Space(max_bytes)
        self._clock = clock
        self._files: dict[str, StoredFile] = {}
        self._users: Counter[str] = Counter()
        try:
            for path in (folder, folder / DRAFTS, folder / FILES):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = FolderLock(folder)
            self._load()
        except LockedError as error:
            raise ConfigError(
                f"--files-dir {folder} is in use by another server (process {error.holder or 'unknown'}); each needs "
                "its own"
            ) from error
        except OSError as error:
            raise ConfigError(f"--files-dir {folder} cannot be used: {error}") from error

    def close(self) -> None:
        self._lock.close()

    def now(self) -> int:
        return int(self._clock())

    @staticmethod
    def new_id() -> str:
        return FILE + secrets.token_hex(16)

    def draft(self, caller: Caller) -> Draft:
        """Starts a new file of a caller. Raises `StorageFullError`, `StorageError`."""
        return Draft(self, caller, self.folder / DRAFTS / f"{DRAFT}{secrets.token_hex(16)}")

    def find(self, file_id: str, caller: Caller) -> StoredFile:
        """Raises `FileNotFoundHereError`, also for a file of another caller, except for operators."""
        file = self._files.get(file_id)
        if file is None or self._is_expired(file) or not (caller.admin or file.owner == caller.name):
            raise FileNotFoundHereError(f"there is no file {quote(file_id)}", param="file_id")
        return file

    def seen_by(self, caller: Caller) -> Iterator[StoredFile]:
        """Files that a caller may see, the newest first."""
        for file in reversed(self._files.values()):
            if (caller.admin or file.owner == caller.name) and not self._is_expired(file):
                yield file

    def content(self, file: StoredFile) -> Path:
        return self.folder / FILES / f"{file.id}.data"

    def has(self, file_id: str) -> bool:
        return file_id in self._files

    def path_of(self, file_id: str) -> Path | None:
        """Returns the content of a file that is in use; None if it is lost."""
        file = self._files.get(file_id)
        return None if file is None else self.content(file)

    def use(self, file_id: str) -> None:
        """Keeps a file from being deleted or expiring, until `unuse`."""
        self._users[file_id] += 1

    def unuse(self, file_id: str) -> None:
        self._users[file_id] -= 1

    async def adopt(self, path: Path, file: StoredFile, *, counted: int) -> None:
        """Adds a file whose content is at `path` and counts already as `counted` bytes. Raises `StorageError`."""
        await asyncio.to_thread(self._store, path, file)
        self.space.hold(file.owner, _counted(file) - counted)
        self._files[file.id] = file

    async def adopt_once(self, path: Path, file: StoredFile, *, counted: int) -> bool:
        """Like `adopt`, but a file without content is not kept, and one that was adopted already stays. Returns whether
        the file exists. Raises `StorageError`."""
        if self.has(file.id):
            return True
        if path.exists() and path.stat().st_size:
            await self.adopt(path, file, counted=counted)
            return True
        path.unlink(missing_ok=True)
        self.space.hold(file.owner, -counted)
        return False

    async def delete(self, file: StoredFile) -> None:
        """Raises `FileInUseError`, `StorageError`."""
        if self._users[file.id]:
            raise FileInUseError(f"{file.id} is the input of a batch that has not ended; cancel it, or wait")
        if self._files.pop(file.id, None) is not None:
            await asyncio.to_thread(self._remove, file)
            self.space.hold(file.owner, -_counted(file))

    async def delete_expired(self) -> None:
        for file in [one for one in self._files.values() if self._is_expired(one) and not self._users[one.id]]:
            await self.delete(file)

    def _is_expired(self, file: StoredFile) -> bool:
        return file.expires_at is not None and file.expires_at <= self._clock() and not self._users[file.id]

    def _load(self) -> None:
        for draft in (self.folder / DRAFTS).glob(f"{DRAFT}*"):
            draft.unlink()
        found: list[StoredFile] = []
        described: set[str] = set()
        for path in (self.folder / FILES).glob(f"{FILE}*.json"):
            file = _read(path)
            if file is not None and self.content(file).exists():
                found.append(file)
                described.add(file.id)
        for path in (self.folder / FILES).glob(f"{FILE}*"):
            if path.stem not in described or path.suffix not in (".json", ".data"):
                logger.warning("Removed %s, which belongs to no complete file", path)
                path.unlink()
        for file in sorted(found, key=lambda one: (one.created_at, one.id)):
            self._files[file.id] = file
            self.space.hold(file.owner, _counted(file))

    def _store(self, path: Path, file: StoredFile) -> None:
        try:
            replace_file(self._description(file), msgspec.json.encode(file))
            path.replace(self.content(file))
            sync_folder(self.folder / FILES)
        except OSError as error:
            raise storage_error(error) from error

    def _remove(self, file: StoredFile) -> None:
        try:
            self.content(file).unlink(missing_ok=True)
            self._description(file).unlink(missing_ok=True)
            sync_folder(self.folder / FILES)
        except OSError as error:
            raise storage_error(error) from error

    def _description(self, file: StoredFile) -> Path:
        return self.folder / FILES / f"{file.id}.json"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def storage_error(error: OSError) -> StorageError:
    logger.error("A file of a client cannot be stored: %s", error)
    return StorageError(f"the server cannot write its files ({error.strerror}); try again later")


def _counted(file: StoredFile) -> int:
    return max(file.bytes, LEAST_COUNTED)


def _read(path: Path) -> StoredFile | None:
    """The description in a file; None for one that a crash has damaged."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=StoredFile)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return file if file.id == path.stem else None
