"""Where in a schema the fault is that the library of grammars found, which names none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

_IN_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_IN_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_ALONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")

MOST_LOOKS = 256
MOST_SECONDS = 1.0


def find_fault(schema: Any, fault_of: Callable[[Any], str]) -> tuple[str, str]:
    """The JSON pointer of the innermost schema that has a fault when it stands alone, with the definitions of the whole
    beside it, and that fault. Looks `MOST_LOOKS` times and for `MOST_SECONDS` at most.

    **Arguments:** `fault_of`: what is wrong with a schema, empty if nothing is. `schema` has a fault.
    """
    shared = {name: schema[name] for name in ("$defs", "definitions") if isinstance(schema, dict) and name in schema}
    place, fault = "", fault_of(schema)
    looks, until = MOST_LOOKS, time.monotonic() + MOST_SECONDS
    inner, going = schema, True
    while going:
        going = False
        for path, child in _children(inner):
            looks -= 1
            if looks < 0 or time.monotonic() > until:
                return place, fault
            # Definitions are looked at alone too: beside themselves each would have the fault of any.
            alone = (
                {**shared, **child} if isinstance(child, dict) and not path.startswith(("/$defs", "/def")) else child
            )
            found = fault_of(alone)
            if found and _same(found, fault):
                place, fault, inner, going = place + path, found, child, True
                break
    return place, fault


def _same(one: str, other: str) -> bool:
    """The outer schema may put words around the inner one's."""
    return one in other or other in one


def _children(schema: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(schema, dict):
        return
    for name in _IN_MAPPINGS:
        if isinstance(schema.get(name), dict):
            for key, child in schema[name].items():
                yield f"/{name}/{_escaped(key)}", child
    for name in _IN_LISTS:
        if isinstance(schema.get(name), list):
            for number, child in enumerate(schema[name]):
                yield f"/{name}/{number}", child
    for name in _ALONE:
        if isinstance(schema.get(name), dict):
            yield f"/{name}", schema[name]


def _escaped(key: object) -> str:
    return str(key).replace("~", "~0").replace("/", "~1")
