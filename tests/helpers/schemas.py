"""Random JSON schemas and regular expressions, and a check of outputs against them without any grammar library."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

Schema = Mapping[str, Any]

NAMES = ("a", "name", "x y", "é", 'q"')

_LEAVES: st.SearchStrategy[Schema] = st.one_of(
    st.tuples(st.integers(-40, 20), st.integers(0, 300)).map(
        lambda ends: {"type": "integer", "minimum": ends[0], "maximum": ends[0] + ends[1]}
    ),
    st.integers(0, 6).map(lambda most: {"type": "string", "maxLength": most}),
    st.sampled_from(["^[a-c]{1,3}$", "^(yes|no)$", "^[0-9]{2}-x+$"]).map(
        lambda pattern: {"type": "string", "pattern": pattern}
    ),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "number"}, {"const": {"k": [1, "é"]}}]),
    st.lists(st.sampled_from([1, -2.5, "one", "two \n", None, True]), min_size=1, max_size=3, unique_by=repr).map(
        lambda values: {"enum": values}
    ),
)


def _object(properties: Mapping[str, Schema], required: int) -> Schema:
    names = list(properties)
    return {
        "type": "object",
        "properties": dict(properties),
        "required": names[:required],
        "additionalProperties": False,
    }


def _inner(part: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    return st.one_of(
        st.builds(_object, st.dictionaries(st.sampled_from(NAMES), part, max_size=3), st.integers(0, 3)),
        st.builds(
            lambda items, least, more: {"type": "array", "items": items, "minItems": least, "maxItems": least + more},
            part,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.lists(part, min_size=1, max_size=2).map(lambda parts: {"anyOf": parts}),
    )


SCHEMAS: st.SearchStrategy[Schema] = st.recursive(_LEAVES, _inner, max_leaves=6)


def conforms(value: Any, schema: Schema) -> bool:
    """Whether a JSON value follows one of `SCHEMAS`."""
    if "anyOf" in schema:
        return any(conforms(value, part) for part in schema["anyOf"])
    if "const" in schema:
        return json.dumps(value) == json.dumps(schema["const"])
    if "enum" in schema:
        return json.dumps(value) in [json.dumps(one) for one in schema["enum"]]
    match schema["type"]:
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "number":
            return type(value) in (int, float)
        case "boolean":
            return type(value) is bool
        case "null":
            return value is None
        case "string":
            if not isinstance(value, str) or len(value) > schema.get("maxLength", len(value)):
                return False
            return "pattern" not in schema or re.search(schema["pattern"], value) is not None
        case "array":
            if not isinstance(value, list) or not schema["minItems"] <= len(value) <= schema["maxItems"]:
                return False
            return all(conforms(one, schema["items"]) for one in value)
        case _:
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= set(value) <= set(schema["properties"])
                and all(conforms(one, schema["properties"][name]) for name, one in value.items())
            )


def _joined(parts: Sequence[str]) -> str:
    return "".join(parts)


_ATOMS = st.sampled_from(["a", "b", "0", "-", r"\.", " ", "[a-c]", "[0-9]", "[^a]", "é"])
_REPEATS = st.sampled_from(["", "", "?", "*", "+", "{2}", "{1,3}"])


def _group(part: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeated = st.tuples(part, _REPEATS).map(lambda pair: f"(?:{pair[0]}){pair[1]}")
    return st.one_of(
        repeated, st.tuples(part, part).map("|".join).map("(?:{})".format), st.lists(part, max_size=3).map(_joined)
    )


REGEXES: st.SearchStrategy[str] = st.recursive(st.tuples(_ATOMS, _REPEATS).map(_joined), _group, max_leaves=8).filter(
    bool
)
