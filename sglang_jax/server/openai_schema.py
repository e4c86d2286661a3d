"""Bodies of OpenAI's routes, and their conversion to the engine's terms."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Tag

from sglang_jax.checkpoint.chat_contents import JoinedParts
from sglang_jax.checkpoint.chat_tools import is_variable, template_names
from sglang_jax.engine.types import SessionTurnInput, TextTokenizer
from sglang_jax.errors import ParameterError, cut, quote
from sglang_jax.server.errors import UnsupportedParameterError
from sglang_jax.server.fields import (
    Body,
    Many,
    Priority,
    Prompt,
    SessionParamsBody,
    ShortText,
    asks_for_nothing,
    cache_namespace,
)
from sglang_jax.server.openai_tools import CallBody, ToolBody, read_choice
from sglang_jax.server.sampling import OpenAISampling, one_of
from sglang_jax.server.tools import ToolRequest, tool_request

COMPLETION_DEFAULT_MAX_TOKENS = 16
"""Default of `max_tokens` for `/v1/completions`, as OpenAI documents."""

MAX_TEMPLATE_VARIABLES = 32
"""Maximum variables of `chat_template_kwargs`."""


class StreamOptions(Body):
    """`include_usage`: a last event without choices has the usage; `continuous_usage_stats`: each event has the usage
    so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIBody(OpenAISampling):
    """The fields of both routes. `extra_key` and `cache_salt` separate cached prefixes."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: ShortText | None = None
    priority: Priority | None = None
    extra_key: ShortText | None = None
    routing_key: ShortText | None = None
    cache_salt: ShortText | None = None
    session_params: SessionParamsBody | None = None

    @property
    def cache_namespace(self) -> str | None:
        return cache_namespace(self.extra_key, self.cache_salt)

    @property
    def session(self) -> SessionTurnInput | None:
        return None if self.session_params is None else self.session_params.turn_of()

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class CompletionBody(OpenAIBody):
    """`POST /v1/completions`."""

    false_counts: ClassVar[frozenset[str]] = frozenset({"add_special_tokens"})

    prompt: Prompt
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    def is_neutral(self, name: str, value: object) -> bool:
        """Whether it asks for special tokens, which the tokenizer adds anyway."""
        return name == "add_special_tokens" and value is True

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts; texts may be empty before a suffix. Raises `ParameterError`."""
        prompts: list[str | list[int]] = []
        match self.prompt:
            case str() | [int(), *_]:
                prompts = [self.prompt]  # type: ignore[list-item]  # a list that starts with an int holds no other type
            case list():
                prompts = [*self.prompt]
        if not prompts or not all(prompt or (self.suffix and prompt == "") for prompt in prompts):
            raise ParameterError("prompt is empty or holds an empty one; each needs at least one token", param="prompt")
        return prompts

    def check_best_of(self) -> None:
        """Raises `ParameterError` if only the best of several completions are to be returned."""
        if self.best_of not in (None, 1, self.n):
            raise ParameterError(
                f"best_of ({self.best_of}) must be 1 or equal n ({self.n or 1}): all completions are returned",
                param="best_of",
            )


class ContentPart(Body):
    """A part of a message; only text parts are supported."""

    passes_unknown_fields: ClassVar[bool] = True

    type: str
    text: str | None = None


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Many[ContentPart], Tag("<parts>")],
    Discriminator(lambda value: "<parts>" if isinstance(value, list) else "<text>"),
]


class ChatMessage(Body):
    """One message. Other fields, such as `name`, are passed to the chat template."""

    passes_unknown_fields: ClassVar[bool] = True

    role: str
    content: Content | None = None
    tool_calls: Many[CallBody] | None = None


class ThinkingBody(Body):
    """`thinking` in the form of Anthropic, DeepSeek and GLM."""

    type: Literal["enabled", "disabled"]


def _thinks(value: object) -> object:
    if not isinstance(value, dict):
        return value
    for name, other in value.items():
        if name != "type" and not asks_for_nothing(other):
            field = f"thinking.{cut(name)}"
            raise UnsupportedParameterError(
                f"{field} is not supported, and ignoring it could change the output; remove it (got {quote(other)})",
                param=field,
            )
    match value.get("type"):
        case "enabled" | "disabled" as said:
            return said == "enabled"
    raise ParameterError(
        f"thinking must be a boolean or have the type enabled or disabled, got {quote(value)}", param="thinking"
    )


class ChatBody(OpenAIBody):
    """`POST /v1/chat/completions`."""

    false_counts: ClassVar[frozenset[str]] = frozenset({"add_generation_prompt"})

    messages: Many[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    continue_final_message: bool | None = None
    tools: Many[ToolBody] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: ShortText | None = None
    enable_thinking: bool | None = None
    thinking: Annotated[bool, BeforeValidator(_thinks, json_schema_input_type=bool | ThinkingBody)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def is_neutral(self, name: str, value: object) -> bool:
        """Whether it turns off the generation prompt of a message that is continued, which has none anyway."""
        return name == "add_generation_prompt" and value is False and self.continue_final_message is True

    @property
    def shows_reasoning(self) -> bool:
        """Whether the answer has the reasoning. Raises `ParameterError` if it is both dropped and left in the text."""
        if self.include_reasoning is False and self.separate_reasoning is False:
            raise ParameterError(
                "include_reasoning: false drops the reasoning, separate_reasoning: false leaves it in the text: "
                "give only one of them",
                param="include_reasoning",
            )
        return self.include_reasoning is not False

    def tool_request(self, most_tools: int) -> ToolRequest | None:
        """Returns the tools and how they may be called; None if no tool may be called. Raises `ParameterError`."""
        offered = [tool.offered(f"tools[{number}]") for number, tool in enumerate(self.tools or ())]
        parallel = self.parallel_tool_calls is not False
        return tool_request(offered, read_choice(self.tool_choice), parallel=parallel, most=most_tools)

    def template_variables(self, tokenizer: TextTokenizer) -> dict[str, Any]:
        """Returns the chat template's further variables. Raises `ParameterError`; `UnsupportedParameterError` for
        `reasoning_effort`, `enable_thinking` or `thinking` if the template has no such variable."""
        given = dict(self.chat_template_kwargs or {})
        if len(given) > MAX_TEMPLATE_VARIABLES:
            raise ParameterError(
                f"chat_template_kwargs may hold at most {MAX_TEMPLATE_VARIABLES} variables, got {len(given)}",
                param="chat_template_kwargs",
            )
        for name in given:
            if not is_variable(name):
                raise ParameterError(
                    f"chat_template_kwargs has {quote(name)}, which clients cannot set",
                    param="chat_template_kwargs",
                )
        if self.reasoning_effort not in (None, "none"):
            if "reasoning_effort" not in template_names(tokenizer.chat_template):
                raise UnsupportedParameterError(
                    "reasoning_effort is not supported by this model's chat template; remove it (got "
                    f"{quote(self.reasoning_effort)})",
                    param="reasoning_effort",
                )
            given.setdefault("reasoning_effort", self.reasoning_effort)
        for name, value in (("enable_thinking", self.enable_thinking), ("thinking", self.thinking)):
            if value is None:
                continue
            if name not in template_names(tokenizer.chat_template):
                raise UnsupportedParameterError(
                    f"{name} is not supported by this model's chat template; remove it (got {value})", param=name
                )
            given.setdefault(name, value)
        return given

    def token_limit(self) -> int | None:
        """Returns the maximum tokens of the answer; None for the rest of the context. Raises `ParameterError` below 1,
        as OpenAI does: this route has no field to report on a prompt without an answer."""
        limit = one_of("max_completion_tokens", self.max_completion_tokens, "max_tokens", self.max_tokens)
        if limit is not None and limit < 1:
            name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
            raise ParameterError(
                f"{name} must be at least 1 in a chat, got {limit}; to only compute a prompt, use completions or "
                "/generate",
                param=name,
            )
        return limit

    def check_logprobs(self) -> None:
        """Raises `ParameterError` for alternatives without `logprobs`."""
        if self.top_logprobs and not self.logprobs:
            raise ParameterError(
                f"top_logprobs ({self.top_logprobs}) needs logprobs to be true, got {self.logprobs!r}",
                param="top_logprobs",
            )

    def num_characters(self) -> int:
        contents = [message.content for message in self.messages]
        parts = [part.text or "" for content in contents if isinstance(content, list) for part in content]
        return sum(map(len, parts)) + sum(len(content) for content in contents if isinstance(content, str))

    def conversation(self, tokenizer: TextTokenizer) -> list[dict[str, object]]:
        """Returns the messages in the format of chat templates. Raises `ParameterError`."""
        if not self.messages:
            raise ParameterError("messages is empty; a conversation needs at least one message", param="messages")
        # Roles first: the required fields of a message depend on its role.
        tokenizer.check_roles([message.role for message in self.messages])
        return [_for_template(number, message) for number, message in enumerate(self.messages)]


def _for_template(number: int, message: ChatMessage) -> dict[str, object]:
    path = f"messages[{number}].content"
    content = message.content
    if message.tool_calls and message.role != "assistant":
        place = f"messages[{number}].tool_calls"
        raise ParameterError(
            f"{place} belong only to messages of the role `assistant`, got the role {quote(message.role)}", param=place
        )
    if content is None and message.role != "assistant":
        raise ParameterError(f"{path} is required for the role {quote(message.role)}", param=path)
    if isinstance(content, list):
        content = JoinedParts(_part_text(f"{path}[{place}]", part) for place, part in enumerate(content))
    extras = {name: value for name, value in (message.model_extra or {}).items() if value is not None}
    for_template: dict[str, object] = {**extras, "role": message.role, "content": content or ""}
    if message.tool_calls:
        for_template["tool_calls"] = [
            call.for_template(f"messages[{number}].tool_calls[{place}]")
            for place, call in enumerate(message.tool_calls)
        ]
    return for_template


def _part_text(path: str, part: ContentPart) -> str:
    if part.type != "text":
        raise ParameterError(f"{path} has type {quote(part.type)}; this model reads text only", param=f"{path}.type")
    if part.text is None:
        raise ParameterError(f"{path}.text is required", param=f"{path}.text")
    return part.text
