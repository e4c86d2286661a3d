"""Files that a command writes after its work. Their paths are checked before it, so that no result is lost."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang_jax.errors import ConfigError


def check_result_file(file: Path | None, flag: str) -> None:
    """Raises `ConfigError` if the file that the option `flag` names cannot be written. None: there is no file."""
    if file is None:
        return
    if not file.parent.is_dir():
        raise ConfigError(f"{flag} {file} is in a folder that does not exist")
    if file.is_dir():
        raise ConfigError(f"{flag} {file} is a folder")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{flag} {file} cannot be written: no permission")


@contextmanager
def writing(file: Path, flag: str) -> Iterator[None]:
    """Raises `ConfigError` if the block could not write the file."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{flag} {file} cannot be written: {error.strerror}") from error


def append_json_line(file: Path, flag: str, line: Mapping[str, Any]) -> None:
    """Raises `ConfigError` as `writing`."""
    with writing(file, flag), file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(line, allow_nan=False) + "\n")
