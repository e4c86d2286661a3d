"""Reads a checkpoint's description of its reply format, the `response_template` of transformers, as far as the
vocabulary of `forms` can express it. Its regular expressions are not run, because they come from the checkpoint and the
model's output is arbitrary. Patterns of a literal, a name and a literal are read; for others the family is found by
markers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from sglang_jax.replies.forms import (
    Arguments,
    CallFamily,
    CallForm,
    Calls,
    Literal,
    Name,
    Part,
    ReasoningForm,
    Space,
    Written,
)

_NAMED = re.compile(r"(?:\\s\*)?(?P<before>[^()]*?)(?:\(\?P<name>[^()]*\)(?P<after>[^()]*))?")
_ESCAPED = re.compile(r"\\([^\w\s])")
_OPERATORS = re.compile(r"[\\.^$*+?{}()|\[]")


def call_family(template: Mapping[str, Any]) -> CallFamily | None:
    """Returns the format of calls; None if `forms` cannot express it."""
    field = _field(template, "tool_calls")
    if field is None or field.get("content") != "json" or field.get("content_args"):
        return None
    end = field.get("close")
    opening = _opening(field)
    if opening is None or not isinstance(end, str):
        return None
    begin, after = opening
    if after is None:
        written = Written(begin + '{"name": "{name}", "arguments": ', "}" + end)
        return CallFamily((CallForm(begin, (Space(), Calls(), Space(), Literal(end, ends=True)), written),))
    between: tuple[Part, ...] = (Literal(after),) if after else ()
    parts = (Name(), *between, Space(), Arguments(), Space(), Literal(end, ends=True))
    return CallFamily((CallForm(begin, parts, Written(f"{begin}{{name}}{after}", end)),))


def reasoning_form(template: Mapping[str, Any]) -> ReasoningForm | None:
    """Returns the format of reasoning; None if `forms` cannot express it."""
    for name in ("reasoning_content", "reasoning", "thinking"):
        field = _field(template, name)
        if field is not None and isinstance(field.get("open"), str) and isinstance(field.get("close"), str):
            return ReasoningForm(field["open"].rstrip(), field["close"].strip())
    return None


def signs(template: Mapping[str, Any]) -> str:
    """Returns all texts of a template, to search them for the markers of a family."""
    return _ESCAPED.sub(r"\1", json.dumps(template, ensure_ascii=False).replace("\\\\", "\\"))


def _field(template: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    fields = template.get("fields")
    field = fields.get(name) if isinstance(fields, Mapping) else None
    return field if isinstance(field, Mapping) else None


def _opening(field: Mapping[str, Any]) -> tuple[str, str | None] | None:
    """Returns the text before a call, and that between its name and its arguments: None if these contain the name."""
    if isinstance(field.get("open"), str):
        return field["open"], None
    pattern = field.get("open_pattern")
    found = _NAMED.fullmatch(pattern) if isinstance(pattern, str) else None
    if found is None:
        return None
    before, after = _literal(found["before"]), _literal(found["after"] or "")
    if not before or after is None:
        return None
    return before, None if found["after"] is None else after


def _literal(pattern: str) -> str | None:
    """Returns the only text that a regular expression matches; None if it matches several."""
    if _OPERATORS.search(_ESCAPED.sub("", pattern)):
        return None
    return _ESCAPED.sub(r"\1", pattern)
