"""Files that survive a kill or a crash of the machine: folders with a lock, and files that are replaced as a whole."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path


class LockedError(Exception):
    """Another process has the lock. `holder`: its process id, empty if unknown."""

    def __init__(self, holder: str) -> None:
        super().__init__(f"locked by process {holder or 'unknown'}")
        self.holder = holder


class FolderLock:
    """The lock of a folder, which ends with its process at the latest. Raises `LockedError`, `OSError`."""

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)
        except BlockingIOError as error:
            holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip()
            self.close()
            raise LockedError(holder) from error
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._descriptor)


def sync_folder(path: Path) -> None:
    """Makes the creation, renaming and removal of files in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Writes a whole file: after a crash it has its old content or the new. Raises `OSError`."""
    draft = path.with_suffix(".draft")
    with draft.open("wb", buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())
    if draft.stat().st_size < len(content):  # a disk that is nearly full stores only part
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    draft.replace(path)
    sync_folder(path.parent)
