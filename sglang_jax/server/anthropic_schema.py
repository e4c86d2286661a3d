"""Bodies of Anthropic's Messages API, and their conversion to conversations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from sglang_jax.checkpoint.chat_contents import JoinedParts
from sglang_jax.engine.types import TextTokenizer
from sglang_jax.errors import ParameterError, quote
from sglang_jax.sampling import GenerationDefaults, SamplingParams, with_defaults
from sglang_jax.sampling.grammar_spellings import grammar_of
from sglang_jax.server.context import ENGINE_NAMES
from sglang_jax.server.conversation import Message, thinking_variables
from sglang_jax.server.errors import UnsupportedParameterError
from sglang_jax.server.fields import MAX_STOP_STRINGS, Body, Many, Priority, ShortText, asks_for_nothing, required
from sglang_jax.server.sampling import renamed_fields
from sglang_jax.server.tools import NO_TOOLS, OfferedTool, ToolChoice, ToolRequest, tool_request
from sglang_jax.server.volatile_system import SystemBlock, SystemText, separate, with_reminder

FIELD_NAMES = {
    **ENGINE_NAMES,
    "prompt": "messages",
    "continues": "messages",
    "max_new_tokens": "max_tokens",
    "stop": "stop_sequences",
    "json_schema": "output_config.format.schema",
}

HINTS = frozenset(
    {"cache_control", "context_management", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id"}
)
"""Fields that do not change what a reply may be: where, how quickly and for whom it is computed, what a service caches,
and what it may leave out of long conversations."""

EFFORTS = {"xhigh": "high", "max": "high"}
"""Levels of effort above the highest one that chat templates have."""


class MessagesPart(Body):
    """A block of a message's content or of the system prompt. Other fields are for other types."""

    passes_unknown_fields: ClassVar[bool] = True

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Any = None
    is_error: bool | None = None
    source: dict[str, Any] | None = None
    title: str | None = None
    cache_control: dict[str, Any] | None = None


PartsOrText = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Many[MessagesPart], Tag("<parts>")],
    Discriminator(lambda value: "<parts>" if isinstance(value, list) else "<text>"),
]


class MessageBody(Body):
    """One message."""

    passes_unknown_fields: ClassVar[bool] = True

    role: Literal["user", "assistant", "system"]
    content: PartsOrText


class MessagesTool(Body):
    """One of `tools`. `type`: absent or `custom`; others are tools of Anthropic's service."""

    passes_unknown_fields: ClassVar[bool] = True

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    def offered(self, path: str) -> OfferedTool:
        """Returns the tool at `path` of the request. Raises `ParameterError`, `UnsupportedParameterError`."""
        if self.type not in (None, "custom"):
            raise UnsupportedParameterError(
                f"{path}.type is {quote(self.type)}, a tool that this server does not have: describe it as a tool with "
                "a name and an input_schema, and run it in your program",
                param=f"{path}.type",
            )
        return OfferedTool.of(
            required(self.name, f"{path}.name"),
            self.description,
            required(self.input_schema, f"{path}.input_schema"),
            strict=bool(self.strict),
            name_field=f"{path}.name",
            schema_field=f"{path}.input_schema",
        )


class MessagesToolChoice(Body):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def meaning(self) -> ToolChoice:
        """Raises `ParameterError` for a choice of a tool without its name."""
        match self.type:
            case "none":
                return NO_TOOLS
            case "any":
                return ToolChoice(required=True)
            case "tool":
                name = required(self.name, "tool_choice.name")
                return ToolChoice(required=True, allowed=((name, "tool_choice.name"),))
        return ToolChoice()


class ThinkingConfig(Body):
    """`thinking`. `budget_tokens` is a hint: `max_tokens` limits a reply with its thinking. `display`: `omitted` leaves
    the thinking out of the reply."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    """`output_config.format`."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """`output_config`. `effort`: passed to the chat template if it has one."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountBody(Body):
    """`POST /v1/messages/count_tokens`, and the fields of it that `POST /v1/messages` shares."""

    model: str
    messages: Many[MessageBody]
    system: PartsOrText | None = None
    tools: Many[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None

    def is_neutral(self, name: str, value: object) -> bool:
        return name in HINTS

    def tool_request(self, most: int) -> ToolRequest | None:
        """Returns the tools and how they may be called; None if none may be. Raises `ParameterError`."""
        offered = [tool.offered(f"tools[{number}]") for number, tool in enumerate(self.tools or ())]
        choice = self.tool_choice
        parallel = choice is None or not choice.disable_parallel_tool_use
        return tool_request(offered, ToolChoice() if choice is None else choice.meaning(), parallel=parallel, most=most)

    def template_variables(self, tokenizer: TextTokenizer) -> dict[str, object]:
        thinking = None if self.thinking is None else self.thinking.type != "disabled"
        effort = None if self.output_config is None else self.output_config.effort
        return thinking_variables(
            tokenizer, thinks=thinking, effort=None if effort is None else EFFORTS.get(effort, effort)
        )

    @property
    def continues(self) -> bool:
        """Whether the reply continues the last message."""
        return bool(self.messages) and self.messages[-1].role == "assistant"

    def num_characters(self) -> int:
        contents = [message.content for message in self.messages]
        return sum(map(_characters, (*contents, self.system or "")))

    def conversation(self) -> list[Message]:
        """Returns the messages in the format of chat templates. Raises `ParameterError`,
        `UnsupportedParameterError`."""
        if not self.messages:
            raise ParameterError("messages is empty; a conversation needs at least one message", param="messages")
        names: dict[str, str] = {}
        parts = chain.from_iterable(
            _converted(message, f"messages[{number}]", names) for number, message in enumerate(self.messages)
        )
        messages = [_joined(several) for several in _of_one_role(parts)]
        system = self._system()
        if not any(message["role"] != "assistant" for message in messages):
            system = SystemText((*system.stable, *system.volatile), ())
        messages = with_reminder(messages, system.volatile)
        if system.stable:
            messages.insert(0, {"role": "system", "content": JoinedParts(system.stable)})
        return messages

    def _system(self) -> SystemText:
        if self.system is None:
            return SystemText((), ())
        if isinstance(self.system, str):
            return separate([SystemBlock(self.system)])
        blocks = [
            SystemBlock(_text(part, f"system[{number}]"), part.cache_control is not None)
            for number, part in enumerate(self.system)
        ]
        return separate(blocks)


class MessagesBody(CountBody):
    """`POST /v1/messages`. `seed`, `priority`, `rid`, `extra_key` and `routing_key` are this server's additions."""

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Many[str] | None = None
    seed: int | None = None
    priority: Priority | None = None
    rid: ShortText | None = None
    extra_key: ShortText | None = None
    routing_key: ShortText | None = None

    def sampling(self, defaults: GenerationDefaults) -> SamplingParams:
        """Returns the sampling parameters; `defaults` is for omitted fields. Raises `ParameterError`."""
        stop = tuple(self.stop_sequences or ())
        if len(stop) > MAX_STOP_STRINGS:
            raise ParameterError(
                f"stop_sequences may hold at most {MAX_STOP_STRINGS} texts, got {len(stop)}", param="stop_sequences"
            )
        values = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "seed": self.seed}
        chosen = {name: value for name, value in values.items() if value is not None}
        if chosen.get("top_k") == 0:
            chosen["top_k"] = -1
        form = None if self.output_config is None else self.output_config.format
        schema = None if form is None else form.json_schema
        with renamed_fields(FIELD_NAMES):
            grammar = grammar_of({"json_schema": schema})
            return with_defaults(
                {**chosen, "max_new_tokens": self.max_tokens, "stop": stop, "grammar": grammar}, defaults
            )


def _characters(content: str | Sequence[MessagesPart]) -> int:
    if isinstance(content, str):
        return len(content)
    count = 0
    for part in content:
        count += len(part.text or "") + len(part.thinking or "")
        if isinstance(part.content, str):
            count += len(part.content)
        elif isinstance(part.content, list):
            nested = [one.get("text") for one in part.content if isinstance(one, dict)]
            count += sum(len(text) for text in nested if isinstance(text, str))
    return count


def _of_one_role(messages: Iterable[Message]) -> Iterator[list[Message]]:
    """Yields consecutive messages of the user, or of the assistant, together; each result of a tool by itself."""
    several: list[Message] = []
    for message in messages:
        if several and (several[-1]["role"] != message["role"] or message["role"] == "tool"):
            yield several
            several = []
        several.append(message)
    if several:
        yield several


def _joined(several: Sequence[Message]) -> Message:
    """Returns messages of one role as one."""
    if len(several) == 1:
        return several[0]
    texts = [part for message in several for part in _parts(message["content"])]
    joined: Message = {"role": several[0]["role"], "content": JoinedParts(texts) if len(texts) != 1 else texts[0]}
    if thinking := "".join(str(message.get("reasoning_content", "")) for message in several):
        joined["reasoning_content"] = thinking
    if calls := [call for message in several for call in _calls(message)]:
        joined["tool_calls"] = calls
    return joined


def _calls(message: Message) -> list[object]:
    calls = message.get("tool_calls", [])
    assert isinstance(calls, list)
    return calls


def _parts(content: object) -> Sequence[str]:
    if isinstance(content, JoinedParts):
        return content.parts
    return (str(content),) if content else ()


def _converted(message: MessageBody, path: str, names: dict[str, str]) -> Iterator[Message]:
    """Yields a message's content as messages of chat templates: each result of a tool is a separate message.
    `names`: the names of called tools by the ids of their calls, to which it adds."""
    role = message.role
    if isinstance(message.content, str):
        yield {"role": "user" if role == "system" else role, "content": _spoken(role, message.content)}
        return
    texts: list[str] = []
    calls: list[dict[str, object]] = []
    thinking = ""
    for number, part in enumerate(message.content):
        place = f"{path}.content[{number}]"
        match part.type:
            case "tool_result" if role == "user":
                if texts:
                    yield {"role": "user", "content": JoinedParts(texts)}
                    texts = []
                yield _result(part, place, names)
            case "tool_use" if role == "assistant":
                calls.append(_call(part, place, names))
            case "thinking" if role == "assistant":
                thinking += part.thinking or ""
            case "redacted_thinking" if role == "assistant":
                pass
            case _:
                texts.append(_spoken(role, _text(part, place)))
    if role == "assistant":
        said: Message = {"role": role, "content": JoinedParts(texts) if texts else ""}
        if thinking:
            said["reasoning_content"] = thinking
        if calls:
            said["tool_calls"] = calls
        yield said
    elif texts:
        yield {"role": "user", "content": JoinedParts(texts)}


def _spoken(role: str, text: str) -> str:
    """Returns a message's text. One of the system within the conversation is a reminder in the user's: most chat
    templates accept a system message only at the start."""
    return f"<system-reminder>\n{text}\n</system-reminder>" if role == "system" else text


def _call(part: MessagesPart, place: str, names: dict[str, str]) -> dict[str, object]:
    call_id, name = required(part.id, f"{place}.id"), required(part.name, f"{place}.name")
    names[call_id] = name
    arguments = required(part.input, f"{place}.input")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(part: MessagesPart, place: str, names: dict[str, str]) -> Message:
    field = f"{place}.tool_use_id"
    call_id = required(part.tool_use_id, field)
    if call_id not in names:
        raise ParameterError(f"{field} is {quote(call_id)}, and no earlier tool_use has this id", param=field)
    content = part.content
    if isinstance(content, list):
        parts = [_nested(one, f"{place}.content[{number}]") for number, one in enumerate(content)]
        content = JoinedParts(parts)
    elif not isinstance(content, str | None):
        raise ParameterError(
            f"{place}.content must be a text or a list of blocks, got {quote(content)}", param=f"{place}.content"
        )
    if part.is_error:
        content = f"Error: {content or ''}"
    return {"role": "tool", "tool_call_id": call_id, "name": names[call_id], "content": content or ""}


def _nested(value: object, place: str) -> str:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise ParameterError(f"{place} must be a block with a type, got {quote(value)}", param=place)
    if value["type"] == "text" and not isinstance(value.get("text"), str):
        raise ParameterError(f"{place}.text must be a text, got {quote(value.get('text'))}", param=f"{place}.text")
    if value["type"] == "text":
        return str(value["text"])
    return _document(value["type"], value.get("title"), value.get("source"), value.get("content"), place)


def _text(part: MessagesPart, place: str) -> str:
    if part.type == "text":
        return required(part.text, f"{place}.text")
    return _document(part.type, part.title, part.source, part.content, place)


def _document(kind: str, title: object, source: object, content: object, place: str) -> str:
    """Returns the text of a document or a search result. Raises `UnsupportedParameterError` for what is not text."""
    found: object = None
    if kind == "document" and isinstance(source, dict):
        match source:
            case {"type": "text", "data": str(found)}:
                pass
            case {"type": "content", "content": found}:
                pass
    elif kind == "search_result":
        found = content
    if isinstance(found, list):
        found = "\n".join(_nested(one, f"{place}.content[{number}]") for number, one in enumerate(found))
    if not isinstance(found, str):
        raise UnsupportedParameterError(
            f"{place} has type {quote(kind)}, which this model cannot read here: it reads text", param=f"{place}.type"
        )
    return f"{title}\n{found}" if isinstance(title, str) and not asks_for_nothing(title) else found
