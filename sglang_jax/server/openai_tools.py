"""Tools in OpenAI's chat bodies, and the calls of earlier turns."""

from __future__ import annotations

from typing import Any, ClassVar

from sglang_jax.errors import ParameterError, quote
from sglang_jax.replies.json_scan import json_value
from sglang_jax.server.fields import Body
from sglang_jax.server.tools import NO_TOOLS, OfferedTool, ToolChoice


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

    def offered(self, path: str) -> OfferedTool:
        """Returns the tool at `path` of the request. Templates get all its fields except `strict`, which is not for the
        model. Raises `ParameterError`."""
        if self.type != "function":
            raise ParameterError(
                f"{path}.type must be function, got {quote(self.type)}: this server has no tools of its own",
                param=f"{path}.type",
            )
        function = self.function
        if function is None:
            raise ParameterError(f"{path}.function is required", param=f"{path}.function", code="missing_field")
        for_template = {
            **self.model_dump(exclude={"function"}, exclude_none=True),
            "function": function.model_dump(exclude={"strict"}, exclude_none=True),
        }
        name_field, schema_field = f"{path}.function.name", f"{path}.function.parameters"
        return OfferedTool(
            function.name, function.parameters, bool(function.strict), for_template, name_field, schema_field
        )


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


def read_choice(choice: Any) -> ToolChoice:
    """Returns the meaning of `tool_choice`. Raises `ParameterError`."""
    match choice:
        case None | "auto":
            return ToolChoice()
        case "none":
            return NO_TOOLS
        case "required":
            return ToolChoice(required=True)
        case {"type": "function", "function": {"name": str(name)}}:
            return ToolChoice(required=True, allowed=((name, "tool_choice.function.name"),))
        case {"type": "allowed_tools", "allowed_tools": {"mode": ("auto" | "required") as mode, "tools": list(tools)}}:
            names = []
            for number, one in enumerate(tools):
                place = f"tool_choice.allowed_tools.tools[{number}]"
                match one:
                    case {"type": "function", "function": {"name": str(name)}}:
                        names.append((name, f"{place}.function.name"))
                    case _:
                        raise ParameterError(f"{place} must name a function, got {quote(one)}", param=place)
            return ToolChoice(mode == "required", tuple(names))
    raise ParameterError(
        'tool_choice must be "auto", "none", "required", {"type": "function", "function": {"name": ...}} or '
        f'{{"type": "allowed_tools", ...}}, got {quote(choice)}',
        param="tool_choice",
    )
