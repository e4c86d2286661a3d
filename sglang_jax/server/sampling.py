"""Converts the fields of a request body to `SamplingParams`. Only here do the names differ."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator

from sglang_jax.errors import ParameterError, RequestError, quote
from sglang_jax.sampling import GenerationDefaults, SamplingParams, with_defaults
from sglang_jax.sampling.grammar_spellings import SPELLINGS, grammar_of
from sglang_jax.sampling.params import MAX_LOGIT_BIAS
from sglang_jax.server.fields import MAX_STOP_STRINGS, Body, Many, OneOrMany, TokenId, as_list

Value = TypeVar("Value")


def _check_size(value: object) -> object:
    # Runs before the entries are validated, because each invalid entry would create an error.
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise ParameterError(
            f"logit_bias may hold at most {MAX_LOGIT_BIAS} entries, got {len(value)}", param="logit_bias"
        )
    return value


class SamplingFields(Body):
    """Fields with the same names on OpenAI's and the native routes. Null means the default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[TokenId, float], BeforeValidator(_check_size)] | None = None
    stop: OneOrMany[str] | None = None
    stop_token_ids: Many[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    n: int | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    do_sample: bool | None = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    structural_tag: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_whitespace_pattern: Any = None
    structured_outputs: Any = None

    def grammar_fields(self) -> dict[str, Any]:
        """Returns the body's fields that describe a grammar, for `grammar_of`."""
        return {name: value for name in SPELLINGS if (value := self.__dict__.get(name)) is not None}


class NativeSampling(SamplingFields):
    """`sampling_params` of `/generate`."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    sampling_seed: int | None = None


class OpenAISampling(SamplingFields):
    """Sampling fields of the OpenAI routes, with the extensions that other engines' clients send."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    response_format: Any = None
    include_stop_str_in_output: bool | None = None


SHARED_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop_token_ids",
    "ignore_eos",
    "seed",
    "n",
    "skip_special_tokens",
)

OPENAI_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""Names of `SamplingParams`, and OpenAI's names."""


def native_sampling(fields: NativeSampling, defaults: GenerationDefaults) -> SamplingParams:
    """Returns the parameters of a native request; `defaults` is for omitted fields. Raises `ParameterError`."""
    chosen: dict[str, Any] = _shared(fields)
    _add(chosen, "max_new_tokens", fields.max_new_tokens)
    _add(chosen, "min_new_tokens", fields.min_new_tokens)
    _add(chosen, "seed", one_of("seed", fields.seed, "sampling_seed", fields.sampling_seed))
    _add(chosen, "include_stop", fields.no_stop_trim)
    return with_defaults(chosen, defaults)


def openai_sampling(fields: OpenAISampling, max_tokens: int | None, defaults: GenerationDefaults) -> SamplingParams:
    """Returns the parameters of an OpenAI request. `max_tokens`: None for up to the context length; `defaults` fills in
    other fields. Raises `ParameterError` with OpenAI's name of the field."""
    chosen: dict[str, Any] = _shared(fields)
    chosen["max_new_tokens"] = max_tokens
    _add(chosen, "min_new_tokens", fields.min_tokens)
    include_stop = one_of(
        "include_stop_str_in_output", fields.include_stop_str_in_output, "no_stop_trim", fields.no_stop_trim
    )
    _add(chosen, "include_stop", include_stop)
    with renamed_fields(OPENAI_NAMES):
        return with_defaults(chosen, defaults)


def _shared(fields: SamplingFields) -> dict[str, Any]:
    stop = as_list(fields.stop)
    stop = [] if stop == [""] else stop  # one empty text: no stop strings
    if len(stop) > MAX_STOP_STRINGS:
        raise ParameterError(f"stop may hold at most {MAX_STOP_STRINGS} strings, got {len(stop)}", param="stop")
    values = fields.model_dump(include=set(SHARED_NAMES), exclude_none=True)
    if values.get("top_k") == 0:  # no limit, as in generation_config.json
        values["top_k"] = -1
    if fields.do_sample is False:
        values["temperature"] = 0.0
    return {**values, "stop": tuple(stop), "grammar": grammar_of(fields.grammar_fields())}


def _add(chosen: dict[str, Any], name: str, value: object) -> None:
    if value is not None:
        chosen[name] = value


def one_of(name: str, value: Value | None, other_name: str, other: Value | None) -> Value | None:
    """Returns the value of two fields with the same meaning. Raises `ParameterError` if both are set and differ."""
    if value is not None and other is not None and value != other:
        raise ParameterError(
            f"{name} ({quote(value)}) and {other_name} ({quote(other)}) mean the same but differ", param=name
        )
    return other if value is None else value


@contextmanager
def renamed_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the field of errors raised inside, see `rename_field`."""
    try:
        yield
    except RequestError as error:
        rename_field(error, names)
        raise


def rename_field(error: RequestError, names: Mapping[str, str]) -> None:
    """Changes an error, and its text, from the engine's name of a field to the client's, `names[param]`."""
    if error.param is not None and error.param in names:
        error.message = re.sub(rf"\b{error.param}\b", names[error.param], error.message)
        error.param = names[error.param]
