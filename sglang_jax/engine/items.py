"""Converts the items of a batch to requests."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import msgspec
import numpy as np

from sglang_jax.engine.item_stream import Item
from sglang_jax.engine.types import GenerateInput, TextTokenizer
from sglang_jax.errors import ParameterError
from sglang_jax.sampling import GenerationDefaults, SamplingParams, unknown_field, with_defaults
from sglang_jax.sampling.grammar_spellings import SPELLINGS, grammar_of

Prompt = str | Sequence[int]
Sampling = SamplingParams | Mapping[str, Any]


class RequestOptions(TypedDict, total=False):
    """Fields of `GenerateInput` that a call sets for all its prompts, or an item of a batch for itself."""

    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    extra_key: str | None
    priority: int
    routing_key: str | None
    continues_text: bool


_SAMPLING_FIELDS = frozenset({*(field.name for field in dataclasses.fields(SamplingParams)), *SPELLINGS})
_OPTIONS = frozenset(RequestOptions.__annotations__)
_KNOWN_FIELDS = _SAMPLING_FIELDS | _OPTIONS | {"prompt", "messages", "custom_id"}


def complete_sampling(sampling: Sampling, defaults: GenerationDefaults) -> SamplingParams:
    """Completes a mapping from `defaults`; returns `SamplingParams` as they are. Raises `ParameterError`."""
    if isinstance(sampling, SamplingParams):
        return sampling
    unknown = sorted(set(sampling) - _SAMPLING_FIELDS)
    if unknown:
        raise ParameterError(unknown_field("sampling_params", unknown[0]), param=unknown[0])
    return with_defaults(_with_grammar(sampling), defaults)


def request_of(template: GenerateInput, prompt: Prompt, sampling: SamplingParams, **changes: Any) -> GenerateInput:
    """Returns the request of one prompt, with a new id. `changes`: fields in which it differs from the template."""
    return dataclasses.replace(template, prompt=prompt, sampling=sampling, request_id=uuid.uuid4().hex, **changes)


def _with_grammar(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Renames the grammar's field, which has several spellings, to `grammar`. Raises `ParameterError`."""
    own = {name: value for name, value in fields.items() if name not in SPELLINGS}
    grammar = grammar_of(fields)
    return own if grammar is None else {**own, "grammar": grammar}


def _options(item: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: item[name] for name in _OPTIONS if name in item}
    try:
        return dict(msgspec.convert(given, RequestOptions))
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`")
        raise ParameterError(f"{name}: {message[:1].lower()}{message[1:]}", param=name) from error


class ItemConverter:
    """Converts an item to a request. `sampling`, `template`: for fields that an item leaves out. Raises
    `ParameterError` for an invalid item."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        defaults: GenerationDefaults,
        sampling: Sampling | None,
        template: GenerateInput,
    ) -> None:
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._call_sampling: Sampling = {} if sampling is None else sampling
        self._shared = complete_sampling(self._call_sampling, defaults)
        self._template = template

    def __call__(self, item: Item) -> GenerateInput:
        if isinstance(item, Mapping):
            return self._of_mapping(item)
        if isinstance(item, str) or (isinstance(item, (Sequence, np.ndarray)) and not isinstance(item, bytes)):
            return request_of(self._template, item, self._shared)
        raise ParameterError(
            f"an item must be a text, token ids, or a mapping with prompt or messages, got {type(item).__name__}"
        )

    def _of_mapping(self, item: Mapping[str, Any]) -> GenerateInput:
        unknown = [name for name in item if name not in _KNOWN_FIELDS]
        if unknown:
            raise ParameterError(
                f"an item has no field {unknown[0]!r}; there are {', '.join(sorted(_KNOWN_FIELDS))}",
                param=str(unknown[0]),
            )
        if ("prompt" in item) == ("messages" in item):
            which = "both" if "prompt" in item else "neither"
            raise ParameterError(f"an item must have prompt or messages, got {which}", param="prompt")
        changes: dict[str, Any] = _options(item)
        if "prompt" in item:
            prompt = item["prompt"]
        else:
            prompt = chat_ids(self._tokenizer, item["messages"])
            changes.setdefault("continues_text", False)
        return request_of(self._template, prompt, self._sampling(item), **changes)

    def _sampling(self, item: Mapping[str, Any]) -> SamplingParams:
        own = {name: item[name] for name in _SAMPLING_FIELDS if name in item}
        if not own:
            return self._shared
        if isinstance(self._call_sampling, SamplingParams):
            return dataclasses.replace(self._call_sampling, **_with_grammar(own))
        if not SPELLINGS.isdisjoint(own):  # replaces the grammar that all items share
            shared = {name: value for name, value in self._call_sampling.items() if name not in (*SPELLINGS, "grammar")}
            return with_defaults(_with_grammar({**shared, **own}), self._defaults)
        return with_defaults(_with_grammar({**self._call_sampling, **own}), self._defaults)


def chat_ids(tokenizer: TextTokenizer, messages: Any) -> list[int]:
    """Returns the prompt of a conversation. Raises `ParameterError` for messages that are not in OpenAI's form."""
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        raise ParameterError("messages must be a list of mappings, each with role and content", param="messages")
    if not messages:
        raise ParameterError("messages is empty; a conversation needs at least one message", param="messages")
    text = tokenizer.render_chat([dict(message) for message in messages])
    return tokenizer.encode(text, add_special_tokens=False)
