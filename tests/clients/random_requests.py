"""Random requests of the types that published clients declare: no server may fail on one. Each body follows the types,
except for a few changed values; replies of refused ones are the API's error objects, which the clients read."""

from __future__ import annotations

import collections.abc
import json
import os
import random
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin

import anthropic
import httpx2
import openai
import typing_extensions
from anthropic.types import message_count_tokens_params, message_create_params
from checks import KEY, MODEL, URL, check, main
from openai.types.chat import completion_create_params
from openai.types.responses import response_create_params

REQUESTS = int(os.environ.get("CLIENT_TEST_REQUESTS", "150"))
"""Requests of each kind."""

MAX_DEPTH = 7
REQUIRED = (typing.Required, typing_extensions.Required)
TEXTS = ("", "a", "Hello, wörld 😀", "user", "function", "auto", "x" * 300, "\x00\u2028<|im_end|>", "-1", "{}")


SERVED = ("text", "input_text", "output_text", "message", "function", "function_call", "function_call_output")
SERVED += (
    "tool_use",
    "tool_result",
    "thinking",
    "reasoning",
    "reasoning_text",
    "summary_text",
    "custom",
    "json_schema",
)
"""Values of `type` that are chosen more often than those that a server of text refuses."""

NAMED: dict[str, tuple[Any, ...]] = {
    "name": ("f", "g"),
    "call_id": ("c1", "c2"),
    "tool_call_id": ("c1", "c2"),
    "tool_use_id": ("c1", "c2"),
    "id": ("c1", "c2"),
    "arguments": ("{}", '{"a": 1}'),
    "encrypted_content": ("aGk=",),
    "role": ("user", "assistant", "user", "system"),
    "parameters": ({"type": "object"}, {}),
    "input_schema": ({"type": "object"},),
    "schema": ({"type": "object"},),
    "tool_choice": ("auto", "none", {"type": "auto"}),
    "previous_response_id": (None,),
    "audio": (None,),
    "function_call": ("auto",),
    "modalities": (["text"],),
    "service_tier": ("auto",),
    "type_": ("text",),
}
"""Values of fields whose name says more than their type."""


class RandomValues:
    """Makes values of types. `changed`: the chance that a value has another type."""

    def __init__(self, seed: int, changed: float) -> None:
        self.chance = random.Random(seed)
        self.changed = changed

    def any_value(self) -> Any:
        return self.chance.choice([None, True, 0, -1, 2**63, 1.5, "", "a", [], ["a"], {}, {"type": "a"}, [[{}]]])

    def value(self, kind: Any, depth: int = 0) -> Any:
        if self.chance.random() < self.changed:
            return self.any_value()
        origin, arguments = get_origin(kind), get_args(kind)
        if typing_extensions.is_typeddict(kind):
            return self.mapping(kind, depth)
        if origin in (Union, types.UnionType):
            served = [one for one in arguments if kind_of(one) in SERVED]
            return self.value(
                self.chance.choice(served if served and self.chance.random() < 0.95 else arguments), depth
            )
        if origin is Literal:
            return self.chance.choice(arguments)
        if origin in (*REQUIRED, typing.NotRequired, typing_extensions.NotRequired, typing.Annotated):
            return self.value(arguments[0], depth)
        if origin in (dict, collections.abc.Mapping):
            return {self.chance.choice("ab"): self.any_value() for _ in range(self.chance.randrange(3))}
        if isinstance(origin, type) and issubclass(origin, collections.abc.Iterable):
            count = self.chance.choice([0, 1, 1, 2, 3]) if depth < MAX_DEPTH else 0
            return [self.value(arguments[0], depth + 1) for _ in range(count)]
        simple: dict[Any, Callable[[], Any]] = {
            str: lambda: self.chance.choice(TEXTS),
            int: lambda: self.chance.choice([0, 1, 2, 5]),
            float: lambda: self.chance.choice([0.0, 0.5, 1, 3.0]),
            bool: lambda: self.chance.random() < 0.5,
            type(None): lambda: None,
        }
        return simple.get(kind, self.any_value)()

    def mapping(self, kind: Any, depth: int) -> dict[str, Any]:
        fields = typing_extensions.get_type_hints(kind, include_extras=True)
        wanted = 0.15 if depth == 0 else 0.4
        kept = [
            name
            for name in fields
            if get_origin(fields[name]) in REQUIRED or name == "input" or self.chance.random() < wanted
        ]
        return {
            name: self.chance.choice(NAMED[name])
            if name in NAMED and self.chance.random() < 0.97
            else self.value(fields[name], depth + 1)
            for name in kept
        }


def kind_of(kind: Any) -> str:
    """The value of `type` of a declared object; empty if it has none."""
    if not typing_extensions.is_typeddict(kind):
        return ""
    literals = str(typing_extensions.get_type_hints(kind).get("type", ""))
    return next((name for name in SERVED if repr(name) in literals), "")


def send(path: str, body: dict[str, Any], http: httpx2.Client) -> httpx2.Response:
    content = json.dumps(body)
    return http.post(
        path, content=content, headers={"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    )


def drive(
    path: str, kind: Any, adjust: Callable[[dict[str, Any]], dict[str, Any]], error_of: Callable[[Any], Any]
) -> None:
    """Sends random bodies of a type, and fails for each that the server does not handle."""
    statuses: dict[int, int] = {}
    with httpx2.Client(base_url=URL, timeout=300) as http:
        for seed in range(REQUESTS):
            values = RandomValues(seed, changed=0.02 if seed % 3 == 0 else 0.0)
            body = adjust(values.mapping(kind, 0))
            answer = send(path, body, http)
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert answer.status_code < 500, (seed, json.dumps(body), answer.text)
            if answer.status_code >= 400:
                assert error_of(answer.json()), (seed, answer.text)
            elif body.get("stream") is True:
                assert '"error"' not in answer.text or "server_error" not in answer.text, (seed, answer.text)
    print(f"{path}: {statuses}")
    assert statuses.get(200), "no request was valid"


def limited(field: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns a function that makes a body short to answer, and more often valid."""

    def adjust(body: dict[str, Any]) -> dict[str, Any]:
        short = {**body, "model": MODEL, field: body.get(field) if body.get(field) in (0, 1, -1, "a") else 3}
        return {name: value for name, value in short.items() if name not in UNSUPPORTED}

    return adjust


UNSUPPORTED = frozenset(
    {"conversation", "prompt", "moderation", "container", "audio", "web_search_options", "functions"}
)
"""Fields that are always refused: they would hide what else a body has."""


def openai_error(answer: Any) -> bool:
    return isinstance(answer["error"]["message"], str) and isinstance(answer["error"]["type"], str)


def anthropic_error(answer: Any) -> bool:
    return answer["type"] == "error" and answer["error"]["type"] in (
        "invalid_request_error",
        "not_found_error",
        "request_too_large",
    )


@check
def messages() -> None:
    kind = message_create_params.MessageCreateParamsNonStreaming
    drive("/v1/messages", kind, limited("max_tokens"), anthropic_error)


@check
def messages_in_streams() -> None:
    kind = message_create_params.MessageCreateParamsStreaming
    drive("/v1/messages", kind, limited("max_tokens"), anthropic_error)


@check
def counted_messages() -> None:
    kind = message_count_tokens_params.MessageCountTokensParams
    adjust = limited("unused")
    drive(
        "/v1/messages/count_tokens",
        kind,
        lambda body: {name: value for name, value in adjust(body).items() if name != "unused"},
        anthropic_error,
    )


@check
def responses() -> None:
    kind = response_create_params.ResponseCreateParamsNonStreaming
    drive("/v1/responses", kind, limited("max_output_tokens"), openai_error)


@check
def responses_in_streams() -> None:
    kind = response_create_params.ResponseCreateParamsStreaming
    drive("/v1/responses", kind, limited("max_output_tokens"), openai_error)


@check
def chats() -> None:
    kind = completion_create_params.CompletionCreateParamsNonStreaming
    drive("/v1/chat/completions", kind, limited("max_completion_tokens"), openai_error)


if __name__ == "__main__":
    print(f"openai {openai.__version__}, anthropic {anthropic.__version__}")
    main()
