"""Finds the part of a schema that causes an error: the grammar library does not report it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from sglang_jax.errors import quote

IN_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
IN_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")

MAX_LOOKS = 256
MAX_SECONDS = 1.0


def find_reference_fault(schema: Any) -> tuple[str, str] | None:
    """Returns the JSON pointer of the first schema with a `$ref` that leads nowhere, or only back to itself, and that
    fault, or None. References to other documents are ignored."""
    until = time.monotonic() + MAX_SECONDS
    pending: list[tuple[str, Any]] = [("", schema)]
    seen: dict[str, bool] = {}
    while pending and time.monotonic() < until:
        place, inner = pending.pop()
        pointer = pointer_of(inner)
        if pointer is not None:
            if resolve(schema, pointer) is NOWHERE:
                return place, f"Pointer '{pointer}' does not exist"
            if _is_circular(schema, inner, pointer, seen):
                return place, f"$ref '#{pointer}' refers to itself"
        pending.extend(reversed([(place + path, child) for path, child in children(inner)]))
    return None


def find_constant_fault(schema: Any) -> tuple[str, str] | None:
    """Returns the JSON pointer of the first integer in a `const` or `enum` that the library changes, and the fault, or
    None. The library reads these as floating-point numbers, and overflows its stack at -2**63."""
    pending: list[tuple[str, Any]] = [("", schema)]
    while pending:
        place, inner = pending.pop()
        for name in ("const", "enum"):
            number = _lost_number(inner.get(name)) if isinstance(inner, dict) else None
            if number is not None:
                return f"{place}/{name}", f"the whole number {quote(number)} is not supported; use a string for it"
        pending.extend(reversed([(place + path, child) for path, child in children(inner)]))
    return None


def _lost_number(value: Any) -> int | None:
    pending = [value]
    while pending:
        inner = pending.pop()
        if isinstance(inner, int) and not isinstance(inner, bool) and inner != 2**63 - 1 and _as_float(inner) != inner:
            return inner
        pending.extend(inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ())
    return None


def _as_float(number: int) -> int | None:
    """Returns what the library writes for an integer; None for one that it cannot read."""
    try:
        nearest = float(number)
    except OverflowError:
        return None
    if number == -(2**63):
        return None
    return int(nearest) if abs(number) < 2**63 else int(Decimal(repr(nearest)))


NOWHERE = object()


def pointer_of(schema: Any) -> str | None:
    """Returns the target of a schema's `$ref` within the document; None without one."""
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


def _is_circular(schema: Any, begin: Any, pointer: str, seen: dict[str, bool]) -> bool:
    """Whether the target of a `$ref` requires the same reference again for the same value, through only `$ref` and
    `allOf`. `seen`: results by pointer."""
    if pointer in seen:
        return seen[pointer]
    seen[pointer], followed = False, {pointer}
    pending = [resolve(schema, pointer)]
    while pending:
        inner = pending.pop()
        if inner is begin:
            seen[pointer] = True
            break
        if not isinstance(inner, dict):
            continue
        if isinstance(inner.get("allOf"), list):
            pending.extend(inner["allOf"])
        further = pointer_of(inner)
        if further is not None and further not in followed:
            followed.add(further)
            pending.append(resolve(schema, further))
    return seen[pointer]


def find_fault(schema: Any, fault_of: Callable[[Any], str]) -> tuple[str, str]:
    """Returns the JSON pointer of the innermost schema that has a fault by itself, with the document's definitions
    added, and that fault. `fault_of` returns a schema's fault, or an empty text; `schema` has one. Tries at most
    `MAX_LOOKS` schemas, for at most `MAX_SECONDS`."""
    shared = {name: schema[name] for name in ("$defs", "definitions") if isinstance(schema, dict) and name in schema}
    place, fault = "", fault_of(schema)
    looks, until = MAX_LOOKS, time.monotonic() + MAX_SECONDS
    inner, deeper = schema, True
    while deeper:
        deeper = False
        for path, child in children(inner):
            looks -= 1
            if looks < 0 or time.monotonic() > until:
                return place, fault
            # Definitions are tried without the others: with them, each would have the fault of any.
            candidate = (
                {**shared, **child} if isinstance(child, dict) and not path.startswith(("/$defs", "/def")) else child
            )
            found = fault_of(candidate)
            if found and _same(found, fault):
                place, fault, inner, deeper = place + path, found, child, True
                break
    return place, fault


def _same(one: str, other: str) -> bool:
    """Whether two faults are the same: an outer schema's may contain the inner one's text."""
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
    for name in SINGLE:
        if isinstance(schema.get(name), dict):
            yield f"/{name}", schema[name]


def _escaped(key: object) -> str:
    return str(key).replace("~", "~0").replace("/", "~1")
