"""Request fields of OpenAI and of other engines that ask for a grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from sglang_jax.errors import ParameterError, quote
from sglang_jax.sampling.grammar import (
    Grammar,
    GrammarKind,
    any_json_object,
    choice_grammar,
    json_grammar,
    tag_grammar,
)

Reader = Callable[[Any, str], Grammar | None]
"""From a field's value and name to its grammar; None for a value that asks for none. Raises `ParameterError`."""


def grammar_of(fields: Mapping[str, Any]) -> Grammar | None:
    """The grammar that the fields of a request ask for, under any of their names; None if they ask for none. Fields
    whose value is None, and fields with other names, are ignored. Raises `ParameterError` for an invalid value, and for
    more than one grammar."""
    found: Grammar | None = None
    for name, read in READERS.items():
        value = fields.get(name)
        grammar = None if value is None else read(value, name)
        if grammar is None:
            continue
        if found is not None:
            raise ParameterError(f"{found.field} and {grammar.field} cannot both be given", param=grammar.field)
        found = grammar
    pattern = fields.get("guided_whitespace_pattern")
    if pattern is not None:
        return _with_whitespace(found, _text(pattern, "guided_whitespace_pattern"), "guided_whitespace_pattern")
    return found


def _text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise ParameterError(f"{field} must be a text, got {quote(value)}", param=field)
    return value


def _schema(value: object, field: str) -> Grammar:
    if not isinstance(value, (str, dict, bool)):
        raise ParameterError(f"{field} must be a JSON schema, or its text, got {quote(value)}", param=field)
    return json_grammar(value, field)


def _regex(value: object, field: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, _text(value, field), field)


def _ebnf(value: object, field: str) -> Grammar:
    return Grammar(GrammarKind.EBNF, _text(value, field), field)


def _tags(value: object, field: str) -> Grammar:
    if not isinstance(value, (str, dict)):
        raise ParameterError(f"{field} must be a JSON object, or its text, got {quote(value)}", param=field)
    return tag_grammar(value, field)


def _choice(value: object, field: str) -> Grammar:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ParameterError(f"{field} must be a list of texts, got {quote(value)}", param=field)
    return choice_grammar(value, field)


def _any_object(value: object, field: str) -> Grammar | None:
    if not isinstance(value, bool):
        raise ParameterError(f"{field} must be true or false, got {quote(value)}", param=field)
    return any_json_object(field) if value else None


def _response_format(value: object, field: str) -> Grammar | None:
    """`response_format` of OpenAI, in which SGLang also accepts structural tags."""
    wanted = _mapping(value, field)
    match wanted.get("type"):
        case "text":
            _refuse_others(wanted, ("type",), field)
            return None
        case "json_object":
            _refuse_others(wanted, ("type",), field)
            return any_json_object(field)
        case "json_schema":
            _refuse_others(wanted, ("type", "json_schema"), field)
            return named_schema(wanted.get("json_schema"), f"{field}.json_schema")
        case "structural_tag":
            return tag_grammar(wanted, field)
        case other:
            raise ParameterError(
                f"{field}.type must be text, json_object, json_schema or structural_tag, got {quote(other)}",
                param=f"{field}.type",
            )


def named_schema(value: object, field: str) -> Grammar:
    """Keywords that cannot be enforced are refused, unless `strict` is false: then they are ignored."""
    named = _mapping(value, field)
    _refuse_others(named, ("name", "description", "schema", "strict"), field)
    place = f"{field}.schema"
    schema = named.get("schema")
    if not isinstance(schema, (dict, bool)):
        raise ParameterError(f"{place} must be a JSON schema, got {quote(schema)}", param=place)
    if named.get("strict") not in (None, True, False):
        raise ParameterError(
            f"{field}.strict must be true or false, got {quote(named['strict'])}", param=f"{field}.strict"
        )
    if named.get("strict") is False and isinstance(schema, dict):
        return json_grammar(_with_options(schema, lenient=True), place)
    return json_grammar(schema, place)


_STRUCTURED: dict[str, Reader] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
    "json_object": _any_object,
    "structural_tag": _tags,
}
_STRUCTURED_OPTIONS = (
    "disable_fallback",
    "disable_any_whitespace",
    "disable_additional_properties",
    "whitespace_pattern",
)


def _structured_outputs(value: object, field: str) -> Grammar | None:
    """Reads `structured_outputs` of vLLM."""
    wanted = {name: one for name, one in _mapping(value, field).items() if one is not None}
    _refuse_others(wanted, (*_STRUCTURED, *_STRUCTURED_OPTIONS), field)
    if wanted.get("disable_additional_properties"):
        place = f"{field}.disable_additional_properties"
        raise ParameterError(f"{place} is not supported; set additionalProperties in the schema", param=place)
    found = [read(wanted[name], f"{field}.{name}") for name, read in _STRUCTURED.items() if name in wanted]
    given = [grammar for grammar in found if grammar is not None]
    if len(given) != 1:
        names = ", ".join(grammar.field for grammar in given) or "none"
        raise ParameterError(f"{field} must have exactly one of {', '.join(_STRUCTURED)}, got {names}", param=field)
    (grammar,) = given
    pattern = wanted.get("whitespace_pattern")
    if pattern is not None:
        return _with_whitespace(grammar, _text(pattern, f"{field}.whitespace_pattern"), f"{field}.whitespace_pattern")
    if wanted.get("disable_any_whitespace") and grammar.kind is GrammarKind.JSON_SCHEMA:
        schema = json.loads(grammar.text)
        if isinstance(schema, dict):
            return json_grammar(_with_options(schema, whitespace_flexible=False), grammar.field)
    return grammar


def _with_whitespace(grammar: Grammar | None, pattern: str, field: str) -> Grammar:
    if grammar is None or grammar.kind is not GrammarKind.JSON_SCHEMA:
        raise ParameterError(f"{field} needs a JSON schema", param=field)
    schema = json.loads(grammar.text)
    if not isinstance(schema, dict):
        raise ParameterError(f"{field} needs a JSON schema of an object, got {quote(schema)}", param=field)
    return json_grammar(_with_options(schema, whitespace_pattern=pattern), grammar.field)


def _with_options(schema: dict[str, Any], **options: object) -> dict[str, Any]:
    """A schema with options of its compilation; options that it already has take precedence."""
    own = schema.get("x-guidance")
    return {**schema, "x-guidance": {**options, **(own if isinstance(own, dict) else {})}}


def _mapping(value: object, field: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ParameterError(f"{field} must be an object, got {quote(value)}", param=field)
    return value


def _refuse_others(value: Mapping[str, Any], known: tuple[str, ...], field: str) -> None:
    for name, one in value.items():
        if name not in known and one is not None:
            raise ParameterError(
                f"{field} has no field {quote(name)}; there are {', '.join(known)}", param=f"{field}.{name}"
            )


READERS: dict[str, Reader] = {
    "response_format": _response_format,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _ebnf,
    "structural_tag": _tags,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _ebnf,
    "structured_outputs": _structured_outputs,
}

SPELLINGS = frozenset({*READERS, "guided_whitespace_pattern"})
"""All fields that concern grammars."""
