"""Clients of running servers. What a server sends is checked here: commands get objects of the expected form, or one
error that says what is wrong with the answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Generic, TypeVar

import click
import httpx2
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sglang_jax.cli.json_lines import first_fault
from sglang_jax.errors import ConfigError

CONNECT_TIMEOUT = 30.0

KEY_REMEDIES = {
    401: " (give the server's key with --api-key, or in SGLANG_JAX_API_KEY)",
    403: " (give the operators' key with --api-key, or in SGLANG_JAX_ADMIN_API_KEY)",
}
"""Remedies for answers of these statuses."""


class ProtocolError(click.ClickException):
    """The server's answer is not in the format of its route."""


class Answer(BaseModel):
    """A part of a server's answer. Servers may send more fields."""

    model_config = ConfigDict(frozen=True, extra="ignore")


Kind = TypeVar("Kind", bound=Answer)
OneChoice = TypeVar("OneChoice", bound=Answer)
Count = Annotated[int, Field(ge=0)]


class Model(Answer):
    id: str


class ModelList(Answer):
    """Of `/v1/models`."""

    data: list[Model]


class ModelInfo(Answer):
    """Of `/model_info`; other engines' servers may not send these fields."""

    vocab_size: Annotated[int, Field(ge=1)] | None = None
    tokenizer_path: str | None = None


class TokenCount(Answer):
    """Of `/tokenize`."""

    count: Count


class MetaInfo(Answer):
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count | None = None
    finish_reason: Any = None


class Generation(Answer):
    """An event of `/generate`, with the whole output so far."""

    text: str
    output_ids: list[int] = []
    meta_info: MetaInfo


class PromptDetails(Answer):
    cached_tokens: Count | None = None


class Usage(Answer):
    prompt_tokens: Count = 0
    completion_tokens: Count | None = None
    prompt_tokens_details: PromptDetails | None = None


class CompletionChoice(Answer):
    """Of `/v1/completions`: the whole text, or the new part in a stream."""

    text: str | None
    finish_reason: str | None = None

    @property
    def said(self) -> str:
        return self.text or ""


class Message(Answer):
    content: str | None = None


class ChatChoice(Answer):
    message: Message
    finish_reason: str | None = None

    @property
    def said(self) -> str:
        return self.message.content or ""


class ChatDelta(Answer):
    """A choice in a stream of chat completions."""

    delta: Message
    finish_reason: str | None = None

    @property
    def said(self) -> str:
        return self.delta.content or ""


class Choices(Answer, Generic[OneChoice]):
    choices: list[OneChoice]
    usage: Usage | None = None


class Completion(Choices[CompletionChoice]):
    """A whole answer of `/v1/completions`, or an event of its stream."""


class ChatCompletion(Choices[ChatChoice]):
    """A whole answer of `/v1/chat/completions`."""


class ChatChunk(Choices[ChatDelta]):
    """An event of its stream."""


def read_answer(kind: type[Kind], content: str | bytes, path: str) -> Kind:
    """Returns the JSON that the route `path` sent. Raises `ProtocolError`."""
    return check_answer(kind, parse_answer(content, path), path)


def parse_answer(content: str | bytes, path: str) -> Any:
    """Returns any JSON. Half of a surrogate pair, which cannot be sent back, becomes a question mark. Raises
    `ProtocolError`."""
    try:
        text = content if isinstance(content, str) else content.decode()
        answer = json.loads(text)
        if "\\u" in text:
            answer = json.loads(json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace"))
        return answer
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the answer of {path} could not be read: {describe(error)}") from error


def check_answer(kind: type[Kind], answer: object, path: str) -> Kind:
    """Returns the parsed JSON as an object of `kind`. Raises `ProtocolError` with the first field that differs."""
    try:
        return kind.model_validate(answer)
    except ValidationError as error:
        raise ProtocolError(f"the answer of {path} could not be read: {first_fault(error, 'answer')}") from error


@asynccontextmanager
async def open_client(base_url: str, api_key: str | None) -> AsyncIterator[httpx2.AsyncClient]:
    """Yields a client without a limit of connections: in a limited pool, requests would wait unnoticed. `base_url`: of
    the server, also with the `/v1` that OpenAI's clients need. Raises `ConfigError` for an invalid URL."""
    try:
        url = httpx2.URL(base_url)
    except httpx2.InvalidURL as error:
        raise ConfigError(f"--base-url {base_url} is not a URL: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"--base-url must start with http:// or https:// and a host, got {base_url}")
    async with httpx2.AsyncClient(
        base_url=url.copy_with(path=url.path.rstrip("/").removesuffix("/v1") or "/"),
        headers=_authorization(api_key),
        timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    ) as client:
        yield client


def _authorization(key: str | None) -> dict[bytes, bytes]:
    return {b"Authorization": f"Bearer {key}".encode()} if key else {}


async def call(client: httpx2.AsyncClient, method: str, path: str, *, key: str | None = None) -> bytes:
    """Calls a route of the server, and returns the body of its answer. `key`: None for the client's own. Raises
    `click.ClickException` without an answer, or for a status that is not a success."""
    try:
        response = await client.request(method, path, headers=_authorization(key))
    except httpx2.DecodingError as error:
        raise ProtocolError(f"the answer of {path} could not be read: {describe(error)}") from error
    except httpx2.RequestError as error:
        raise click.ClickException(
            f"no server answers at {client.base_url} ({describe(error)}); "
            "start one with `python -m sglang_jax.launch_server`, or name another with --base-url"
        ) from error
    if not response.is_success:
        raise click.ClickException(f"{method} {path} gave {failure(response)}")
    return response.content


def failure(response: httpx2.Response) -> str:
    """Returns what to say about an answer without success, whose body was read."""
    return f"{response.status_code}: {response.text[:200]}{KEY_REMEDIES.get(response.status_code, '')}"


async def first_model(client: httpx2.AsyncClient) -> str:
    """Returns the name of the server's first model. Raises `click.ClickException` if it has none, and as `call`."""
    models = read_answer(ModelList, await call(client, "GET", "/v1/models"), "/v1/models").data
    if not models:
        raise click.ClickException(f"{client.base_url} does not list a model at /v1/models: name it with --model")
    return models[0].id


async def model_info(client: httpx2.AsyncClient) -> ModelInfo:
    """Raises `click.ClickException` as `call`."""
    return read_answer(ModelInfo, await call(client, "GET", "/model_info"), "/model_info")


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
