"""Whether a chat template supports tools: found out by rendering conversations with tools, calls and results.

If it does not, tools are described in the system message, and calls are written in the assistant's message, in the
format of Hermes' models, which most others have learnt too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import Any

import jinja2

from sglang_jax.checkpoint.chat_contents import text_of
from sglang_jax.errors import RequestError

Message = dict[str, Any]
Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]]], str]
"""Returns the text of a conversation with tools. Raises `RequestError` if the template refuses it."""

_TOOL, _KEY, _VALUE, _ID = "qz7tool", "qz7key", "qz7value", "callprobe"
PROBE = {
    "type": "function",
    "function": {"name": _TOOL, "description": "d", "parameters": {"type": "object", "properties": {}}},
}

_MAX_DEPTH = 100
"""Maximum nesting of arguments that are decoded."""

_INSTRUCTIONS = """You may call functions. Each line between <tools> and </tools> describes one in JSON:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as JSON between these tags, once for each call:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


class ArgumentForm(Enum):
    """How a template takes the arguments of a call: as an object, as JSON text, or not at all."""

    OBJECT = auto()
    TEXT = auto()
    NONE = auto()


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """How a template handles tools. `renders_tools`: it renders their descriptions."""

    renders_tools: bool
    arguments: ArgumentForm

    def decoded(self, message: Message) -> Message:
        """Returns the message with its calls' arguments as objects, if the template takes objects. Control tokens are
        marked after this, because JSON text may hold them in escapes."""
        calls = message.get("tool_calls")
        if not calls or self.arguments is not ArgumentForm.OBJECT:
            return message
        return {**message, "tool_calls": [_with_arguments(call, _as_object) for call in calls]}

    def prepared(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, has_system: bool
    ) -> tuple[list[Message], Sequence[Mapping[str, Any]]]:
        """Returns messages (already `decoded`) and tools as the template takes them. `has_system`: whether it knows the
        role `system`."""
        given = [self._with_calls(message) for message in messages]
        if not tools or self.renders_tools:
            return given, tools
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        instructions = _INSTRUCTIONS.format(tools=lines)
        if not has_system:
            place = next((number for number, message in enumerate(given) if message["role"] == "user"), 0)
            given[place] = {**given[place], "content": f"{instructions}\n\n{text_of(given[place]['content'])}"}
        elif given and given[0]["role"] == "system":
            given[0] = {**given[0], "content": f"{text_of(given[0]['content'])}\n\n{instructions}"}
        else:
            given.insert(0, {"role": "system", "content": instructions})
        return given, ()

    def _with_calls(self, message: Message) -> Message:
        calls = message.get("tool_calls")
        if not calls:
            return message
        if self.arguments is not ArgumentForm.NONE:
            if self.arguments is ArgumentForm.OBJECT:
                return message
            return {**message, "tool_calls": [_with_arguments(call, _as_text) for call in calls]}
        lines = [f"<tool_call>\n{_call_text(call['function'])}\n</tool_call>" for call in calls]
        said = message.get("content")
        others = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**others, "content": "\n".join([*([text_of(said)] if said else []), *lines])}


def _with_arguments(call: Mapping[str, Any], form: Callable[[Any], Any]) -> Message:
    function = call["function"]
    return {**call, "function": {**function, "arguments": form(function["arguments"])}}


def _as_object(arguments: Any) -> Any:
    """Decodes JSON text. Text that is not a JSON object is passed to the template unchanged."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) and not _deeper(value, _MAX_DEPTH) else arguments


def _deeper(value: object, most: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return inner is not None and (most == 0 or any(_deeper(one, most - 1) for one in inner))


def _as_text(arguments: Any) -> str:
    """Keeps the client's JSON text: it is what the model wrote, and so what is in the prefix cache."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _call_text(function: Mapping[str, Any]) -> str:
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'{{"name": {name}, "arguments": {_as_text(function["arguments"])}}}'


def learn_tools(render: Render) -> ToolSupport:
    user: Message = {"role": "user", "content": "a"}
    renders = any(
        _TOOL in _rendered(render, conversation, [PROBE])
        for conversation in ([user], [{"role": "system", "content": "c"}, user])
    )
    return ToolSupport(renders, _argument_form(render, user))


def _argument_form(render: Render, user: Message) -> ArgumentForm:
    as_text = json.dumps({_KEY: _VALUE})
    if any(
        _KEY in text and _VALUE in text and f"'{_KEY}'" not in text for text in _calls(render, user, {_KEY: _VALUE})
    ):
        return ArgumentForm.OBJECT
    if any(as_text in text for text in _calls(render, user, as_text)):
        return ArgumentForm.TEXT
    return ArgumentForm.NONE


def _calls(render: Render, user: Message, arguments: object) -> list[str]:
    call = {"id": _ID, "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
    called: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    result: Message = {"role": "tool", "content": "b", "name": _TOOL, "tool_call_id": _ID}
    system: Message = {"role": "system", "content": "c"}
    conversations = ([user, called, result], [system, user, called, result], [user, called])
    return [_rendered(render, conversation, [PROBE]) for conversation in conversations]


def _rendered(render: Render, conversation: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
    try:
        return render(conversation, tools)
    except RequestError:
        return ""


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "conversations",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
    }
)
"""Variables of a template that clients may not set; nor may they set the special tokens."""


@lru_cache(maxsize=4)
def template_names(template: str) -> frozenset[str]:
    """Names of the variables in a template's code, without attributes (`message.thinking`)."""
    found: set[str] = set()
    before = ""
    for _, kind, value in jinja2.Environment().lex(template):
        if kind == "name" and before != ".":
            found.add(value)
        if kind != "whitespace":
            before = value
    return frozenset(found)


def is_variable(name: str) -> bool:
    return _VARIABLE.fullmatch(name) is not None and name not in RESERVED and not name.endswith("_token")
