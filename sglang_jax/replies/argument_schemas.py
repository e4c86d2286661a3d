"""Decides by their schema which arguments of a call are bare text and which are JSON, in formats that write arguments
one by one: for both the grammar and the parser of calls, so that they agree. Reads the Python lists and dicts that
models sometimes write instead of JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from sglang_jax.replies.json_scan import escape_surrogates, json_value

MAX_LITERAL_CHARACTERS = 16_384
"""Maximum characters of a literal: Python's parser takes some hundred bytes for each."""

_HEX = r"[\da-fA-F]"
_OCTAL = r"(?![4-7][0-7]{2})[0-7]{1,3}"
_ESCAPE = rf"\\(?:[\\'\"abfnrtv\n]|x{_HEX}{{2}}|u{_HEX}{{4}}|U00(?:0{_HEX}|10){_HEX}{{4}}|{_OCTAL})"
_LITERAL = re.compile(
    rf"""(?:'(?:[^'\\\n]|{_ESCAPE})*+' | "(?:[^"\\\n]|{_ESCAPE})*+"
    | (?:-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)? | True | False | None)(?![\w.'"])
    | [\[\](){{}},:] | \s)*+""",
    re.VERBOSE | re.ASCII,
)
"""The tokens of a literal. Python's parser warns of some others, and would accept prefixes and names."""

_KINDS = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$comment", "readOnly", "writeOnly"})
_BARE = _NOTES | {"type", "enum", "const"}
_MAX_REFERENCES = 20
"""Maximum chained references that are followed to find a type."""

_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}


class ArgumentSchemas:
    """The schemas of a tool's arguments, from `parameters`. `end`: the marker after a bare value, never within it."""

    def __init__(self, parameters: Mapping[str, Any] | None, end: str) -> None:
        self._root: Mapping[str, Any] = parameters or {}
        self._end = end
        self._referred: dict[str, frozenset[str]] = {}
        self._depth = 0
        found = self._resolved(self._root)
        self.outer: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
        named = self.outer.get("properties")
        self.named: Mapping[str, Any] = named if isinstance(named, Mapping) else {}

    def of(self, name: str) -> Any:
        """Returns the schema of an argument; True for any value."""
        others = self.outer.get("additionalProperties")
        return self.named.get(name, others if isinstance(others, Mapping) else True)

    def bare(self, schema: Any) -> bool:
        """Whether a value is written without quotes: any string, one of several strings, or a value without a type."""
        found = self._resolved(schema)
        if found is True:
            return True
        if not isinstance(found, Mapping) or not found.keys() <= _BARE:
            return False
        if found.keys() <= _NOTES:
            return True
        choices = self.choices(found) or ()
        return self.types(found) == {"string"} and not any(self._end in one for one in choices)

    def choices(self, schema: Any) -> Sequence[str] | None:
        """Returns the allowed texts of a bare value; None for any."""
        found = self._resolved(schema)
        if not isinstance(found, Mapping):
            return None
        several = found.get("enum") if isinstance(found.get("enum"), list) else None
        if "const" in found:
            several = [found["const"]] if several is None or found["const"] in several else []
        return None if several is None else [one for one in several if isinstance(one, str)]

    def types(self, schema: Any) -> frozenset[str]:
        """Returns the types that a value may have: all of them if the schema has no type."""
        if schema is False:
            return frozenset()
        if not isinstance(schema, Mapping):
            return _KINDS
        types, declared = _KINDS, schema.get("type")
        if declared is not None:
            several = [one for one in (declared if isinstance(declared, list) else [declared]) if isinstance(one, str)]
            types &= {*several, "integer"} if "number" in several else set(several)
        if "const" in schema:
            types &= {_type(schema["const"])}
        if isinstance(schema.get("enum"), list):
            types &= {_type(one) for one in schema["enum"]}
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list):
                types &= frozenset().union(*map(self.types, schema[name]))
        if isinstance(schema.get("allOf"), list):
            types = types.intersection(*map(self.types, schema["allOf"]))
        reference = schema.get("$ref")
        return types & self._types_of_reference(reference) if isinstance(reference, str) else types

    def as_json(self, value: str, schema: Any) -> str:
        """Converts a value that the model wrote to JSON: of a type of its schema if it is JSON or Python, else a
        string."""
        if not self.bare(schema):
            types, plain = self.types(schema), value.strip()
            word = _WORDS.get(plain.lower())
            if word is not None and ("null" if word == "null" else "boolean") in types:
                return word
            parsed = json_value(plain)
            if (parsed is not None or plain == "null") and ("string" not in types or _type(parsed) in types):
                return plain
            literal = python_literal(plain) if parsed is None else None
            if literal is not None and _type(literal[0]) in types:
                return literal[1]
        return json.dumps(value, ensure_ascii=False)

    def self_contained(self, schema: Any) -> Any:
        """Returns the schema with all that its references need, for use without the whole."""
        if not isinstance(schema, Mapping) or not any("$ref" in one for _, one in _nodes(schema, "")):
            return schema
        return {**_with_moved_references(schema), "$defs": {"all": _with_moved_references(self._root)}}

    def circular_reference(self) -> str:
        """Returns the JSON pointer of a schema that only refers to itself; empty if there is none."""
        fine: set[str] = set()
        for place, schema in _nodes(self._root, ""):
            seen: set[str] = set()
            inner: Any = schema
            while isinstance(inner, Mapping) and isinstance(inner.get("$ref"), str) and inner["$ref"] not in fine:
                if inner["$ref"] in seen:
                    return place or "/"
                seen.add(inner["$ref"])
                inner = self._at(inner["$ref"])
            fine |= seen
        return ""

    def _types_of_reference(self, reference: str) -> frozenset[str]:
        if reference not in self._referred:
            self._referred[reference] = _KINDS  # a circular reference allows all types
            if self._depth < _MAX_REFERENCES:
                self._depth += 1
                self._referred[reference] = self.types(self._at(reference))
                self._depth -= 1
        return self._referred[reference]

    def _resolved(self, schema: Any) -> Any:
        """Follows the references of a schema that only refers to another one."""
        seen: set[str] = set()
        while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
            if not schema.keys() <= _NOTES | {"$ref", "$defs", "definitions", "type"} or schema["$ref"] in seen:
                break
            seen.add(schema["$ref"])
            schema = self._at(schema["$ref"])
        return schema

    def _at(self, reference: str) -> Any:
        if not reference.startswith("#"):
            return None
        found: Any = self._root
        for step in unquote(reference[1:]).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and step in found:
                found = found[step]
            elif isinstance(found, list) and step.isdecimal() and len(step) < 6 and int(step) < len(found):
                found = found[int(step)]
            else:
                return None
        return found


def _nodes(value: Any, place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields all objects of a schema, each with its JSON pointer."""
    if isinstance(value, Mapping):
        yield place, value
        for name, inner in value.items():
            yield from _nodes(inner, f"{place}/{name}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _nodes(inner, f"{place}/{number}")


def _with_moved_references(value: Any) -> Any:
    """Returns a schema whose references start with `#/$defs/all`."""
    if isinstance(value, list):
        return [_with_moved_references(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    moved = {name: _with_moved_references(one) for name, one in value.items() if name != "x-guidance"}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = "#/$defs/all" + reference[1:]
    return moved


def _type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case list():
            return "array"
        case _:
            return "object"


def python_literal(text: str) -> tuple[object, str] | None:
    """Returns the value of a Python list or dict, and the same as JSON; None for others, long ones and non-JSON."""
    if len(text) > MAX_LITERAL_CHARACTERS or text[:1] not in ("[", "{") or not _LITERAL.fullmatch(text):
        return None
    try:
        value: object = ast.literal_eval(text)
        if not _has_text_keys(value):
            return None
        return value, escape_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _has_text_keys(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_text_keys(inner) for key, inner in value.items())
    return not isinstance(value, (list, tuple)) or all(map(_has_text_keys, value))
