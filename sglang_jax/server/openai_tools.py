"""Tools of a chat: those offered, those that may or must be called, and the calls of earlier turns."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from sglang_jax.errors import ParameterError, quote
from sglang_jax.replies.call_reader import MAX_TOOL_NAME_CHARACTERS, NAME
from sglang_jax.replies.forms import Tool
from sglang_jax.replies.json_scan import json_value
from sglang_jax.server.fields import Body

MAX_TOOL_BYTES = 128 << 10
"""Maximum bytes of a request's tools as JSON, the same as for any grammar."""

MAX_SCHEMA_DEPTH = 32

_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


class FunctionBody(Body):
    """A function that the model may call."""

    passes_unknown_fields: ClassVar[bool] = True

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Body):
    """One of `tools`."""

    passes_unknown_fields: ClassVar[bool] = True

    type: str
    function: FunctionBody | None = None

    def for_template(self) -> dict[str, Any]:
        """Returns the tool in the format of chat templates, without `strict`, which is not for the model."""
        assert self.function is not None, "checked before"
        return {
            **self.model_dump(exclude={"function"}, exclude_none=True),
            "function": self.function.model_dump(exclude={"strict"}, exclude_none=True),
        }


class CalledBody(Body):
    """The function of an earlier call."""

    passes_unknown_fields: ClassVar[bool] = True

    name: str
    arguments: str | dict[str, Any]


class CallBody(Body):
    """One of an assistant's `tool_calls`."""

    passes_unknown_fields: ClassVar[bool] = True

    id: str | None = None
    type: str | None = None
    function: CalledBody

    def for_template(self, path: str) -> dict[str, Any]:
        """Returns the call for chat templates. Raises `ParameterError` unless the arguments are a JSON object."""
        arguments = self.function.arguments or "{}"
        if isinstance(arguments, str) and not isinstance(json_value(arguments), dict):
            place = f"{path}.function.arguments"
            raise ParameterError(f"{place} must be the text of a JSON object, got {quote(arguments)}", param=place)
        function = {**self.function.model_dump(exclude_none=True), "arguments": arguments}
        return {**self.model_dump(exclude_none=True), "type": "function", "function": function}


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


def read_tools(tools: Sequence[ToolBody] | None, choice: Any, parallel: bool | None, most: int) -> ToolRequest | None:
    """Validates the tools of a request; None if no tool may be called. Raises `ParameterError` with the place of the
    fault. `choice`: `tool_choice`; `parallel`: `parallel_tool_calls`; `most`: maximum tools."""
    offered = tools or ()
    if len(offered) > most:
        raise ParameterError(
            f"tools may hold at most {most} tools (--max-tools-per-request), got {len(offered)}", param="tools"
        )
    known: dict[str, Tool] = {}
    for number, tool in enumerate(offered):
        checked = _checked(tool, f"tools[{number}]")
        if checked.name in known:
            raise ParameterError(
                f"tools[{number}].function.name is {quote(checked.name)}, which another tool already has",
                param=f"tools[{number}].function.name",
            )
        known[checked.name] = checked
    shown_tools = tuple(tool.for_template() for tool in offered)
    _check_size(shown_tools)
    required, names = _read_choice(choice, known)
    if not names:
        return None
    return ToolRequest(shown_tools, tuple(known[name] for name in names), required, parallel is not False)


def _checked(tool: ToolBody, path: str) -> Tool:
    if tool.type != "function":
        raise ParameterError(
            f"{path}.type must be function, got {quote(tool.type)}: this server has no tools of its own",
            param=f"{path}.type",
        )
    if tool.function is None:
        raise ParameterError(f"{path}.function is required", param=f"{path}.function", code="missing_field")
    name, place = tool.function.name, f"{path}.function.name"
    if not NAME.fullmatch(name) or len(name) > MAX_TOOL_NAME_CHARACTERS:
        raise ParameterError(
            f"{place} must be 1 to {MAX_TOOL_NAME_CHARACTERS} of letters, digits, '_', '-' and '.', got {quote(name)}",
            param=place,
        )
    field = f"{path}.function.parameters"
    parameters = tool.function.parameters
    if parameters is not None:
        if parameters.get("type", "object") != "object":
            raise ParameterError(f"{field}.type must be object, got {quote(parameters['type'])}", param=f"{field}.type")
        for where, what in _faults(parameters, field, 0):
            raise ParameterError(f"{where} {what}", param=where)
    return Tool(name, parameters, bool(tool.function.strict), field)


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


def _read_choice(choice: Any, known: Mapping[str, Tool]) -> tuple[bool, Sequence[str]]:
    """Returns whether a tool must be called, and the names of those that may be."""
    match choice:
        case None | "auto":
            return False, tuple(known)
        case "none":
            return False, ()
        case "required":
            if not known:
                raise ParameterError(
                    "tool_choice is required, but the request has no tools; add tools, or remove tool_choice",
                    param="tool_choice",
                )
            return True, tuple(known)
        case {"type": "function", "function": {"name": str(name)}}:
            return True, (_offered(name, "tool_choice.function.name", known),)
        case {"type": "allowed_tools", "allowed_tools": {"mode": ("auto" | "required") as mode, "tools": list(tools)}}:
            names = []
            for number, one in enumerate(tools):
                place = f"tool_choice.allowed_tools.tools[{number}]"
                match one:
                    case {"type": "function", "function": {"name": str(name)}}:
                        names.append(_offered(name, f"{place}.function.name", known))
                    case _:
                        raise ParameterError(f"{place} must name a function, got {quote(one)}", param=place)
            if mode == "required" and not names:
                raise ParameterError("tool_choice requires a tool but allows none", param="tool_choice")
            return mode == "required", tuple(dict.fromkeys(names))
    raise ParameterError(
        'tool_choice must be "auto", "none", "required", {"type": "function", "function": {"name": ...}} or '
        f'{{"type": "allowed_tools", ...}}, got {quote(choice)}',
        param="tool_choice",
    )


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
