"""Items of OpenAI's Responses API, and their conversion to messages of chat templates."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_jax.checkpoint.chat_contents import JoinedParts
from sglang_jax.errors import ParameterError, quote
from sglang_jax.replies.json_scan import json_value
from sglang_jax.server.conversation import Message
from sglang_jax.server.errors import UnsupportedParameterError

ROLES = ("user", "assistant", "system", "developer")

Item = dict[str, Any]
"""An item of a conversation as the API has it: a message, reasoning, a call, or the output of a call."""


_FIELDS = {
    "message": ("role", "content"),
    "reasoning": ("summary", "content", "encrypted_content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "item_reference": (),
}
"""Types of items, and their fields besides `type` and `id`."""

_TEXT_FIELDS = {
    **dict.fromkeys(("input_text", "output_text", "text", "reasoning_text", "summary_text"), "text"),
    "refusal": "refusal",
}
"""Types of parts, and the fields with their text."""


def without_unknown_fields(item: Item) -> Item:
    """Returns an item with nothing but the fields that are read, so that no other is stored with it. One of an unknown
    type, which will be refused, is returned as it is."""
    kind = item["type"]
    if kind not in _FIELDS:
        return item
    kept = {name: item[name] for name in ("type", "id", *_FIELDS[kind]) if name in item}
    for name, value in kept.items():
        if isinstance(value, list):
            parts = [_without_unknown_fields(part) for part in value]
            kept[name] = [part for part in parts if _texts([part])] if kind == "reasoning" else parts
        elif kind == "reasoning" and not isinstance(value, str):
            kept[name] = None
    return kept


def _without_unknown_fields(part: object) -> object:
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    field = _TEXT_FIELDS.get(kind, "") if isinstance(kind, str) else ""
    if not isinstance(part.get(field), str):
        return part
    return {"type": kind, field: part[field]} | ({"annotations": []} if kind == "output_text" else {})


def num_characters(items: Sequence[Item]) -> int:
    """Returns the number of characters of the items' texts."""
    count = 0
    for item in items:
        for name in ("content", "output", "summary"):
            value = item.get(name)
            count += sum(map(len, _texts(value if isinstance(value, list) else [{"text": value}])))
    return count


def _texts(parts: Sequence[object]) -> list[str]:
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return [text for text in texts if isinstance(text, str)]


def messages_of(earlier: Sequence[Item], items: Sequence[Item], instructions: str | None) -> list[Message]:
    """Returns a conversation's items as messages of chat templates. `earlier`: those of earlier responses, which were
    checked when they came; `items`: the input. Raises `ParameterError`, `UnsupportedParameterError` with the place of a
    fault."""
    messages: list[Message] = []
    names: dict[str, str] = {}
    for item in earlier:
        if item["type"] != "function_call" or item.get("status") == "completed":  # not one that the reply's end cut
            _add(messages, item, "previous_response_id", names)
    for number, item in enumerate(items):
        _add(messages, item, f"input[{number}]", names)
    if instructions:
        leading = messages[0] if messages and messages[0]["role"] in ("system", "developer") else None
        parts = [instructions, *(_parts(leading["content"]) if leading is not None else ())]
        content = parts[0] if len(parts) == 1 else JoinedParts(parts)
        messages[: 0 if leading is None else 1] = [{"role": "system", "content": content}]
    return messages


def _parts(content: object) -> Sequence[str]:
    return content.parts if isinstance(content, JoinedParts) else (str(content),)


def _add(messages: list[Message], item: Item, place: str, names: dict[str, str]) -> None:
    match item["type"]:
        case "message":
            role = _text(item, "role", place)
            if role not in ROLES:
                raise ParameterError(
                    f"{place}.role must be one of {', '.join(ROLES)}, got {quote(role)}", param=f"{place}.role"
                )
            content = _content(item.get("content"), f"{place}.content")
            if role == "assistant":
                _of_assistant(messages, new="content")["content"] = content
            else:
                messages.append({"role": role, "content": content})
        case "reasoning":
            _of_assistant(messages, new="reasoning_content")["reasoning_content"] = _reasoning(item, place)
        case "function_call":
            call_id, name, arguments = (_text(item, field, place) for field in ("call_id", "name", "arguments"))
            if not isinstance(json_value(arguments or "{}"), dict):
                field = f"{place}.arguments"
                raise ParameterError(f"{field} must be the text of a JSON object, got {quote(arguments)}", param=field)
            names[call_id] = name
            function = {"name": name, "arguments": arguments or "{}"}
            calls = _of_assistant(messages).setdefault("tool_calls", [])
            assert isinstance(calls, list)
            calls.append({"id": call_id, "type": "function", "function": function})
        case "function_call_output":
            call_id = _text(item, "call_id", place)
            if call_id not in names:
                field = f"{place}.call_id"
                raise ParameterError(f"{field} is {quote(call_id)}, and no earlier call has this id", param=field)
            output = _content(item.get("output"), f"{place}.output")
            messages.append({"role": "tool", "tool_call_id": call_id, "name": names[call_id], "content": output})
        case other:
            raise UnsupportedParameterError(
                f"{place}.type is {quote(other)}, and this server reads messages, reasoning, function calls and their "
                "outputs",
                param=f"{place}.type",
            )


def _of_assistant(messages: list[Message], new: str = "") -> Message:
    """Returns the assistant's message that an item belongs to: the last one, unless it has `new` or calls already."""
    last = messages[-1] if messages else None
    if last is not None and last["role"] == "assistant" and not (new and (last.get(new) or "tool_calls" in last)):
        return last
    messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(item: Mapping[str, Any], field: str, place: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        path = f"{place}.{field}"
        code = "missing_field" if value is None else "invalid_value"
        raise ParameterError(f"{path} must be a text, got {quote(value)}", param=path, code=code)
    return value


def _content(content: object, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ParameterError(f"{place} must be a text or a list of parts, got {quote(content)}", param=place)
    return JoinedParts(_part(part, f"{place}[{number}]") for number, part in enumerate(content))


def _part(part: object, place: str) -> str:
    match part:
        case {"type": "input_text" | "output_text" | "text", "text": str(text)}:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": str(kind)} if kind not in ("input_text", "output_text", "text", "refusal"):
            raise UnsupportedParameterError(
                f"{place} has type {quote(kind)}; this model reads text only", param=f"{place}.type"
            )
    raise ParameterError(f"{place} must be a part with a type and a text, got {quote(part)}", param=place)


def _reasoning(item: Item, place: str) -> str:
    """Returns the text of reasoning: its content, or else what this server encoded of it, or else its summary."""
    for field in ("content", "encrypted_content", "summary"):
        value = item.get(field)
        if field == "encrypted_content" and isinstance(value, str):
            return decoded(value, f"{place}.{field}")
        if isinstance(value, list) and value:
            return "\n".join(_texts(value))
    return ""


def encoded(reasoning: str) -> str:
    """Returns reasoning as `encrypted_content`, which a client that stores nothing sends back. It is not secret: the
    reply has it as well."""
    return base64.b64encode(reasoning.encode()).decode()


def decoded(text: str, place: str) -> str:
    """Returns the reasoning of `encoded`. Raises `ParameterError` for other text."""
    try:
        return base64.b64decode(text, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError) as error:
        raise ParameterError(f"{place} is not what this server returned: {error}", param=place) from error
