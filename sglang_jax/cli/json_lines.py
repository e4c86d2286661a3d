"""Reads files of questions: one JSON object per line."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from sglang_jax.errors import ConfigError

Line = TypeVar("Line", bound=BaseModel)


def read_text(file: Path, flag: str) -> str:
    """Returns the text of the file that the option `flag` names. Raises `ConfigError` if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"{flag}: file not found: {file}") from error
    except OSError as error:
        raise ConfigError(f"{flag} {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {file} cannot be read: {error}") from error


def read_json_lines(file: Path, flag: str, kind: type[Line]) -> list[Line]:
    """Returns the objects of the file that the option `flag` names; empty lines are skipped. Raises `ConfigError` with
    the first invalid line."""
    objects = []
    for number, line in enumerate(read_text(file, flag).split("\n"), 1):
        if line.strip():
            try:
                objects.append(kind.model_validate_json(line))
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"])) or "line"
                raise ConfigError(f"{file}:{number}: {where}: {first['msg']}") from error
    return objects
