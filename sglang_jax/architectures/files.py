"""Reads files that may come from untrusted sources."""

from __future__ import annotations

from pathlib import Path

from sglang_jax.errors import CheckpointError


def check_regular(file: Path) -> None:
    """Raises `CheckpointError` unless `file` is a regular file or a link to one: pipes block, devices never end."""
    if not file.exists():
        raise CheckpointError(f"{file} does not exist")
    if not file.is_file():
        raise CheckpointError(f"{file} is not a regular file")


def read_file(file: Path, limit: int) -> bytes:
    """Reads a regular file. Raises `CheckpointError` for other files, and for more than `limit` bytes."""
    check_regular(file)
    with file.open("rb") as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise CheckpointError(f"{file} has {file.stat().st_size} bytes, the limit for such a file is {limit}")
    return data
