"""Files that may come from strangers."""

from __future__ import annotations

from pathlib import Path

from sglang_jax.errors import CheckpointError


def check_regular(file: Path) -> None:
    """Raises `CheckpointError` for what is no regular file, or a link to one: a pipe would be waited for without end,
    and a device has none."""
    if not file.exists():
        raise CheckpointError(f"{file} does not exist")
    if not file.is_file():
        raise CheckpointError(f"{file} is not a regular file")


def read_file(file: Path, most: int) -> bytes:
    """The bytes of a regular file. Raises `CheckpointError` if it is none, or has more than `most` bytes."""
    check_regular(file)
    with file.open("rb") as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise CheckpointError(f"{file} has {file.stat().st_size} bytes, the limit for such a file is {most}")
    return data
