"""Damaged files, by accident or on purpose: mutations of good ones."""

from __future__ import annotations

import json
import random
from typing import Any

NASTY: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    -(2**63),
    10**40,
    0.5,
    1e308,
    -0.0,
    float("nan"),
    float("inf"),
    "",
    "x" * 300,
    "../../etc/passwd",
    "/dev/zero",
    "\x00",
    "\ud800",
    [],
    [[]],
    [1, "a", None],
    {},
    {"a": {"b": []}},
)
"""Unexpected values for a field."""


def spoil_bytes(good: bytes, numbers: random.Random) -> bytes:
    """Up to four changes: bits, runs cut out, doubled or overwritten, the end cut off."""
    data = bytearray(good)
    for _ in range(numbers.randint(1, 4)):
        if not data:
            break
        # The first bytes determine how the rest is read: they are changed as often as all others.
        place = numbers.randrange(min(len(data), numbers.choice((16, 64, 512, len(data)))))
        length = numbers.choice((1, 1, 4, 8, 64))
        match numbers.randrange(6):
            case 0:
                data[place] ^= 1 << numbers.randrange(8)
            case 1:
                del data[place : place + length]
            case 2:
                data[place:place] = data[place : place + length]
            case 3:
                data[place : place + length] = numbers.randbytes(length)
            case 4:
                data[place : place + 8] = numbers.choice((0, 2**63, 2**64 - 1, 2**31, len(data))).to_bytes(8, "little")
            case _:
                del data[numbers.randrange(len(data)) :]
    return bytes(data)


def spoil_json(good: Any, numbers: random.Random) -> bytes:
    """Up to three changes of the document; sometimes of its bytes."""
    document = json.loads(json.dumps(good))
    for _ in range(numbers.randint(1, 3)):
        document = _spoil_value(document, numbers)
    text = json.dumps(document).encode("utf-8", "surrogatepass")
    return spoil_bytes(text, numbers) if numbers.random() < 0.2 else text


def _spoil_value(value: Any, numbers: random.Random) -> Any:
    """The value with one place in it changed."""
    if isinstance(value, dict) and value and numbers.random() < 0.9:
        name = numbers.choice(list(value))
        match numbers.randrange(8):
            case 0:
                return {key: kept for key, kept in value.items() if key != name}
            case 1:
                return {**value, "x" + name: value[name]}
            case _:
                return {**value, name: _spoil_value(value[name], numbers)}
    if isinstance(value, list) and value and numbers.random() < 0.9:
        place = numbers.randrange(len(value))
        match numbers.randrange(8):
            case 0:
                return value[:place] + value[place + 1 :]
            case 1:
                return value[: place + 1] + value[place:]
            case _:
                return [*value[:place], _spoil_value(value[place], numbers), *value[place + 1 :]]
    return numbers.choice(NASTY)
