"""Writes Lark rules for JSON schemas with integer bounds beyond 2^53, and the objects, arrays and alternatives around
them; the library handles all others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sglang_jax.grammar.integer_ranges import BOUNDS, EXACT, has_wide_bounds, range_of, range_regex, round_to_float
from sglang_jax.grammar.schema_paths import children, pointer_of, resolve

MAX_DIGITS = 64
"""Maximum digits of a bound: the size of its regular expression grows with the square."""

MAX_DEPTH = 32

MAX_NAME = 128
"""Maximum characters of a property's name in objects that allow other names."""

MAX_WRITTEN = 200_000
"""Maximum characters of rules: each part that is left to the library includes all definitions."""

_NOTES = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$comment", "readOnly", "writeOnly", "$schema"}
)
_SHARED = ("$defs", "definitions")
_ANYWHERE = _NOTES | set(_SHARED) | {"x-guidance"}
_INTEGER = _ANYWHERE | {"type", "format", *BOUNDS}
_OBJECT = _ANYWHERE | {"type", "properties", "required", "additionalProperties"}
_ARRAY = _ANYWHERE | {"type", "items", "minItems", "maxItems"}
_OPTIONS = frozenset({"whitespace_pattern", "whitespace_flexible", "lenient"})

_LIBRARY_PREFIX = "%json"
_CHARACTER = r"[^\"\\\x00-\x1f]"


class NotWritableError(Exception):
    """The schema has keywords around a wide integer that are not supported here."""


class JsonWriter:
    """Writes the schemas of one grammar. `library`: writes a schema for the library; `blank`: white space between the
    parts of JSON."""

    def __init__(self, library: Callable[[Any], str], blank: str) -> None:
        self.rules: list[str] = []
        self._library = library
        self._blank = blank

    def rule(self, schema: Any) -> str:
        """Converts a schema to a part of a rule, which may refer to `rules`."""
        if not isinstance(schema, dict) or not WideIntegerFinder(schema).found_in(schema):
            return self._library(schema)
        before = len(self.rules)
        try:
            return _SchemaWriter(schema, self._library, self._blank, self.rules).write()
        except NotWritableError:
            del self.rules[before:]
            return self._library(schema)

    def find_bound_fault(self, schema: Any, most: int) -> tuple[str, str] | None:
        """Returns the JSON pointer of the first bound that excludes all integers or would not be exact, and the fault,
        or None. Bounds beyond `most`, those of 64-bit types, may be rounded."""
        options = schema.get("x-guidance") if isinstance(schema, dict) else None
        lenient = isinstance(options, dict) and options.get("lenient") is True
        if lenient or not self.rule(schema).startswith(_LIBRARY_PREFIX):
            return None
        pending: list[tuple[str, Any]] = [("", schema)]
        while pending:
            place, inner = pending.pop()
            if isinstance(inner, dict) and has_wide_bounds(inner):
                least, last = range_of(inner)
                if least is not None and last is not None and least > last:
                    name = next(name for name in reversed(BOUNDS) if name in inner)
                    return f"{place}/{name}", f"no integer is at least {least} and at most {last}"
                for name in BOUNDS:
                    end = range_of({name: inner[name]} if name in inner else {})[name in BOUNDS[2:]]
                    if end is not None and abs(end) <= most and round_to_float(end, up=True) != end:
                        return f"{place}/{name}", (
                            f"the bound {inner[name]} cannot be enforced exactly with the keywords around it: bounds "
                            f"beyond {EXACT} (2^53) need a schema of objects, arrays, anyOf and $ref only"
                        )
            pending.extend(reversed([(place + path, child) for path, child in children(inner)]))
        return None


class WideIntegerFinder:
    """Finds the parts of a schema that contain an integer with wide bounds, directly or by reference."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[int, bool] = {}

    def found_in(self, part: Any) -> bool:
        if id(part) not in self._known:
            self._known[id(part)] = any(map(has_wide_bounds, self._reached(part)))
        return self._known[id(part)]

    def _reached(self, part: Any) -> Iterable[Mapping[str, Any]]:
        seen: set[str] = set()
        pending = [part]
        while pending:
            inner = pending.pop()
            if not isinstance(inner, dict):
                continue
            yield inner
            pointer = pointer_of(inner)
            if pointer is not None and pointer not in seen:
                seen.add(pointer)
                pending.append(resolve(self._root, pointer))
            pending.extend(child for path, child in children(inner) if path.split("/")[1] not in _SHARED)


class _SchemaWriter:
    """Writes one schema. Raises `NotWritableError`."""

    def __init__(self, root: dict[str, Any], library: Callable[[Any], str], blank: str, rules: list[str]) -> None:
        self._root = root
        self._library = library
        self._rules = rules
        self._finder = WideIntegerFinder(root)
        self._written = 0
        own = root.get("x-guidance", {})
        if not isinstance(own, dict) or not own.keys() <= _OPTIONS:
            raise NotWritableError
        self._options = own
        pattern = own.get("whitespace_pattern", blank)
        flexible = own.get("whitespace_flexible") is not False and isinstance(pattern, str)
        self._space = self._rule(f"/{pattern}/?") if flexible else '""'

    def write(self) -> str:
        return self._node(self._root, ())

    def _node(self, schema: Any, followed: tuple[str, ...], depth: int = 0) -> str:
        """Writes a part of the schema. `followed`: references on the path to it."""
        if not self._finder.found_in(schema):
            return self._leaf(schema)
        if depth > MAX_DEPTH:
            raise NotWritableError
        keys = schema.keys() - _ANYWHERE
        if keys == {"$ref"}:
            pointer = pointer_of(schema)
            if pointer is None or pointer in followed:
                raise NotWritableError
            return self._node(resolve(self._root, pointer), (*followed, pointer), depth + 1)
        if keys == {"anyOf"} or (keys == {"allOf"} and len(schema["allOf"]) == 1):
            (parts,) = (schema[key] for key in keys)
            return self._rule(" | ".join(self._node(one, followed, depth + 1) for one in parts))
        if has_wide_bounds(schema) and schema.keys() <= _INTEGER:
            return self._integer(schema)
        if schema.get("type") == "object" and schema.keys() <= _OBJECT:
            return self._object(schema, lambda part: self._node(part, followed, depth + 1))
        if schema.get("type") == "array" and schema.keys() <= _ARRAY:
            return self._array(schema, self._node(schema.get("items", True), followed, depth + 1))
        raise NotWritableError

    def _integer(self, schema: Mapping[str, Any]) -> str:
        least, most = range_of(schema)
        if least is not None and most is not None and least > most:
            raise NotWritableError
        if any(end is not None and abs(end) >= 10**MAX_DIGITS for end in (least, most)):
            raise NotWritableError
        written = f"/{range_regex(least, most)}/"
        if not isinstance(schema["type"], list):
            return self._rule(written)
        others = [one for one in schema["type"] if one != "integer"]
        rest = {name: value for name, value in schema.items() if name not in BOUNDS}
        return self._rule(f"{written} | {self._leaf({**rest, 'type': others})}" if others else written)

    def _array(self, schema: Mapping[str, Any], item: str) -> str:
        fewest, most = schema.get("minItems", 0), schema.get("maxItems")
        if type(fewest) is not int or (most is not None and type(most) is not int):
            raise NotWritableError
        if fewest < 0 or most == 0 or (most is not None and most < fewest):
            raise NotWritableError
        least = max(fewest - 1, 0)
        further = self._rule(f'{self._space} "," {self._space} {item}')
        several = f"{item} {further}{{{least},{'' if most is None else most - 1}}}" if most != 1 else item
        items = several if fewest > 0 else f"({several})?"
        return self._rule(f'"[" {self._space} {items} {self._space} "]"')

    def _object(self, schema: Mapping[str, Any], write: Callable[[Any], str]) -> str:
        named, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(named, dict) or not isinstance(required, list) or not set(required) <= named.keys():
            raise NotWritableError
        # What may follow a member, and what may come if there was none.
        following, first = self._other_members(named.keys(), schema.get("additionalProperties", True), write)
        for name, inner in reversed(named.items()):
            member = self._rule(f"{_quoted(json.dumps(name, ensure_ascii=False))} {self._pair(write(inner))}")
            further = f'{self._space} "," {self._space} {member}'
            if name in required:
                following, first = self._rule(f"{further} {following}"), self._rule(f"{member} {following}")
            else:
                following, first = (
                    self._rule(f"({further})? {following}"),
                    self._rule(f"{member} {following} | {first}"),
                )
        return self._rule(f'"{{" {self._space} {first} {self._space} "}}"')

    def _other_members(self, names: Iterable[str], schema: Any, write: Callable[[Any], str]) -> tuple[str, str]:
        if schema is False:
            return '""', '""'
        if any(len(name) > MAX_NAME for name in names):
            raise NotWritableError
        member = self._rule(f'/\\"{_regex_other_than(sorted(names))}\\"/ {self._pair(write(schema))}')
        following = self._rule(f'({self._space} "," {self._space} {member})*')
        return following, self._rule(f"({member} {following})?")

    def _pair(self, value: str) -> str:
        return f'{self._space} ":" {self._space} {value}'

    def _leaf(self, schema: Any) -> str:
        """Writes a part without wide integers, with the targets of its references."""
        if schema is False:
            raise NotWritableError
        whole: dict[str, Any] = dict(schema) if isinstance(schema, dict) else {}
        if '"$ref"' in json.dumps(whole):
            shared = {name: self._root[name] for name in _SHARED if name in self._root}
            if not _refers_to_shared(whole) or not all(map(_refers_to_shared, shared.values())):
                raise NotWritableError
            whole |= shared
        return self._rule(self._library({**whole, "x-guidance": dict(self._options)}))

    def _rule(self, body: str) -> str:
        self._written += len(body)
        if self._written > MAX_WRITTEN:
            raise NotWritableError
        name = f"json_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name


def _refers_to_shared(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_refers_to_shared, value))
    if not isinstance(value, dict):
        return True
    reference = value.get("$ref")
    if isinstance(reference, str) and not reference.startswith(tuple(f"#/{name}/" for name in _SHARED)):
        return False
    return all(map(_refers_to_shared, value.values()))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex_other_than(names: Sequence[str]) -> str:
    """Returns a regular expression of keys other than `names`, without escapes, which would give a key several
    spellings."""
    if not names or names == [""]:
        return f"{_CHARACTER}{'+' if names else '*'}"
    firsts = sorted({name[0] for name in names if name})
    parts = [rf"[^\"\\\x00-\x1f{''.join(map(_escape, firsts))}]{_CHARACTER}*"]
    for first in firsts:
        if not re.match(_CHARACTER, first):
            continue  # such a key cannot be written without an escape
        rest = _regex_other_than([name[1:] for name in names if name[:1] == first])
        parts.append(f"{_escape(first)}{rest}")
    return f"({'|'.join(parts)}){'' if '' in names else '?'}"


def _escape(char: str) -> str:
    return f"\\x{{{ord(char):x}}}"
