"""Structural tags for tool calls, and for answers after reasoning, so that the model writes what the parser reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from sglang_jax.errors import ParameterError, quote
from sglang_jax.replies.argument_schemas import ArgumentSchemas
from sglang_jax.replies.call_reader import MAX_TOOL_NAME_CHARACTERS
from sglang_jax.replies.forms import CallFamily, CallForm, Parameters, ReasoningForm, Tool, Written
from sglang_jax.sampling.grammar import Grammar, GrammarKind, tag_grammar

Format = dict[str, Any]
"""A `format` of XGrammar's structural tags. The `field` of a schema is the client's name for it, for errors."""

_BLANK = " "
"""Allowed white space between parts of arguments, at most once, as models write it."""

_ANY_TEXT: Format = {"type": "any_text"}


class ReasoningStart(Enum):
    """The state of the reasoning when a reply starts: already open, already closed, or not determined by the prompt."""

    OPEN = auto()
    CLOSED = auto()
    UNKNOWN = auto()


def calls_format(
    family: CallFamily,
    form: CallForm,
    tools: Sequence[Tool],
    *,
    required: bool,
    parallel: bool,
    answer: Format | None = None,
    text_begin: str = "",
) -> Format:
    """Returns the format of a reply that may call tools. `form`: the family's form that is enforced; `required`: the
    reply has at least one call, and only calls; `parallel`: there may be several; `answer`: the format of a reply
    without a call, None for any text; `text_begin`: the marker before an answer. Raises `ParameterError` for an answer
    that could be taken for a call."""
    written = form.written
    assert written is not None
    if answer is not None and not form.opening:
        raise ParameterError(
            "tools and an answer format cannot be combined for this model: it writes tool calls as plain JSON, so an "
            "answer could be mistaken for a call",
            param="tools",
        )
    several = parallel and not written.single
    tags = [_call(form, written, tool, by_schema=required or tool.strict) for tool in tools]
    listed = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": written.separator,
        "at_least_one": True,
        "stop_after_first": not several,
    }
    calls: Format = listed
    if written.before or written.after:
        calls = _sequence(_text(written.before), listed, _text(written.after))
    if required:
        return calls
    if answer is None and not family.starts_reply:
        trigger = form.opening if not written.before or written.before.startswith(form.opening) else written.before
        around = {"type": "tag", "begin": written.before, "content": listed, "end": written.after}
        return {
            "type": "triggered_tags",
            "triggers": [trigger],
            "tags": [around] if written.before else tags,
            "stop_after_first": not several,
        }
    # A reply that starts like a call is a call.
    text = {"type": "regex", "pattern": r"([^{\[\s](.|\n)*)?"} if not form.opening else _ANY_TEXT
    return {"type": "or", "elements": [calls, _sequence(_text(text_begin), text if answer is None else answer)]}


def after_reasoning(answer: Format, form: ReasoningForm, start: ReasoningStart, *, text: bool) -> Format:
    """Returns the format of an answer with the reasoning before it, unless that is over. `text`: the answer is text for
    the client, before which some models write a marker."""
    if text:
        answer = _sequence(_text(form.answer), answer)
    if start is ReasoningStart.CLOSED:
        return answer
    gap: Format = _text(form.then) if form.then else {"type": "regex", "pattern": r"\s{0,4}"}
    begin = "" if start is ReasoningStart.OPEN else form.begin
    reasoning = _sequence({"type": "tag", "begin": begin, "content": _ANY_TEXT, "end": form.end}, gap, answer)
    return reasoning if start is ReasoningStart.OPEN else {"type": "or", "elements": [reasoning, answer]}


def grammar_format(grammar: Grammar) -> Format:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return {"type": "json_schema", "json_schema": json.loads(grammar.text), "field": grammar.field}
        case GrammarKind.REGEX:
            return {"type": "regex", "pattern": grammar.text}
        case GrammarKind.CHOICE:
            return {"type": "or", "elements": [_text(one) for one in json.loads(grammar.text)]}
        case GrammarKind.EBNF:
            return {"type": "grammar", "grammar": grammar.text}
        case GrammarKind.STRUCTURAL_TAG:
            tags = json.loads(grammar.text)
            if "format" in tags:
                found: Format = tags["format"]
                return found
            return {"type": "structural_tag", **{name: tags.get(name) for name in ("structures", "triggers")}}


def grammar_of_format(found: Format, field: str) -> Grammar:
    """Returns the grammar of a format. Raises `ParameterError` if it is too long."""
    return tag_grammar({"type": "structural_tag", "format": found}, field)


def _call(form: CallForm, written: Written, tool: Tool, *, by_schema: bool) -> Format:
    part = next((part for part in form.parts if isinstance(part, Parameters)), None)
    schemas = ArgumentSchemas(tool.parameters, "" if part is None else part.end)
    if by_schema and (place := schemas.circular_reference()):
        raise ParameterError(f"{tool.field} at {place} refers only to itself", param=tool.field)
    if part is None:
        content = _json(_schema(tool, by_schema=by_schema), tool.field)
    else:
        content = _parameters(part, tool, schemas) if by_schema else _any_parameters(part, True, tool, schemas)
    return {
        "type": "tag",
        "begin": written.begin.replace("{name}", tool.name),
        "content": content,
        "end": written.end,
    }


def _schema(tool: Tool, *, by_schema: bool) -> Format:
    """Returns the schema of a tool's arguments, always an object. Refuses additional arguments unless the schema allows
    them: a tool can only use those that it declares."""
    if tool.parameters is None or not by_schema:
        return {"type": "object", "x-guidance": {"whitespace_pattern": _BLANK}}
    schema = _closed({"type": "object", **tool.parameters})
    return {**schema, "x-guidance": _options(tool)}


def _options(tool: Tool) -> Format:
    own = (tool.parameters or {}).get("x-guidance")
    return {"whitespace_pattern": _BLANK, "lenient": not tool.strict, **(own if isinstance(own, dict) else {})}


def _closed(schema: Mapping[str, Any]) -> Format:
    closed = dict(schema)
    properties = schema.get("properties")
    if isinstance(properties, dict):
        closed["properties"] = {
            name: _closed(one) if isinstance(one, dict) else one for name, one in properties.items()
        }
        named = set(schema.get("required") or ()) <= set(properties)
        if named and not {"patternProperties", "allOf", "anyOf", "oneOf", "$ref"} & set(schema):
            closed.setdefault("additionalProperties", False)
    if isinstance(schema.get("items"), dict):
        closed["items"] = _closed(schema["items"])
    return closed


def _parameters(part: Parameters, tool: Tool, schemas: ArgumentSchemas) -> Format:
    """Returns the format of arguments one by one, in the order of their schema."""
    several = {"anyOf", "oneOf", "allOf", "patternProperties"} & schemas.outer.keys()
    if several and tool.strict:
        raise ParameterError(
            f"{tool.field} has {min(several)} at the top level, which this model's call format cannot enforce; remove "
            "strict, or list the arguments in properties only",
            param=tool.field,
        )
    required = [name for name in schemas.outer.get("required") or () if isinstance(name, str)]
    others = [name for name in required if name not in schemas.named]
    if "properties" not in schemas.outer and not others:
        return _any_parameters(part, schemas.of(""), tool, schemas)
    elements = []
    for name in (*schemas.named, *dict.fromkeys(others)):
        if any(mark in name for mark in ("<", ">", "\n")) or len(name) > MAX_TOOL_NAME_CHARACTERS:
            raise ParameterError(
                f"{tool.field} has an argument {quote(name)}, which this model's call format cannot express",
                param=f"{tool.field}.properties",
            )
        value = _value(part, schemas.of(name), tool, schemas, f"{tool.field}.properties.{name}")
        one = _sequence(_text(f"{part.begin}{name}"), value)
        elements.append(one if name in required else {"type": "or", "elements": [one, _text("")]})
    return _sequence(*elements) if elements else _text("")


def _any_parameters(part: Parameters, schema: Any, tool: Tool, schemas: ArgumentSchemas) -> Format:
    name: Format = {"type": "regex", "pattern": r"[^<>\s]([^<>\n]{0,62}[^<>\s])?"}
    value = _value(part, schema, tool, schemas, f"{tool.field}.additionalProperties")
    return {
        "type": "tags_with_separator",
        "tags": [{"type": "tag", "begin": part.begin, "content": _sequence(name, value), "end": ""}],
        "separator": "",
        "at_least_one": False,
    }


def _value(part: Parameters, schema: Any, tool: Tool, schemas: ArgumentSchemas, field: str) -> Format:
    """Returns the format of an argument after its name. Bare text ends at the first end marker, as in the parser."""
    begin = f"{part.named}\n"
    if not schemas.bare(schema):
        alone = schemas.self_contained(_closed(schema) if isinstance(schema, dict) else schema)
        if isinstance(alone, dict):
            alone = {**alone, "x-guidance": _options(tool)}
        return {"type": "tag", "begin": begin, "content": _json(alone, field), "end": f"\n{part.end}\n"}
    choices = schemas.choices(schema)
    if choices is None:
        return _sequence({"type": "tag", "begin": begin, "content": _ANY_TEXT, "end": part.end}, _text("\n"))
    content: Format = {"type": "or", "elements": [_text(one) for one in choices]}
    return {"type": "tag", "begin": begin, "content": content, "end": f"\n{part.end}\n"}


def _json(schema: Any, field: str) -> Format:
    return {"type": "json_schema", "json_schema": schema, "field": field}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Format) -> Format:
    present = [one for one in elements if one != _text("")]
    if len(present) == 1:
        return present[0]
    return {"type": "sequence", "elements": present} if present else _text("")
