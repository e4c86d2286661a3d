"""Sampling options of `generate` and `chat`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import click

from sglang_jax.cli.options import Command, flag_name
from sglang_jax.errors import ParameterError
from sglang_jax.sampling import GenerationDefaults, SamplingParams
from sglang_jax.spellings import SAMPLING_FIELDS

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
_MODEL_DEFAULTS = {field.name for field in dataclasses.fields(GenerationDefaults)}


def _sampling_option(name: str, help_text: str, default: str | None) -> Callable[[Command], Command]:
    """Returns an option that is None unless given, because its default may depend on the model."""
    neutral = _DEFAULTS[name]
    default_text = default or (f"the model's, or {neutral}" if name in _MODEL_DEFAULTS else str(neutral))
    others = [flag_name(other) for other, ours in SAMPLING_FIELDS.items() if ours == name and other in _FLAG_ALIASES]
    return click.option(
        flag_name(name), *others, name, type=type(neutral), help=f"{help_text}  [default: {default_text}]"
    )


_FLAG_ALIASES = ("max_tokens", "min_tokens")
"""Names of other engines and routes that are also accepted as flags."""

_HELP = {
    "max_new_tokens": "maximum output tokens; 0: compute only the prompt",
    "min_new_tokens": "minimum output tokens",
    "temperature": "0 is greedy",
    "top_k": "number of top tokens to sample from; -1: all",
    "top_p": "cumulative-probability cutoff",
    "min_p": "minimum probability relative to the top token",
    "frequency_penalty": "subtracted from a token's logit each time it was generated",
    "presence_penalty": "subtracted from the logit of every generated token",
    "repetition_penalty": "penalty factor for tokens in the prompt or the output; 1: off",
}


def sampling_options(**defaults: str) -> Callable[[Command], Command]:
    """Adds sampling options to a click command, as keyword arguments that are None unless given. `defaults`: texts of
    the command's own defaults."""
    options = [
        *(_sampling_option(name, text, defaults.get(name)) for name, text in _HELP.items()),
        click.option("--stop", multiple=True, help="string that ends the output; may be repeated"),
        click.option("--ignore-eos", is_flag=True, help="continue past the model's end-of-sequence token"),
        click.option("--seed", type=int, help="seed that makes sampling repeatable"),
    ]

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def chosen_sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that were given. Raises `BadParameter` for a value out of range, before a model is loaded."""
    chosen = {name: value for name, value in given.items() if value is not None}
    try:
        SamplingParams(**chosen)
    except ParameterError as error:
        raise click.BadParameter(error.message, param_hint=flag_name(error.param or "sampling")) from error
    return chosen
