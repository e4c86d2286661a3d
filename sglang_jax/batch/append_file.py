"""A file of appended lines that can be read again after a crash."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

from sglang_jax.errors import BatchError

READ_BYTES = 2**20


class AppendFile:
    """Appends lines to a file. When `add` returns, the line is in the kernel, so it survives any end of this process.
    After `sync`, it also survives a crash of the machine."""

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
        """Appends a line, which ends in a newline. Raises `BatchError`; after that, every call raises it."""
        if self._failed is not None:  # the file may end in part of a line, after which nothing may be written
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
        """Waits until everything is on disk. May run in a different thread than the rest. Raises `BatchError`."""
        with self._open:
            if self._closed:
                return
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                raise cannot_write(self.path, error) from error

    def close(self) -> None:
        """Closes the file after a running `sync` has ended."""
        with self._open:
            self._closed = True
            os.close(self._descriptor)


def cannot_write(path: Path, error: OSError) -> BatchError:
    """Returns the error of a run that cannot continue, for example because the disk is full."""
    return BatchError(f"cannot write {path}: {error.strerror}; finished lines are kept; run the same command to resume")


def lines_of(path: Path, read_bytes: int = READ_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yields offset and content of each line with its newline, which the last may lack; nothing without a file."""
    if not path.exists():
        return
    offset = 0
    parts: list[bytes] = []
    with path.open("rb", buffering=0) as file:
        while block := file.read(read_bytes):
            start = 0
            while end := block.find(b"\n", start) + 1:
                parts.append(block[start:end])
                line = b"".join(parts)
                yield offset, line
                offset += len(line)
                parts.clear()
                start = end
            if start < len(block):
                parts.append(block[start:])
    if parts:
        yield offset, b"".join(parts)


def truncate(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
