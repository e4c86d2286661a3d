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
                raise ConfigError(f"{file}:{number}: {first_fault(error, 'line')}") from error
    return objects


def first_fault(error: ValidationError, whole: str) -> str:
    """Returns the place and the message of the first fault. `whole`: the name of what was checked."""
    first = error.errors(include_url=False, include_input=False)[0]
    message = "Input should be an object" if first["type"] == "model_type" else first["msg"]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {message}"
