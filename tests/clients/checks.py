"""What the drivers of Python clients share. A driver is a script of checks: each prints one line of JSON, so that one
failure hides no other."""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Check = TypeVar("Check", bound=Callable[[], object])
Error = TypeVar("Error", bound=Exception)

URL = os.environ["CLIENT_TEST_URL"]
"""The server's root, without `/v1` and without a slash at the end."""

KEY = os.environ["CLIENT_TEST_KEY"]
MODEL = os.environ["CLIENT_TEST_MODEL"]
NO_SUCH_MODEL = "no-such-model"

CITIES = ("Oslo", "Paris", "Rome")
QUESTION = "What is the weather in Paris for the next 3 days?"
CAPITAL = "What is the capital of France?"
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": list(CITIES)},
        "days": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
"""The arguments of the tool `get_weather`, and the answer that checks of structured output ask for."""

_CHECKS: dict[str, Callable[[], object]] = {}


def check(function: Check) -> Check:
    """Registers a check under the name of its function."""
    _CHECKS[function.__name__] = function
    return function


def raised(kind: type[Error], call: Callable[[], object]) -> Error:
    """Asserts that a call raises an error of this kind, and returns it."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def is_weather(arguments: Any) -> None:
    """Asserts that the arguments follow `WEATHER`, given as an object or as its text."""
    value = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert set(value) == {"city", "days"}, value
    assert value["city"] in CITIES, value
    assert isinstance(value["days"], int), value
    assert 1 <= value["days"] <= 5, value


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """The cosine of the angle between two vectors of the same size."""
    product = sum(mine * theirs for mine, theirs in zip(one, other, strict=True))
    return product / math.hypot(*one) / math.hypot(*other)


def main() -> None:
    """Runs all checks in the order of the script, or those that are named on the command line."""
    for name in sys.argv[1:] or _CHECKS:
        error = ""
        try:
            _CHECKS[name]()
        except Exception as thrown:  # whatever a client raises is the result of this check, and the next one runs
            traceback.print_exc()
            error = f"{type(thrown).__name__}: {thrown}"
        print(json.dumps({"check": name, "error": error}), flush=True)
