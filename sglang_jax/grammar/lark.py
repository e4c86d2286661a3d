"""Converts a request's grammar to the Lark dialect of llguidance (its docs/syntax.md)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from sglang_jax.errors import GrammarError
from sglang_jax.grammar.integer_ranges import BOUNDS, has_wide_bounds, is_number, range_of, round_to_float
from sglang_jax.grammar.schema_paths import IN_LISTS, IN_MAPPINGS, SINGLE
from sglang_jax.grammar.structural_tag import TagWriter
from sglang_jax.grammar.wide_integers import JsonWriter
from sglang_jax.sampling.grammar import Grammar, GrammarKind

NO_FORCING = '%llguidance {"no_forcing":true}'
"""The model samples even text that is fully determined: forcing its tokens would take a tokenizer."""

HEADER_LINES = 1

WHITESPACE = r"[ \t\n\r]{1,48}"
"""White space between the parts of JSON, unless a schema's `x-guidance` sets another. It is bounded because small
models would write blanks until their output is full."""

_MAX_LIMIT = 2**63 - 2**10
"""The largest limit, in absolute value, that the library supports for both integers and other numbers."""
_LEAST, _GREATEST = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")

_OPTIONS = re.compile(r"\s*%llguidance\s*(\{[^\n]*\})\s*(?:\n|$)")


def to_lark(grammar: Grammar, specials: Mapping[str, int]) -> str:
    """Converts a grammar to llguidance's Lark; one line of options precedes it. `specials`: tokens that are not text,
    which structural tags may name. Raises `GrammarError` for a grammar that cannot be converted."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return f"{NO_FORCING}\n{json_lark(json.loads(grammar.text))}"
        case GrammarKind.REGEX:
            return f"{NO_FORCING}\nstart: /{regex_rule(grammar.text, grammar.field)}/\n"
        case GrammarKind.CHOICE:
            choices = " | ".join(json.dumps(one, ensure_ascii=False) for one in json.loads(grammar.text))
            return f"{NO_FORCING}\nstart: {choices}\n"
        case GrammarKind.EBNF:
            return _without_forcing(_ebnf(grammar.text, grammar.field))
        case GrammarKind.STRUCTURAL_TAG:
            json_writer = JsonWriter(json_rule, WHITESPACE)
            writer = tag_writer(grammar, specials, json_writer.rule)
            return _with_rules(f"{NO_FORCING}\n{writer.write(json.loads(grammar.text))}", json_writer)


def tag_writer(
    grammar: Grammar, specials: Mapping[str, int], schema_rule: Callable[[Any], str] | None = None
) -> TagWriter:
    write_schema = schema_rule or json_rule
    return TagWriter(grammar.field, specials, write_schema, regex_rule, lambda text: _ebnf(text, grammar.field))


def json_lark(schema: Any) -> str:
    writer = JsonWriter(json_rule, WHITESPACE)
    return _with_rules(f"start: {writer.rule(schema)}\n", writer)


def find_bound_fault(schema: Any) -> tuple[str, str] | None:
    """See `JsonWriter.find_bound_fault`."""
    return JsonWriter(json_rule, WHITESPACE).find_bound_fault(schema, _MAX_LIMIT)


def _with_rules(lark: str, writer: JsonWriter) -> str:
    return lark + "".join(f"{rule}\n" for rule in writer.rules)


def json_rule(schema: Any) -> str:
    if not isinstance(schema, dict):
        return "%json " + ("{}" if schema else '{"not":{}}')
    own = schema.get("x-guidance")
    options: dict[str, Any] = dict(own) if isinstance(own, dict) else {}
    if options.get("whitespace_flexible") is not False:
        options.setdefault("whitespace_pattern", WHITESPACE)
    within = _adapt_to_library({**schema, "x-guidance": options})
    return "%json " + json.dumps(within, ensure_ascii=False, separators=(",", ":"))


_NO_CONSTRAINT: dict[str, tuple[Any, ...]] = {
    "propertyNames": (True, {}, {"type": "string"}),
    "uniqueItems": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "patternProperties": ({},),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "additionalItems": (True, {}),
    "not": (False,),
}
"""Values with which a keyword allows everything. Schema generators write them; llguidance refuses some."""


def _adapt_to_library(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy without keywords that allow everything. Limits near 64 bits, which code generators write and the
    library lacks, are rounded inwards, so that outputs that match it also match the schema."""
    whole = dict(schema)
    pending: list[Any] = [whole]
    while pending:
        inner = pending.pop()
        for name, value in list(inner.items()):
            if any(type(value) is type(one) and value == one for one in _NO_CONSTRAINT.get(name, ())):
                del inner[name]
        if has_wide_bounds(inner):  # the library's exclusive bounds of integers are not exact there
            ends = zip(("minimum", "maximum"), range_of(inner), strict=True)
            for name in BOUNDS:
                inner.pop(name, None)
            inner |= {name: end for name, end in ends if end is not None}
        for name in inner.keys() & {*_LEAST, *_GREATEST}:
            value = inner[name]
            if is_number(value):
                value = round_to_float(value, up=name in _LEAST)
                inner[name] = max(value, -_MAX_LIMIT) if name in _LEAST else min(value, _MAX_LIMIT)
        pending.extend(_copied_parts(inner))
    return whole


def _copied_parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Replaces the schemas within a schema by copies, and yields those that are objects."""
    for name, value in schema.items():
        part: Any = schema
        places: Iterable[Any] = [name]
        if name in IN_MAPPINGS and isinstance(value, dict):
            schema[name] = part = dict(value)
            places = list(part)
        elif name in IN_LISTS and isinstance(value, list):
            schema[name] = part = list(value)
            places = range(len(part))
        elif name not in SINGLE:
            continue
        for place in places:
            if isinstance(part[place], dict):
                part[place] = dict(part[place])
                yield part[place]


def regex_rule(pattern: str, field: str) -> str:
    """Converts a regular expression for use between slashes. Anchors at its ends are removed: it always matches the
    whole text. Raises `GrammarError` for a backslash at the end, which the library drops silently."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1:
        raise GrammarError(f"{field}: the pattern ends in a backslash without a character to escape", param=field)
    pattern = pattern.removeprefix("^")
    if pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2 == 1:
        pattern = pattern[:-1]
    found: str = regex_to_lark(pattern, "d")
    return found.replace("\n", "\\n")


def _ebnf(grammar: str, field: str) -> str:
    try:
        text: str = any_to_lark(grammar)
    except GbnfToLarkError as error:
        raise GrammarError(f"{field} is not a valid grammar: {error}", param=field) from error
    return text


def _without_forcing(lark: str) -> str:
    """Adds the option to a grammar, and keeps the grammar's other options."""
    found = _OPTIONS.match(lark)
    if found is None:
        return f"{NO_FORCING}\n{lark}"
    try:
        options = json.loads(found[1])
    except ValueError:
        return lark  # llguidance reports the error
    return f"%llguidance {json.dumps({**options, 'no_forcing': True})}\n{lark[found.end() :]}"
