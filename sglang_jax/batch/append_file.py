"""A file to which whole lines are appended, and which is read again after whatever ended the run before."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

from sglang_jax.errors import BatchError

READ_BYTES = 2**20


class AppendFile:
    """Lines at the end of a file. What was added is in the kernel's hands when `add` returns: the end of this process,
    however sudden, loses none of it. `sync` makes it outlive the machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._failed: BatchError | None = None
        self._open = threading.Lock()
        self._closed = False
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self.size = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise cannot_write(path, error) from error

    def add(self, line: bytes) -> None:
        """Appends a line, which ends in a newline. Raises `BatchError`, after which nothing can be added."""
        if self._failed is not None:  # a part of a line may stand at the end, and nothing must follow it
            raise self._failed
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            self._failed = cannot_write(self.path, error)
            raise self._failed from error
        self.size += len(line)

    def sync(self) -> None:
        """Waits until everything is on the disk. May run in another thread than all else. Raises `BatchError`."""
        with self._open:
            if self._closed:
                return
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                raise cannot_write(self.path, error) from error

    def close(self) -> None:
        """Closes the file, once a `sync` that is under way has ended."""
        with self._open:
            self._closed = True
            os.close(self._descriptor)


def cannot_write(path: Path, error: OSError) -> BatchError:
    """The error of a run that cannot go on, such as on a full disk."""
    return BatchError(f"cannot write {path}: {error.strerror}; finished lines are kept; run the same command to resume")


def sync_folder(path: Path) -> None:
    """Makes files that were made in this folder, renamed or removed, so for good."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lines_of(path: Path, read_bytes: int = READ_BYTES) -> Iterator[tuple[int, bytes]]:
    """Offset and content of each line, the newline included; the last may have none. No lines of a missing file."""
    if not path.exists():
        return
    offset = 0
    begun: list[bytes] = []
    with path.open("rb", buffering=0) as file:
        while block := file.read(read_bytes):
            start = 0
            while end := block.find(b"\n", start) + 1:
                begun.append(block[start:end])
                line = b"".join(begun)
                yield offset, line
                offset += len(line)
                begun.clear()
                start = end
            if start < len(block):
                begun.append(block[start:])
    if begun:
        yield offset, b"".join(begun)


def cut(path: Path, size: int) -> None:
    """Takes away what stands behind `size` bytes."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
