"""Typed access to the fields of a JSON file. Errors name the file, the field and the value."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_jax.architectures.files import read_file
from sglang_jax.errors import CheckpointError, quote

_MAX_BYTES = 4 << 20

MAX_SIZE = 1 << 24
"""Limit for sizes, far above those of any model: shapes are computed from them before tensors are checked."""

MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class JsonFields:
    """A JSON object and the file that holds it. Accessors return None for a field that is absent or null, and raise
    `CheckpointError` for a value of another type.

    `within`: the path of the object in the file, for errors. `accessed`: names of the fields that were accessed, to
    find those that nothing reads.
    """

    values: dict[str, Any]
    file: Path
    within: str = ""
    accessed: set[str] = field(default_factory=set, compare=False, repr=False)

    @classmethod
    def read(cls, file: Path) -> JsonFields:
        """Reads a file. Raises `CheckpointError` if it is missing, too large, or not a JSON object."""
        try:
            values = json.loads(read_file(file, _MAX_BYTES))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{file} must contain a JSON object, got {type(values).__name__}")
        return cls(values, file)

    def value(self, name: str) -> Any:
        """The value as parsed, of any type."""
        self.accessed.add(name)
        return self.values.get(name)

    def nested(self, name: str) -> JsonFields | None:
        """A field that holds an object."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._mistyped(name, "an object")
        return JsonFields(value, self.file, f"{self.within}{name}.")

    def integer(self, name: str) -> int | None:
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._mistyped(name, "an integer")
        return value

    def count(self, name: str, limit: int = MAX_SIZE) -> int | None:
        """An integer from 0 to `limit`."""
        value = self.integer(name)
        if value is not None and not 0 <= value <= limit:
            raise CheckpointError(f"{self.file}: {self.within}{name} is {quote(value)}, it must be in [0, {limit}]")
        return value

    def count_or(self, name: str, default: int | None) -> int | None:
        """`default` for a field that is absent; None for null."""
        self.accessed.add(name)
        return self.count(name) if name in self.values else default

    def number_or(self, name: str, default: float | None) -> float | None:
        """`default` for a field that is absent; None for null."""
        self.accessed.add(name)
        return self.number(name) if name in self.values else default

    def required_integer(self, name: str, limit: int = MAX_SIZE) -> int:
        """A required integer from 1 to `limit`."""
        value = self.integer(name)
        if value is None:
            raise CheckpointError(f"{self.file}: {self.within}{name} is missing")
        if value < 1:
            raise CheckpointError(f"{self.file}: {self.within}{name} is {quote(value)}, it must be at least 1")
        if value > limit:
            raise CheckpointError(f"{self.file}: {self.within}{name} is {quote(value)}, it must be at most {limit}")
        return value

    def size(self, name: str, default: int) -> int:
        """An integer of at least 1; `default` for a field that is absent or null."""
        return default if self.value(name) is None else self.required_integer(name)

    def integers(self, name: str) -> tuple[int, ...]:
        """One integer or a list of them; empty for a field that is absent or null."""
        value = self.value(name)
        if isinstance(value, list):
            if not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
                raise self._mistyped(name, "an integer or a list of integers")
            return tuple(value)
        single = self.integer(name)
        return () if single is None else (single,)

    def number(self, name: str) -> float | None:
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._mistyped(name, "a number")
        if not abs(value) <= sys.float_info.max:
            raise self._mistyped(name, "a finite number")
        return float(value)

    def positive(self, name: str, default: float) -> float:
        """A number above 0; `default` for a field that is absent or null."""
        value = self.number(name)
        if value is not None and value <= 0.0:
            raise CheckpointError(f"{self.file}: {self.within}{name} is {value:g}, it must be greater than 0")
        return default if value is None else value

    def required_number(self, name: str) -> float:
        value = self.number(name)
        if value is None:
            raise CheckpointError(f"{self.file}: {self.within}{name} is missing")
        return value

    def boolean(self, name: str) -> bool | None:
        value = self.value(name)
        if value is not None and not isinstance(value, bool):
            raise self._mistyped(name, "true or false")
        return value

    def string(self, name: str) -> str | None:
        value = self.value(name)
        if value is not None and not isinstance(value, str):
            raise self._mistyped(name, "a string")
        return value

    def strings(self, name: str) -> tuple[str, ...] | None:
        """A list of strings."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._mistyped(name, "a list of strings")
        return tuple(value)

    def _mistyped(self, name: str, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {self.within}{name} is {quote(self.values[name])}, it must be {wanted}")
