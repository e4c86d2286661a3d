"""Parses a line of the input: a request for one of the server's routes, or an error. A line without a seed gets one
derived only from its position in the input."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from sglang_jax.errors import quote
from sglang_jax.scheduler.request_builder import arrival_seed

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GENERATE = "/generate"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
EMBEDDINGS = "/v1/embeddings"

PROMPT_FIELDS = {
    COMPLETIONS: ("prompt",),
    CHAT: ("messages",),
    RESPONSES: ("instructions", "input"),
    MESSAGES: ("system", "messages"),
    GENERATE: ("text", "input_ids"),
    EMBEDDINGS: ("input",),
    "/v1/score": ("text_1", "query", "text_2", "items"),
    "/v1/rerank": ("query", "documents"),
    "/classify": ("input",),
}
"""The routes that a line may name, and their prompt fields."""

MAX_LINE_BYTES = 64 * 2**20
"""A longer line is an error, because a line must fit memory."""

SAMPLING_ROUTES = frozenset({COMPLETIONS, CHAT, RESPONSES, MESSAGES, GENERATE})
"""Those whose requests sample, and so have seeds."""

_PLAIN_FIELDS = {"prompt": COMPLETIONS, "messages": CHAT}
_NAMESPACE_FIELDS = ("cache_salt", "extra_key")

_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_SEVERAL_PROMPTS = re.compile(rb'\[\s*["\[]')
_LONE_SURROGATE = re.compile(rb"%b(?!%b)|(?<!%b)%b" % (_HIGH, _LOW, _HIGH, _LOW))

Fields = dict[str, Raw]
_fields = msgspec.json.Decoder(Fields)
_any = msgspec.json.Decoder()
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Line:
    """A request. `number`: its position in the input, from 0; messages show `number + 1`, as editors count lines.
    `body`: JSON, as a client would send it to `url`. `key`: shares a prefix with another line's key if their prompts
    do."""

    number: int
    custom_id: str
    url: str
    body: bytes
    key: bytes

    @property
    def size(self) -> int:
        """Estimated bytes in memory."""
        return len(self.body) + len(self.key)


@dataclass(frozen=True, slots=True)
class BadLine:
    """An invalid line: `code` is for programs, `message` for people."""

    number: int
    custom_id: str | None
    code: str
    message: str


class _LineError(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def parse_line(
    number: int, raw: bytes, defaults: Mapping[str, Raw], name: str | None = None, random_seed: int | None = None
) -> Line | BadLine:
    """Parses a line in OpenAI's batch format (`custom_id`, `method`, `url`, `body`), or a plain line with `prompt` or
    `messages` and further fields of the route. `defaults`: fields for bodies that leave them out; `name`: used if
    `custom_id` is left out, by default `line-1` and so on; `random_seed`: if given, a line without a seed gets one
    derived from it and the line's number."""
    custom_id: str | None = None
    try:
        fields = _object(raw, "the line")
        custom_id = _custom_id(fields)
        if "body" in fields:
            url, body = _batch_request(fields, custom_id)
        else:
            url, body = _plain_request(fields)
        for field in ("stream", "background"):
            if field in body and bytes(body[field]) == b"true":
                raise _LineError("unsupported_parameter", f"{field} must not be true: batches write complete responses")
        if url == RESPONSES:
            body.setdefault("store", Raw(b"false"))  # the answer is in the output file
        key = _key(url, body)
        for field, value in defaults.items():
            body.setdefault(field, value)
        if random_seed is not None and url in SAMPLING_ROUTES:
            add_seed(body, seed_of(random_seed, number))
        shown_id = custom_id if custom_id is not None else name or f"line-{number + 1}"
        return Line(number, shown_id, url, _encoder.encode(body), key)
    except _LineError as error:
        return BadLine(number, custom_id, error.code, str(error))


def _object(raw: bytes | Raw, what: str) -> Fields:
    try:
        return _fields.decode(raw)
    except msgspec.ValidationError as error:
        raise _LineError("malformed_request", f"{what} must be a JSON object: {_describe(error)}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _LineError("malformed_json", f"{what} is not valid JSON: {_describe(error, raw)}") from error


def _describe(error: Exception, raw: bytes | Raw = b"") -> str:
    if _LONE_SURROGATE.search(raw):  # the parser reports this as truncated
        return "a string contains a lone surrogate"
    text = str(error).removeprefix("JSON is malformed: ")
    return text[:1].lower() + text[1:]


def _value(fields: Fields, name: str) -> object:
    if name not in fields:
        return None
    try:
        return _any.decode(fields[name])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _LineError("malformed_json", f"{name} is not valid JSON: {_describe(error, fields[name])}") from error


def _custom_id(fields: Fields) -> str | None:
    """Accepts integers, which tables often have."""
    value = _value(fields, "custom_id")
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if value is None or isinstance(value, str):
        return value
    raise _LineError("invalid_value", f"custom_id must be a string, got {quote(value)}")


def _batch_request(fields: Fields, custom_id: str | None) -> tuple[str, Fields]:
    for plain in _PLAIN_FIELDS:
        if plain in fields:
            raise _LineError("malformed_request", f"{plain} must be inside body, because the line has one")
    if custom_id is None:
        raise _LineError("missing_field", "custom_id is required in a line with a body")
    method = _value(fields, "method")
    if method not in (None, "POST"):
        raise _LineError("invalid_value", f'method must be "POST", got {quote(method)}')
    url = _value(fields, "url")
    if url is None:
        raise _LineError("missing_field", f"url is required in a line with a body: one of {', '.join(PROMPT_FIELDS)}")
    if not isinstance(url, str) or url not in PROMPT_FIELDS:
        raise _LineError("invalid_value", f"url must be one of {', '.join(PROMPT_FIELDS)}, got {quote(url)}")
    return url, _object(fields["body"], "body")


def _plain_request(fields: Fields) -> tuple[str, Fields]:
    given = [name for name in _PLAIN_FIELDS if name in fields]
    if len(given) != 1:
        which = "both prompt and messages" if given else "none of them"
        raise _LineError("missing_field", f"a line must have one of body, prompt and messages, got {which}")
    for name in ("method", "url"):
        if name in fields:
            raise _LineError(
                "malformed_request", f"{name} is only for lines with a body; {given[0]} determines the route"
            )
    return _PLAIN_FIELDS[given[0]], {name: value for name, value in fields.items() if name != "custom_id"}


def _key(url: str, body: Fields) -> bytes:
    """Returns a key for grouping: the prompt's JSON text. Prompts whose keys share a prefix share one, too."""
    names = (*_NAMESPACE_FIELDS, *PROMPT_FIELDS[url])
    return b"\0".join((url.encode(), *(bytes(body[name]) for name in names if name in body)))


def parse_defaults(text: str) -> dict[str, Raw]:
    """Parses the fields of `--defaults`. Raises `ValueError` with the reason if they are invalid."""
    try:
        fields = _object(text.encode(), "defaults")
    except _LineError as error:
        raise ValueError(str(error)) from error
    taken = {"stream", "custom_id", "method", "url", "body"} | {
        name for names in PROMPT_FIELDS.values() for name in names
    }
    for name in fields:
        if name in taken:
            raise ValueError(f"defaults may only contain fields that lines can share, got {name}: remove it")
    return {name: Raw(bytes(value)) for name, value in fields.items()}


def seed_of(random_seed: int, number: int) -> Raw:
    """Returns the seed of a line as JSON. Seeds are far apart, as n completions use n successive ones."""
    return Raw(str(arrival_seed(random_seed, number + 1)).encode())


def add_seed(body: dict[str, Raw], seed: Raw) -> None:
    """Adds a seed to a body without one. Several prompts get none, because equal prompts would get equal answers."""
    prompts = [bytes(body[name]) for name in ("prompt", "text", "input_ids") if name in body]
    if any(_SEVERAL_PROMPTS.match(prompt) for prompt in prompts):
        return
    if "text" not in body and "input_ids" not in body:
        if _is_null(body, "seed"):
            body["seed"] = seed
    elif _is_null(body, "sampling_params"):
        body["sampling_params"] = Raw(_encoder.encode({"seed": seed}))
    elif bytes(body["sampling_params"]).startswith(b"{"):
        sampling = _fields.decode(body["sampling_params"])
        if _is_null(sampling, "seed") and _is_null(sampling, "sampling_seed"):
            body["sampling_params"] = Raw(_encoder.encode({**sampling, "seed": seed}))


def _is_null(fields: dict[str, Raw], name: str) -> bool:
    return name not in fields or bytes(fields[name]) == b"null"
