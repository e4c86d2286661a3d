"""Bodies of Ollama's API, and their conversion to conversations."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from sglang_jax.errors import ParameterError, quote
from sglang_jax.sampling import GenerationDefaults, SamplingParams, with_defaults
from sglang_jax.sampling.grammar import Grammar, any_json_object, json_grammar
from sglang_jax.server.context import ENGINE_NAMES
from sglang_jax.server.conversation import Message
from sglang_jax.server.errors import UnsupportedParameterError
from sglang_jax.server.fields import MAX_STOP_STRINGS, Body, Many, OneOrMany, as_list
from sglang_jax.server.openai_tools import ToolBody
from sglang_jax.server.sampling import renamed_fields
from sglang_jax.server.tools import ToolChoice, ToolRequest, tool_request

LATEST = ":latest"
"""The tag of a model whose name has none: a name with it and the name without it are the same."""

OPTION_NAMES = {
    "max_new_tokens": "num_predict",
    "repetition_penalty": "repeat_penalty",
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
}
"""Names of `SamplingParams`, and the options of this API with the same meaning."""

FIELD_NAMES = {
    **ENGINE_NAMES,
    **{name: f"options.{option}" for name, option in OPTION_NAMES.items()},
    "top_logprobs_num": "top_logprobs",
}

MACHINE_OPTIONS = frozenset(
    {
        *("numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "use_mmap", "use_mlock", "num_thread"),
        *("logits_all", "vocab_only", "embedding_only", "draft_num_predict"),
        *("num_keep", "mirostat_tau", "mirostat_eta"),
    }
)
"""Options about how a model is loaded, which its operator decides here; or about what this server never does: shifting
a full context (`num_keep`) and Mirostat, which is refused if it is turned on."""

NEUTRAL_OPTIONS: dict[str, object] = {"tfs_z": 1, "typical_p": 1, "penalize_newline": True}
"""Values of further options that ask for this server's behaviour."""

EVERY_TOKEN, NO_PENALTY = -1, 0
"""Values of `repeat_last_n`: penalties count all tokens, or none."""

NO_LIMIT = (-1, -2)
"""Values of `num_predict`: up to the end of the context."""


class OllamaOptions(Body):
    """`options`. Null means the default."""

    false_counts: ClassVar[frozenset[str]] = frozenset({"penalize_newline"})

    num_ctx: int | None = None
    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: OneOrMany[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def is_neutral(self, name: str, value: object) -> bool:
        neutral = NEUTRAL_OPTIONS.get(name)
        return name in MACHINE_OPTIONS or (value == neutral and isinstance(value, bool) is isinstance(neutral, bool))

    def check_context(self, context_length: int) -> None:
        """Raises `ParameterError` for a context that the model does not have."""
        if self.num_ctx is not None and not 1 <= self.num_ctx <= context_length:
            raise ParameterError(
                f"options.num_ctx must be 1 to {context_length}, this server's context length, got {self.num_ctx}",
                param="options.num_ctx",
            )

    def sampling(self, grammar: Grammar | None, defaults: GenerationDefaults) -> SamplingParams:
        """Returns the sampling parameters; `defaults` is for omitted options. Raises `ParameterError`."""
        stop = tuple(as_list(self.stop))
        if len(stop) > MAX_STOP_STRINGS:
            raise ParameterError(
                f"options.stop may hold at most {MAX_STOP_STRINGS} texts, got {len(stop)}", param="options.stop"
            )
        values = {name: self.__dict__[option] for name, option in OPTION_NAMES.items() if name != "stop"}
        chosen = {name: value for name, value in values.items() if value is not None}
        if chosen.get("top_k") == 0:
            chosen["top_k"] = -1
        if chosen.get("seed") == -1:  # any
            del chosen["seed"]
        self._limit_penalties(chosen, defaults)
        chosen["max_new_tokens"] = self._limit()
        with renamed_fields(FIELD_NAMES):
            return with_defaults({**chosen, "stop": stop, "grammar": grammar}, defaults)

    def _limit(self) -> int | None:
        limit = self.num_predict
        if limit is None or limit in NO_LIMIT:
            return None
        if limit < 1:
            raise ParameterError(
                f"options.num_predict must be at least 1, or -1 or -2 for no limit, got {limit}",
                param="options.num_predict",
            )
        return limit

    def _limit_penalties(self, chosen: dict[str, Any], defaults: GenerationDefaults) -> None:
        neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        effective = {**neutral, **defaults.recommended(), **chosen}
        if self.repeat_last_n in (None, EVERY_TOKEN):
            return
        if self.repeat_last_n == NO_PENALTY:
            chosen.update(neutral)
        elif any(effective[name] != value for name, value in neutral.items()):
            raise UnsupportedParameterError(
                "options.repeat_last_n is not supported with a penalty, which counts all tokens of prompt and output; "
                f"give -1, or remove it (got {self.repeat_last_n})",
                param="options.repeat_last_n",
            )


class OllamaCalledTool(Body):
    """The function of an earlier call."""

    passes_unknown_fields: ClassVar[bool] = True

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaEarlierCall(Body):
    """One of an assistant's `tool_calls`."""

    passes_unknown_fields: ClassVar[bool] = True

    id: str | None = None
    function: OllamaCalledTool


class OllamaMessageBody(Body):
    """One message. `tool_name`, `tool_call_id`: of a tool's result, the tool or its call."""

    role: str
    content: str | None = None
    thinking: str | None = None
    tool_calls: Many[OllamaEarlierCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaTool(ToolBody):
    """One of `tools`."""

    type: str = "function"


class OllamaBody(Body):
    """The fields of both generating routes. `format`: `json` or a JSON schema; `truncate` and `shift` ask what to do
    with a prompt or an output that is too long, which is an error or an end here."""

    model: str
    stream: bool | None = None
    format: Any = None
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def is_neutral(self, name: str, value: object) -> bool:
        return name in ("truncate", "shift") and isinstance(value, bool)

    @property
    def model_name(self) -> str:
        return self.model.removesuffix(LATEST)

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def thinks(self) -> bool | None:
        return None if self.think is None else self.think is not False

    @property
    def effort(self) -> str | None:
        """The effort of thinking that templates know."""
        return None if not isinstance(self.think, str) else {"max": "high"}.get(self.think, self.think)

    def chosen_options(self) -> OllamaOptions:
        return OllamaOptions() if self.options is None else self.options

    def grammar(self) -> Grammar | None:
        """Raises `ParameterError`."""
        match self.format:
            case None | "":
                return None
            case "json":
                return any_json_object("format")
            case dict():
                return json_grammar(self.format, "format")
        raise ParameterError(f"format must be json or a JSON schema, got {quote(self.format)}", param="format")

    def check_logprobs(self) -> None:
        """Raises `ParameterError` for alternatives without `logprobs`."""
        if self.top_logprobs and not self.logprobs:
            raise ParameterError(
                f"top_logprobs ({self.top_logprobs}) needs logprobs to be true, got {self.logprobs}",
                param="top_logprobs",
            )


class OllamaChatBody(OllamaBody):
    """`POST /api/chat`. Without messages, it only says whether the model is there."""

    prompt_field: ClassVar[str] = "messages"

    messages: Many[OllamaMessageBody] = Field(default_factory=list)
    tools: Many[OllamaTool] | None = None

    def tool_request(self, most: int) -> ToolRequest | None:
        """Returns the tools; None if there are none. Raises `ParameterError`."""
        offered = [tool.offered(f"tools[{number}]") for number, tool in enumerate(self.tools or ())]
        return tool_request(offered, ToolChoice(), parallel=True, most=most)

    @property
    def num_messages(self) -> int:
        return len(self.messages)

    def num_characters(self) -> int:
        return sum(len(message.content or "") + len(message.thinking or "") for message in self.messages)

    def conversation(self) -> list[Message]:
        """Returns the messages in the format of chat templates. Raises `ParameterError`."""
        return converted(self.messages)


class OllamaPromptBody(OllamaBody):
    """`POST /api/generate`. `raw`: the prompt is continued as it is, without the chat template. Without a prompt, it
    only says whether the model is there."""

    prompt_field: ClassVar[str] = "prompt"
    num_messages: ClassVar[int] = 2

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None

    def tool_request(self, most: int) -> ToolRequest | None:
        """Returns None: only chats have tools."""
        return None

    def conversation(self) -> list[Message]:
        """Returns the conversation that the prompt is."""
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return [*messages, {"role": "user", "content": self.prompt or ""}]

    def num_characters(self) -> int:
        return len(self.system or "") + len(self.prompt or "")

    def check_raw(self) -> None:
        """Raises `ParameterError` for fields that need the chat template."""
        for name, value in (("system", self.system), ("think", self.think)):
            if value:
                raise ParameterError(f"{name} needs the chat template, which raw leaves out: give only one", param=name)


def converted(messages: Sequence[OllamaMessageBody]) -> list[Message]:
    """Returns messages in the format of chat templates. Calls without an id, which this API need not have, get one, and
    a result is that of the first call that has none yet: of the tool that it names, if it names one. Raises
    `ParameterError`."""
    open_calls = _OpenCalls([])
    result: list[Message] = []
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        for name, role, value in (
            ("tool_calls", "assistant", message.tool_calls),
            ("thinking", "assistant", message.thinking),
            ("tool_name", "tool", message.tool_name),
            ("tool_call_id", "tool", message.tool_call_id),
        ):
            if value and message.role != role:
                raise ParameterError(
                    f"{place}.{name} belongs only to messages of the role `{role}`, got the role {quote(message.role)}",
                    param=f"{place}.{name}",
                )
        if message.content is None and message.role != "assistant":
            raise ParameterError(
                f"{place}.content is required for the role {quote(message.role)}", param=f"{place}.content"
            )
        said: Message = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            said["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [(call.id or f"call_{number}_{nth}", call) for nth, call in enumerate(message.tool_calls)]
            open_calls = _OpenCalls([(call_id, call.function.name) for call_id, call in calls])
            said["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call_id, call in calls
            ]
        if message.role == "tool":
            said |= open_calls.answered(message)
        result.append(said)
    return result


class _OpenCalls:
    """Calls of a message, each with its id and name, that have no result yet. A result is found without a search: a
    body may have thousands of both."""

    def __init__(self, calls: Sequence[tuple[str, str]]) -> None:
        self._names = dict(calls)
        self._ids: dict[str, deque[str]] = {}
        for call_id, name in self._names.items():
            self._ids.setdefault(name, deque()).append(call_id)

    def answered(self, message: OllamaMessageBody) -> Message:
        """Returns the id and the name of the call that a result answers, which is not open any more."""
        call_id, name = message.tool_call_id, message.tool_name
        found = call_id or (self._first_of(name) if name else next(iter(self._names), None))
        if found is not None and found in self._names and name in (None, "", self._names[found]):
            return {"tool_call_id": found, "name": self._names.pop(found)}
        return {key: value for key, value in (("tool_call_id", call_id), ("name", name)) if value}

    def _first_of(self, name: str) -> str | None:
        ids = self._ids.get(name, deque())
        while ids and ids[0] not in self._names:
            ids.popleft()
        return ids[0] if ids else None
