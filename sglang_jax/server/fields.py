"""Building blocks of request bodies: strict types, one-or-many values, and what happens to unknown fields."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Sequence
from typing import Annotated, ClassVar, Self, TypeVar
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from starlette.datastructures import Headers

from sglang_jax.config.suggestions import LEAST_ALIKE
from sglang_jax.engine.types import SessionTurnInput
from sglang_jax.errors import ParameterError, cut, shown
from sglang_jax.server.errors import ONE, UnsupportedParameterError
from sglang_jax.spellings import SAMPLING_FIELDS

MAX_STOP_STRINGS = 16
"""Most stop strings of one request (OpenAI allows 4)."""

MAX_NAME_CHARACTERS = 1024
"""Most characters of ids and keys that clients choose."""

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
company runs it (`provider`), what else the answer reports (`usage`, `timings_per_token`), or that cached prompts may be
reused (`cache_prompt`)."""

FALSE_ASKS = frozenset({"detokenize", "parse_tool_calls", "spaces_between_special_tokens"})
"""Fields of other engines that are true by default, on every route: false asks for something."""

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
"""Values that ask for what this server does anyway, of fields that it otherwise refuses."""


class Body(BaseModel):
    """A JSON object with strict types ("5" is not accepted as an integer, nor NaN as a number).

    A field that the model does not have is accepted only if it cannot change the output: it is in `IGNORED_FIELDS`, it
    asks for nothing (null, false, or empty), or it asks for what is done anyway (`NEUTRAL_VALUES`). Load generators
    and client libraries send many of those. Anything else is refused with the field's name.

    **Raises:** `UnsupportedParameterError`, which pydantic passes through.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True, protected_namespaces=())

    passes_unknown_fields: ClassVar[bool] = False

    false_counts: ClassVar[frozenset[str]] = frozenset()
    """The same as `FALSE_ASKS`, on this route."""

    @model_validator(mode="after")
    def _refuse_unknown_fields(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if self.passes_unknown_fields or name in IGNORED_FIELDS or self.is_done_anyway(name, value):
                continue
            if asks_for_nothing(value) and not (value is False and name in self.false_counts | FALSE_ASKS):
                continue
            if any(_are_equal(value, neutral) for neutral in NEUTRAL_VALUES.get(name, ())):
                continue
            raise UnsupportedParameterError(
                f"{cut(name)} is not supported, and ignoring it could change the output; "
                f"remove it (got {shown(value)}){self._meant(cut(name))}",
                param=cut(name),
            )
        return self

    def is_done_anyway(self, name: str, value: object) -> bool:
        """For values that are neutral in this kind of body only."""
        return False

    def _meant(self, name: str) -> str:
        """The field that was probably meant, as the end of an error."""
        fields = type(self).model_fields
        here = SAMPLING_FIELDS.get(name)
        near = [here] if here in fields else difflib.get_close_matches(name, fields, n=1, cutoff=LEAST_ALIKE)
        return f"; did you mean {near[0]}?" if near else ""


def asks_for_nothing(value: object) -> bool:
    """True for null, false, and the empty text, list and object."""
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def _are_equal(value: object, other: object) -> bool:
    """0 and 0.0 are, 0 and false are not."""
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


Item = TypeVar("Item")

Many = Annotated[list[Item], Field(fail_fast=True)]
"""A list, of whose faulty items the first alone is told: a megabyte of them would make errors for seconds."""

OneOrMany = Annotated[
    Annotated[Item, Tag(ONE)] | Annotated[Many[Item], Tag("<many>")],
    Discriminator(_one_or_many),
]
"""A value, or a list of them. The branch is chosen by looking for a list, so that an error speaks of one branch."""

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
"""An id or a key that a client chooses: kept with its request, and some repeated in each event."""

TokenId = Annotated[int, Field(strict=False)]
"""A token id as key of a JSON object, where it can only be a string of digits."""

ROUTING_KEY_HEADERS = ("x-routing-key", "x-smg-routing-key")
"""Headers that give the routing key of a request whose body has none; the second is that of SGLang's gateway."""

TENANT_HEADER = "x-tenant"
"""Whose a request is, percent-encoded, as a server says it to one behind it. Operators alone are believed."""

CLIENT_REQUEST_HEADER = "x-client-request"
"""Which of its client's requests a request is part of, percent-encoded: a server sends each prompt of one by itself to
those behind it. Operators alone are believed."""

SHARED_LENGTH_HEADER = "x-shared-length"
"""The number of a prompt's first tokens that other prompts probably begin with too, as a server says it to one behind
it."""

Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class SessionParamsBody(Body):
    """`session_params`: which session a prompt is the next turn of. `rid`: the turn before it, if it is given; `turn`:
    what this one is called, if not by its own rid; `opening`: see `SessionTurnInput`, as a server says it to one behind
    it."""

    id: ShortText | None = None
    rid: ShortText | None = None
    offset: int | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None
    turn: ShortText | None = None
    opening: Annotated[int, Field(ge=-1, lt=2**31)] | None = None

    def turn_of(self) -> SessionTurnInput | None:
        """What it asks of the engine; None if it asks for nothing. Raises `ParameterError` for what does not add to the
        session's end, naming it."""
        for name, value in (
            ("offset", self.offset),
            ("replace", self.replace),
            ("drop_previous_output", self.drop_previous_output),
        ):
            if value:
                raise ParameterError(
                    f"session_params.{name} would change earlier turns of a session, and turns can only be appended; "
                    f"remove it (got {value} for session {shown(self.id)})",
                    param=f"session_params.{name}",
                )
        if not self.id:
            if self.rid:
                raise ParameterError(
                    "session_params has a rid but no id; give the session's id", param="session_params.id"
                )
            return None
        return SessionTurnInput(self.id, self.rid or None, self.turn or None, self.opening)


def check_turns(turns: Sequence[SessionTurnInput | None]) -> None:
    """Raises `ParameterError` for prompts of one call that are turns of one session: which comes first is not said."""
    ids = [turn.session_id for turn in turns if turn is not None]
    twice = next((one for place, one in enumerate(ids) if one in ids[:place]), None)
    if twice is not None:
        raise ParameterError(
            f"{len(ids)} prompts of this request are turns of session {shown(twice)}; send them one after the other",
            param="session_params",
        )


def routing_key(field: str | None, headers: Headers) -> str | None:
    """The routing key of a request: its field, or else a header."""
    if field:
        return field
    return next((headers[name] for name in ROUTING_KEY_HEADERS if headers.get(name)), None)


def tenant_of(headers: Headers) -> str:
    """What `TENANT_HEADER` says; empty where it says nothing."""
    return unquote(headers.get(TENANT_HEADER, ""))[:MAX_NAME_CHARACTERS]


def flow_of(headers: Headers) -> str:
    """What `CLIENT_REQUEST_HEADER` says; empty where it says nothing."""
    return unquote(headers.get(CLIENT_REQUEST_HEADER, ""))[:MAX_NAME_CHARACTERS]


def shared_length_of(headers: Headers) -> int:
    """What `SHARED_LENGTH_HEADER` says; 0 where it says nothing, or no number of tokens."""
    text = headers.get(SHARED_LENGTH_HEADER, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def cache_namespace(extra_key: str | None, salt: str | None) -> str | None:
    """The engine's `extra_key` of a request: the client's own, or, where there is a salt, a digest of both. Who does
    not know a salt finds no other pair that gives the same: nothing is joined that could be cut at another place."""
    if not salt:
        return extra_key or None
    return "salted-" + hashlib.sha256(json.dumps([salt, extra_key or None]).encode()).hexdigest()


def as_list(value: Item | list[Item] | None) -> list[Item]:
    """The values of a `OneOrMany` field; none for null."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
