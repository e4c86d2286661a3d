"""Bodies of OpenAI's Responses API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from sglang_jax.engine.types import TextTokenizer
from sglang_jax.errors import ParameterError, quote
from sglang_jax.sampling import GenerationDefaults, SamplingParams, with_defaults
from sglang_jax.sampling.grammar import Grammar, any_json_object
from sglang_jax.sampling.grammar_spellings import named_schema
from sglang_jax.server.context import ENGINE_NAMES
from sglang_jax.server.conversation import thinking_variables
from sglang_jax.server.errors import UnsupportedParameterError
from sglang_jax.server.fields import Body, Many, Priority, ShortText, cache_namespace, required
from sglang_jax.server.responses_items import Item, without_unknown_fields
from sglang_jax.server.sampling import renamed_fields
from sglang_jax.server.tools import NO_TOOLS, OfferedTool, ToolChoice, ToolRequest, tool_request

FIELD_NAMES = {
    **ENGINE_NAMES,
    "prompt": "input",
    "continues": "input",
    "max_new_tokens": "max_output_tokens",
    "top_logprobs_num": "top_logprobs",
}

HINTS = frozenset(
    {
        "access_programs",
        "background_options",
        "client_metadata",
        "context_management",
        "image",
        "max_tool_calls",
        "prompt_cache_options",
    }
)
"""Fields that do not change what one reply may be: they are about tools and images of OpenAI's service, what it caches,
when it runs work in the background, and how it shortens long conversations."""

EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Levels of effort that chat templates do not have."""

LOGPROBS, ENCODED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"

MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
"""Maximum entries of `metadata`, and maximum characters of a key and of a value, as in OpenAI's API."""


class ItemBody(Body):
    """An item of `input`. Other fields are for other types."""

    passes_unknown_fields: ClassVar[bool] = True

    type: str | None = None
    role: str | None = None
    id: str | None = None


Input = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Many[ItemBody], Tag("<items>")],
    Discriminator(lambda value: "<items>" if isinstance(value, list) else "<text>"),
]


class ResponsesTool(Body):
    """One of `tools`. `strict`: the arguments follow `parameters` exactly."""

    passes_unknown_fields: ClassVar[bool] = True

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def offered(self, path: str) -> OfferedTool:
        """Returns the tool at `path` of the request. Raises `ParameterError`, `UnsupportedParameterError`."""
        if self.type != "function":
            raise UnsupportedParameterError(
                f"{path}.type is {quote(self.type)}, a tool that this server does not have: describe it as a function, "
                "and run it in your program",
                param=f"{path}.type",
            )
        return OfferedTool.of(
            required(self.name, f"{path}.name"),
            self.description,
            self.parameters,
            strict=bool(self.strict),
            name_field=f"{path}.name",
            schema_field=f"{path}.parameters",
        )


class TextFormat(Body):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    json_schema: Any = Field(None, alias="schema")

    def grammar(self) -> Grammar | None:
        """Returns what the reply must follow; None for any text. Raises `ParameterError`."""
        match self.type:
            case "text":
                return None
            case "json_object":
                return any_json_object("text.format")
        return named_schema({"schema": self.json_schema, "strict": self.strict}, "text.format")


class TextConfig(Body):
    """`text`. `verbosity` is a hint."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Body):
    """`reasoning`. `summary`: reasoning is returned as its own summary, which is all of it. `context` is a hint: the
    chat template decides which earlier reasoning the model sees."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None

    def is_neutral(self, name: str, value: object) -> bool:
        return name == "context" or (name, value) == ("mode", "standard")


class ResponsesStreamOptions(Body):
    """`include_obfuscation` is not needed: it hides the length of events from eavesdroppers of unencrypted streams."""

    include_obfuscation: bool | None = None


@dataclass(frozen=True, slots=True)
class WantedReply:
    """What a client wants to see of a reply. `stream`: its events; `summary`: reasoning as its own summary; `encoded`:
    reasoning in the form for clients that store nothing."""

    stream: bool
    logprobs: bool
    summary: bool
    encoded: bool


class ResponsesBody(Body):
    """`POST /v1/responses`. `seed`, `top_k`, `priority`, `rid`, `extra_key`, `cache_salt` and `routing_key` are this
    server's additions."""

    model: str | None = None
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: ShortText | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    tools: Many[ResponsesTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Many[str] | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: ShortText | None = None
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    service_tier: ShortText | None = None
    seed: int | None = None
    top_k: int | None = None
    priority: Priority | None = None
    rid: ShortText | None = None
    extra_key: ShortText | None = None
    cache_salt: ShortText | None = None
    routing_key: ShortText | None = None

    def is_neutral(self, name: str, value: object) -> bool:
        return name in HINTS

    def check(self) -> None:
        """Raises `ParameterError` for fields that do not go together, or that exceed a limit."""
        metadata = self.metadata or {}
        if len(metadata) > MAX_METADATA:
            raise ParameterError(
                f"metadata may hold at most {MAX_METADATA} entries, got {len(metadata)}", param="metadata"
            )
        for key, value in metadata.items():
            if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
                raise ParameterError(
                    f"metadata may have keys of {MAX_METADATA_KEY} and values of {MAX_METADATA_VALUE} characters; "
                    f"{quote(key)} has {len(key)} and {len(value)}",
                    param="metadata",
                )
        if self.background and self.store is False:
            raise ParameterError("background needs store, got store: false", param="background")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise ParameterError(
                f"max_output_tokens must be at least 1, got {self.max_output_tokens}", param="max_output_tokens"
            )

    @property
    def stores(self) -> bool:
        return self.store is not False

    @property
    def cache_namespace(self) -> str | None:
        return cache_namespace(self.extra_key, self.cache_salt)

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def wanted(self) -> WantedReply:
        asked = self.reasoning
        return WantedReply(
            stream=bool(self.stream),
            logprobs=self.wants_logprobs,
            summary=asked is not None and (asked.summary or asked.generate_summary) is not None,
            encoded=ENCODED_REASONING in (self.include or ()),
        )

    def tool_request(self, most: int) -> ToolRequest | None:
        """Returns the tools and how they may be called; None if none may be. Raises `ParameterError`."""
        offered = [tool.offered(f"tools[{number}]") for number, tool in enumerate(self.tools or ())]
        parallel = self.parallel_tool_calls is not False
        return tool_request(offered, _read_choice(self.tool_choice), parallel=parallel, most=most)

    def template_variables(self, tokenizer: TextTokenizer) -> dict[str, object]:
        effort = None if self.reasoning is None else self.reasoning.effort
        if effort in (None, "none"):
            return thinking_variables(tokenizer, thinks=None if effort is None else False, effort=None)
        return thinking_variables(tokenizer, thinks=True, effort=EFFORTS.get(effort or "", effort))

    def sampling(self, defaults: GenerationDefaults) -> SamplingParams:
        """Returns the sampling parameters; `defaults` is for omitted fields. Raises `ParameterError`."""
        values = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "seed": self.seed}
        chosen = {name: value for name, value in values.items() if value is not None}
        if chosen.get("top_k") == 0:
            chosen["top_k"] = -1
        form = None if self.text is None else self.text.format
        grammar = None if form is None else form.grammar()
        with renamed_fields(FIELD_NAMES):
            return with_defaults({**chosen, "max_new_tokens": self.max_output_tokens, "grammar": grammar}, defaults)

    def input_items(self) -> list[Item]:
        """Returns the input as a list of items. Raises `ParameterError` if there is none."""
        if isinstance(self.input, str):
            content = [{"type": "input_text", "text": self.input}]
            return [{"type": "message", "role": "user", "content": content}]
        if not self.input:
            raise ParameterError("input is empty; a response needs at least one item", param="input")
        items = [body.model_dump(exclude_none=True) for body in self.input]
        typed = [{"type": "message" if "role" in item else "item_reference", **item} for item in items]
        return [without_unknown_fields(item) for item in typed]


def _read_choice(choice: Any) -> ToolChoice:
    match choice:
        case None | "auto":
            return ToolChoice()
        case "none":
            return NO_TOOLS
        case "required":
            return ToolChoice(required=True)
        case {"type": "function", "name": str(name)}:
            return ToolChoice(required=True, allowed=((name, "tool_choice.name"),))
        case {"type": "allowed_tools", "mode": ("auto" | "required") as mode, "tools": list(tools)}:
            names = []
            for number, one in enumerate(tools):
                place = f"tool_choice.tools[{number}]"
                match one:
                    case {"type": "function", "name": str(name)}:
                        names.append((name, f"{place}.name"))
                    case _:
                        raise ParameterError(f"{place} must name a function, got {quote(one)}", param=place)
            return ToolChoice(mode == "required", tuple(names))
    raise ParameterError(
        'tool_choice must be "auto", "none", "required", {"type": "function", "name": ...} or '
        f'{{"type": "allowed_tools", ...}}, got {quote(choice)}',
        param="tool_choice",
    )
