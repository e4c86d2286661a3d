"""Tools of a conversation, in no dialect's terms: those offered, and those that may or must be called."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang_jax.errors import ParameterError, quote
from sglang_jax.replies.call_reader import MAX_TOOL_NAME_CHARACTERS, NAME
from sglang_jax.replies.forms import Tool

MAX_TOOL_BYTES = 128 << 10
"""Maximum bytes of a request's tools as JSON, the same as for any grammar."""

MAX_SCHEMA_DEPTH = 32

_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A function that a client offers. `for_template`: in the format of chat templates; `name_field`, `schema_field`:
    the places of its name and its parameters in the client's request, for errors."""

    name: str
    parameters: Mapping[str, Any] | None
    strict: bool
    for_template: dict[str, Any]
    name_field: str
    schema_field: str

    @classmethod
    def of(
        cls,
        name: str,
        description: str | None,
        parameters: Mapping[str, Any] | None,
        *,
        strict: bool,
        name_field: str,
        schema_field: str,
    ) -> OfferedTool:
        """Returns a tool whose description for templates has only these fields."""
        function = {"name": name, "description": description, "parameters": parameters}
        shown = {field: value for field, value in function.items() if value is not None}
        return cls(name, parameters, strict, {"type": "function", "function": shown}, name_field, schema_field)

    def checked(self) -> Tool:
        """Returns the tool for the parser of replies. Raises `ParameterError` with the place of a fault."""
        if not NAME.fullmatch(self.name) or len(self.name) > MAX_TOOL_NAME_CHARACTERS:
            raise ParameterError(
                f"{self.name_field} must be 1 to {MAX_TOOL_NAME_CHARACTERS} of letters, digits, '_', '-' and '.', got "
                f"{quote(self.name)}",
                param=self.name_field,
            )
        field, parameters = self.schema_field, self.parameters
        if parameters is not None:
            if parameters.get("type", "object") != "object":
                raise ParameterError(
                    f"{field}.type must be object, got {quote(parameters['type'])}", param=f"{field}.type"
                )
            for where, what in _faults(parameters, field, 0):
                raise ParameterError(f"{where} {what}", param=where)
        return Tool(self.name, parameters, self.strict, field)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools may be called. `required`: at least one must be; `allowed`: names, each with its place in the
    request; None for all tools; `field`: the name of the choice in the request."""

    required: bool = False
    allowed: tuple[tuple[str, str], ...] | None = None
    field: str = "tool_choice"


NO_TOOLS = ToolChoice(allowed=())


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """The validated tools of a request.

    - `for_template`: all tools in the format of chat templates; `callable`: those that may be called.
    - `required`: at least one must be called; `parallel`: several calls are allowed.
    """

    for_template: tuple[dict[str, Any], ...]
    callable: tuple[Tool, ...]
    required: bool = False
    parallel: bool = True

    @property
    def enforced(self) -> bool:
        """Whether a grammar has to enforce the calls."""
        return self.required or any(tool.strict for tool in self.callable)


def tool_request(
    offered: Sequence[OfferedTool], choice: ToolChoice, *, parallel: bool, most: int
) -> ToolRequest | None:
    """Checks the tools of a request; None if no tool may be called. `parallel`: several calls are allowed; `most`:
    maximum tools. Raises `ParameterError` with the place of the fault."""
    if len(offered) > most:
        raise ParameterError(
            f"tools may hold at most {most} tools (--max-tools-per-request), got {len(offered)}", param="tools"
        )
    known: dict[str, Tool] = {}
    for tool in offered:
        checked = tool.checked()
        if checked.name in known:
            raise ParameterError(
                f"{tool.name_field} is {quote(checked.name)}, which another tool already has", param=tool.name_field
            )
        known[checked.name] = checked
    shown_tools = tuple(tool.for_template for tool in offered)
    _check_size(shown_tools)
    names = tuple(known)
    if choice.allowed is not None:
        names = tuple(dict.fromkeys(_offered(name, place, known) for name, place in choice.allowed))
    if choice.required and not names:
        which = "the request has no tools; add tools, or remove it" if choice.allowed is None else "it allows none"
        raise ParameterError(f"{choice.field} requires a tool, but {which}", param=choice.field)
    return ToolRequest(shown_tools, tuple(known[name] for name in names), choice.required, parallel) if names else None


def _faults(schema: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yields general faults of a schema: the place and the fault. Enforcing the schema may find more."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        yield path, f"must be a JSON schema, got {quote(schema)}"
        return
    if depth == MAX_SCHEMA_DEPTH:
        yield path, f"is nested more than {MAX_SCHEMA_DEPTH} levels deep"
        return
    kinds = schema.get("type")
    for kind in kinds if isinstance(kinds, list) else [] if kinds is None else [kinds]:
        if kind not in _TYPES:
            yield f"{path}.type", f"must be one of {', '.join(_TYPES)}, got {quote(kind)}"
    required = schema.get("required")
    if required is not None and not (isinstance(required, list) and all(isinstance(one, str) for one in required)):
        yield f"{path}.required", f"must be a list of names, got {quote(required)}"
    if not isinstance(schema.get("enum", []), list):
        yield f"{path}.enum", f"must be a list, got {quote(schema['enum'])}"
    for name in ("properties", "$defs", "definitions", "patternProperties"):
        inner = schema.get(name)
        if inner is not None and not isinstance(inner, Mapping):
            yield f"{path}.{name}", f"must be an object, got {quote(inner)}"
        for key, child in (inner or {}).items() if isinstance(inner, Mapping) else ():
            yield from _faults(child, f"{path}.{name}.{key}", depth + 1)
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        several = schema.get(name)
        if several is not None and not isinstance(several, list):
            yield f"{path}.{name}", f"must be a list of schemas, got {quote(several)}"
        for number, child in enumerate(several if isinstance(several, list) else ()):
            yield from _faults(child, f"{path}.{name}[{number}]", depth + 1)
    for name in ("items", "additionalProperties", "not"):
        if schema.get(name) is not None and not (name == "items" and isinstance(schema[name], list)):
            yield from _faults(schema[name], f"{path}.{name}", depth + 1)


def _check_size(tools: Sequence[Mapping[str, Any]]) -> None:
    size = len(msgspec.json.encode(tools))
    if size > MAX_TOOL_BYTES:
        raise ParameterError(f"tools have {size} bytes, the limit is {MAX_TOOL_BYTES}", param="tools")


def _offered(name: str, place: str, known: Mapping[str, Tool]) -> str:
    if name not in known:
        raise ParameterError(
            f"{place} is {quote(name)}, which is not one of the tools: {', '.join(known) or 'there are none'}",
            param=place,
        )
    return name


def with_short_ids(message: dict[str, object]) -> dict[str, object]:
    """Returns the message with call ids of nine letters and digits, as Mistral's templates require; hashes others."""
    changed = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short_id(str(message["tool_call_id"]))
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        changed["tool_calls"] = [{**call, "id": _short_id(str(call.get("id", "")))} for call in calls]
    return changed


def _short_id(call_id: str) -> str:
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:9]
