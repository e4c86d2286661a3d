"""Checks the arguments of `Engine` and its calls."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import ValidationError

from sglang_jax.config import EngineConfig, OtherEnvironment, ServerConfig
from sglang_jax.config.suggestions import did_you_mean, value_not_implemented
from sglang_jax.engine.items import Prompt, RequestOptions
from sglang_jax.engine.types import GenerateInput, SessionTurnInput
from sglang_jax.errors import ConfigError, ParameterError
from sglang_jax.sampling import SamplingParams
from sglang_jax.spellings import NEEDLESS, REFUSED, SAMPLING_FIELDS, canonical, refusal

_CALLER_OF_ENGINE = 4
"""Stack frames from a warning here to the line that creates an `Engine`."""


def engine_config(config: EngineConfig | None, options: Mapping[str, Any]) -> EngineConfig:
    """Returns the options, given as `config` or by name. Raises `ConfigError`."""
    if config is None:
        for note in OtherEnvironment.read().notes():
            warnings.warn(note, stacklevel=_CALLER_OF_ENGINE - 1)
        try:
            return EngineConfig(**_canonical_fields(options))
        except ValidationError as error:
            raise ConfigError("; ".join(map(_problem, error.errors()))) from error
    if isinstance(config, str):
        raise ConfigError(f"pass the model by keyword: Engine(model_path={config!r})")
    if options:
        raise ConfigError(f"options must be given as config or by name, not both; got config and {', '.join(options)}")
    return config


def _problem(found: Any) -> str:
    """Formats an error of pydantic. The message of an error about several options already names them."""
    if not found["loc"]:
        return str(found["msg"]).removeprefix("Value error, ")
    where, message = ".".join(map(str, found["loc"])), str(found["msg"]).removeprefix("Value error, ")
    message = f"{message[:1].lower()}{message[1:]}"
    if (note := value_not_implemented(EngineConfig, where, found["input"])) is not None:
        return f"{where} {found['input']} is {note}; {message}"
    return f"{where}: {message}, got {found['input']!r}"


def _canonical_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Maps options to names of fields; warns about options without effect. Raises `ConfigError` for two names of one
    field, and for refused or unknown names."""
    fields: dict[str, Any] = {}
    for name, value in options.items():
        if (reason := refusal(name)) is not None:
            raise ConfigError(f"{name} is {reason}")
        field = name if name in EngineConfig.model_fields else canonical(name)
        if field not in EngineConfig.model_fields:
            if name in NEEDLESS:
                warnings.warn(f"{name} has no effect: {NEEDLESS[name].note}", stacklevel=_CALLER_OF_ENGINE)
                continue
            if field in ServerConfig.model_fields:
                raise ConfigError(f"{name} is a server option, and Engine starts no server")
            sampling = SAMPLING_FIELDS.get(name, name)
            if sampling in SamplingParams.__dataclass_fields__:
                call = f"generate(..., SamplingParams({sampling}=...))"
                raise ConfigError(f"{name} is a sampling parameter, not an engine option: {call}")
            meant = did_you_mean(name, EngineConfig.model_fields, others=[*NEEDLESS, *REFUSED])
            raise ConfigError(f"there is no option {name!r}" + (f"; {meant}" if meant else ""))
        if field in fields:
            raise ConfigError(f"{field} is given twice, once as {name}")
        fields[field] = value
    return fields


def template_of(
    request: Mapping[str, Any], *, stream: bool = False, session: SessionTurnInput | None = None
) -> GenerateInput:
    """Returns a request with the fields that all requests of a call share. Raises `TypeError` for an unknown field."""
    for name in request:
        if name not in RequestOptions.__annotations__:
            sampling = SAMPLING_FIELDS.get(name, name)
            if sampling in SamplingParams.__dataclass_fields__:
                raise TypeError(f"{name} is not an argument: give sampling_params=SamplingParams({sampling}=...)")
            raise TypeError(f"there is no argument {name!r}; there are {', '.join(RequestOptions.__annotations__)}")
    return GenerateInput(prompt="", stream=stream, session=session, **request)


def is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether `prompts` is one prompt, not a list of prompts. Raises `ParameterError` for anything else."""
    if isinstance(prompts, (Mapping, bytes)) or not isinstance(prompts, (Sequence, np.ndarray)):
        raise ParameterError(
            f"prompts must be a text, a list of token ids, or a list of either, got {type(prompts).__name__}; "
            "conversations go to chat(messages)",
            param="prompt",
        )
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, np.integer)))
