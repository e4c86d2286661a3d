"""Where in a schema the fault is that the library of grammars found, which names none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from sglang_jax.errors import shown

IN_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
IN_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
ALONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")

MOST_LOOKS = 256
MOST_SECONDS = 1.0


def find_reference_fault(schema: Any) -> tuple[str, str] | None:
    """The JSON pointer of the first schema with a `$ref` within the whole that leads nowhere, or back to itself before
    anything is said, and that fault; None if there is none. References to other documents are not looked at."""
    until = time.monotonic() + MOST_SECONDS
    going: list[tuple[str, Any]] = [("", schema)]
    seen: dict[str, bool] = {}
    while going and time.monotonic() < until:
        place, inner = going.pop()
        pointer = pointer_of(inner)
        if pointer is not None:
            if resolve(schema, pointer) is NOWHERE:
                return place, f"Pointer '{pointer}' does not exist"
            if _says_nothing(schema, inner, pointer, seen):
                return place, f"$ref '#{pointer}' refers to itself"
        going.extend(reversed([(place + path, child) for path, child in children(inner)]))
    return None


def find_constant_fault(schema: Any) -> tuple[str, str] | None:
    """The JSON pointer of the first schema with a whole number in its `const` or `enum` that the library does not spell
    as it is, and what that is; None if there is none. It takes them for floating-point numbers,
    and overflows its stack at -2**63."""
    going: list[tuple[str, Any]] = [("", schema)]
    while going:
        place, inner = going.pop()
        for name in ("const", "enum"):
            number = _lost_number(inner.get(name)) if isinstance(inner, dict) else None
            if number is not None:
                return f"{place}/{name}", f"the whole number {shown(number)} is not supported; use a string for it"
        going.extend(reversed([(place + path, child) for path, child in children(inner)]))
    return None


def _lost_number(value: Any) -> int | None:
    going = [value]
    while going:
        inner = going.pop()
        if isinstance(inner, int) and not isinstance(inner, bool) and inner != 2**63 - 1 and _as_float(inner) != inner:
            return inner
        going.extend(inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ())
    return None


def _as_float(number: int) -> int | None:
    """What the library spells; None for what it cannot take."""
    try:
        nearest = float(number)
    except OverflowError:
        return None
    if number == -(2**63):
        return None
    return int(nearest) if abs(number) < 2**63 else int(Decimal(repr(nearest)))


NOWHERE = object()


def pointer_of(schema: Any) -> str | None:
    """Where the `$ref` of a schema points to within the whole; None without one."""
    found = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(found, str) or not (found in ("", "#") or found.startswith("#/")):
        return None
    return unquote(found.removeprefix("#"))


def resolve(schema: Any, pointer: str) -> Any:
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, dict) and key in schema:
            schema = schema[key]
        elif isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
            schema = schema[int(key)]
        else:
            return NOWHERE
    return schema


def _says_nothing(schema: Any, begin: Any, pointer: str, seen: dict[str, bool]) -> bool:
    """Whether what a `$ref` leads to needs that reference again for the same value: by `$ref`s and `allOf` alone.
    `seen`: what was found of pointers before."""
    if pointer in seen:
        return seen[pointer]
    seen[pointer], followed = False, {pointer}
    going = [resolve(schema, pointer)]
    while going:
        inner = going.pop()
        if inner is begin:
            seen[pointer] = True
            break
        if not isinstance(inner, dict):
            continue
        if isinstance(inner.get("allOf"), list):
            going.extend(inner["allOf"])
        further = pointer_of(inner)
        if further is not None and further not in followed:
            followed.add(further)
            going.append(resolve(schema, further))
    return seen[pointer]


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
        for path, child in children(inner):
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


def children(schema: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(schema, dict):
        return
    for name in IN_MAPPINGS:
        if isinstance(schema.get(name), dict):
            for key, child in schema[name].items():
                yield f"/{name}/{_escaped(key)}", child
    for name in IN_LISTS:
        if isinstance(schema.get(name), list):
            for number, child in enumerate(schema[name]):
                yield f"/{name}/{number}", child
    for name in ALONE:
        if isinstance(schema.get(name), dict):
            yield f"/{name}", schema[name]


def _escaped(key: object) -> str:
    return str(key).replace("~", "~0").replace("/", "~1")
