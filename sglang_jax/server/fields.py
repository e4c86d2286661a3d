"""Building blocks of request bodies: strict types, one-or-many values, and the check of unknown fields."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Sequence
from typing import Annotated, ClassVar, Self, TypeVar
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from starlette.datastructures import Headers

from sglang_jax.config.suggestions import MIN_SIMILARITY
from sglang_jax.engine.types import SessionTurnInput
from sglang_jax.errors import ParameterError, cut, quote
from sglang_jax.server.callers import Claim
from sglang_jax.server.errors import ONE, UnsupportedParameterError
from sglang_jax.spellings import SAMPLING_FIELDS

Item = TypeVar("Item")

MAX_STOP_STRINGS = 16
"""Maximum stop strings of one request (OpenAI allows 4)."""

MAX_NAME_CHARACTERS = 1024
"""Maximum characters of ids and keys that clients choose."""

IGNORED_FIELDS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "safety_identifier",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "guided_decoding_backend",
        "prediction",
        "keep_alive",
        "provider",
        "usage",
        "timings_per_token",
        "cache_prompt",
    }
)
"""Fields that cannot change the output. They describe the caller, how tools are called, or which library follows a
grammar; guess the output to make it faster (`prediction`); say how long a model stays loaded (`keep_alive`), which
company runs it (`provider`), what the answer reports in addition (`usage`, `timings_per_token`); or allow reuse of
cached prompts (`cache_prompt`)."""

FALSE_ASKS = frozenset({"detokenize", "parse_tool_calls", "spaces_between_special_tokens"})
"""Fields of other engines that are true by default on all routes, so that false asks for something."""

NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "reasoning_effort": ("none",),
    "length_penalty": (1,),
    "add_generation_prompt": (True,),
    "spaces_between_special_tokens": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "include_reasoning": (True,),
    "detokenize": (True,),
    "parse_tool_calls": (True,),
    "mirostat": (0,),
}
"""Values that ask for this server's behavior, of fields that it otherwise refuses."""


class Body(BaseModel):
    """A JSON object with strict types ("5" is not accepted as an integer, nor NaN as a number).

    A field that the model does not have is accepted only if it cannot change the output: it is in `IGNORED_FIELDS`,
    asks for nothing (null, false, or empty), or asks for the server's behavior (`NEUTRAL_VALUES`). Load generators and
    client libraries send many such fields. Others are refused with `UnsupportedParameterError`, which pydantic passes
    through.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True, protected_namespaces=())

    passes_unknown_fields: ClassVar[bool] = False

    false_counts: ClassVar[frozenset[str]] = frozenset()
    """The same as `FALSE_ASKS`, on this route."""

    @model_validator(mode="after")
    def _refuse_unknown_fields(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if self.passes_unknown_fields or name in IGNORED_FIELDS or self.is_neutral(name, value):
                continue
            if asks_for_nothing(value) and not (value is False and name in self.false_counts | FALSE_ASKS):
                continue
            if any(_are_equal(value, neutral) for neutral in NEUTRAL_VALUES.get(name, ())):
                continue
            raise UnsupportedParameterError(
                f"{cut(name)} is not supported, and ignoring it could change the output; "
                f"remove it (got {quote(value)}){self._meant(cut(name))}",
                param=cut(name),
            )
        return self

    def is_neutral(self, name: str, value: object) -> bool:
        """Whether a value is neutral in this kind of body."""
        return False

    def _meant(self, name: str) -> str:
        """Returns the most similar field, as the end of an error."""
        fields = type(self).model_fields
        here = SAMPLING_FIELDS.get(name)
        near = [here] if here in fields else difflib.get_close_matches(name, fields, n=1, cutoff=MIN_SIMILARITY)
        return f"; did you mean {near[0]}?" if near else ""


def required(value: Item | None, field: str) -> Item:
    """Returns the value of a field that only some kinds of bodies need. Raises `ParameterError` if it is absent."""
    if value is None:
        raise ParameterError(f"{field} is required", param=field, code="missing_field")
    return value


def asks_for_nothing(value: object) -> bool:
    """Whether a value is null, false, or an empty text, list or object."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def _are_equal(value: object, other: object) -> bool:
    """Whether two values are equal: 0 and 0.0 are, 0 and false are not."""
    return isinstance(value, bool) is isinstance(other, bool) and value == other


def _one_or_many(value: object) -> str:
    return "<many>" if isinstance(value, list) else ONE


def _prompt_shape(value: object) -> str:
    match value:
        case [str(), *_]:
            return "<texts>"
        case [list(), *_]:
            return "<id lists>"
        case list():
            return "<ids>"
    return "<text>"


Many = Annotated[list[Item], Field(fail_fast=True)]
"""A list whose validation stops at the first faulty item: creating errors for a megabyte of items takes seconds."""

OneOrMany = Annotated[
    Annotated[Item, Tag(ONE)] | Annotated[Many[Item], Tag("<many>")],
    Discriminator(_one_or_many),
]
"""A value or a list of values. A discriminator chooses the branch, so that an error names only one."""

Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[Many[str], Tag("<texts>")]
    | Annotated[Many[int], Tag("<ids>")]
    | Annotated[Many[Many[int]], Tag("<id lists>")],
    Discriminator(_prompt_shape),
]
"""OpenAI's completion prompt: a text, texts, token ids, or lists of token ids."""

TokenIds = Annotated[
    Annotated[Many[int], Tag("<ids>")] | Annotated[Many[Many[int]], Tag("<id lists>")],
    Discriminator(lambda value: "<id lists>" if _prompt_shape(value) == "<id lists>" else "<ids>"),
]
"""One list of token ids, or several."""

ShortText = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
"""An id or a key that a client chooses. It is kept with its request, and sometimes repeated in each event."""

TokenId = Annotated[int, Field(strict=False)]
"""A token id as key of a JSON object, where it can only be a string of digits."""

ROUTING_KEY_HEADERS = ("x-routing-key", "x-smg-routing-key")
"""Headers with the routing key of a request whose body has none; the second is that of SGLang's gateway."""

TENANT_HEADER = "x-tenant"
"""The header with a request's tenant, percent-encoded, from a server to those behind it. Ignored from non-operators."""

CLIENT_REQUEST_HEADER = "x-client-request"
"""The header with the client's request that a prompt belongs to, percent-encoded, from a server, which sends prompts
separately, to those behind it. Ignored from non-operators."""

SHARED_LENGTH_HEADER = "x-shared-length"
"""The header with the number of first tokens that other prompts probably share, from a server to those behind it."""

BACKGROUND_HEADER = "x-background"
"""The header that marks a request of a batch with 1, from a server to those behind it. Ignored from non-operators."""

Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class SessionParamsBody(Body):
    """`session_params`: the session whose next turn a prompt is. `rid`: the previous turn, optional; `turn`: the name
    of this turn, by default its own rid; `opening`, `whole`: see `SessionTurnInput`, set by a server in front of this
    one."""

    id: ShortText | None = None
    rid: ShortText | None = None
    offset: int | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None
    turn: ShortText | None = None
    opening: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    whole: bool | None = None

    def turn_of(self) -> SessionTurnInput | None:
        """Returns the session turn for the engine; None without a session. Raises `ParameterError` for turns that are
        not appended to the session's end."""
        for name, value in (
            ("offset", self.offset),
            ("replace", self.replace),
            ("drop_previous_output", self.drop_previous_output),
        ):
            if value:
                raise ParameterError(
                    f"session_params.{name} would change earlier turns of a session, and turns can only be appended; "
                    f"remove it (got {value} for session {quote(self.id)})",
                    param=f"session_params.{name}",
                )
        if not self.id:
            if self.rid:
                raise ParameterError(
                    "session_params has a rid but no id; give the session's id", param="session_params.id"
                )
            return None
        return SessionTurnInput(self.id, self.rid or None, self.turn or None, self.opening, bool(self.whole))


def check_turns(turns: Sequence[SessionTurnInput | None]) -> None:
    """Raises `ParameterError` if several prompts of one call are turns of the same session: their order is unknown."""
    ids = [turn.session_id for turn in turns if turn is not None]
    twice = next((one for place, one in enumerate(ids) if one in ids[:place]), None)
    if twice is not None:
        raise ParameterError(
            f"{len(ids)} prompts of this request are turns of session {quote(twice)}; send them one after the other",
            param="session_params",
        )


def routing_key(field: str | None, headers: Headers) -> str | None:
    """Returns the routing key of a request: its field, or else a header."""
    if field:
        return field
    return next((headers[name] for name in ROUTING_KEY_HEADERS if headers.get(name)), None)


def claim_of(headers: Headers) -> Claim:
    in_background = headers.get(BACKGROUND_HEADER) == "1"
    return Claim(_name_in(headers, TENANT_HEADER), _name_in(headers, CLIENT_REQUEST_HEADER), in_background)


def _name_in(headers: Headers, name: str) -> str:
    return unquote(headers.get(name, ""))[:MAX_NAME_CHARACTERS]


def shared_length_of(headers: Headers) -> int:
    """Returns the value of `SHARED_LENGTH_HEADER`; 0 if it is not a number of tokens."""
    text = headers.get(SHARED_LENGTH_HEADER, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def cache_namespace(extra_key: str | None, salt: str | None) -> str | None:
    """Returns the engine's `extra_key` of a request: the client's own or, with a salt, a digest of both. The encoding
    is unambiguous, so a client that does not know the salt cannot find another pair with the same digest."""
    if not salt:
        return extra_key or None
    return "salted-" + hashlib.sha256(json.dumps([salt, extra_key or None]).encode()).hexdigest()


def as_list(value: Item | list[Item] | None) -> list[Item]:
    """Returns the values of a `OneOrMany` field; an empty list for null."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
