"""`generate`: one answer, streamed to the terminal."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import click

from sglang_jax.cli.options import Command, flag_name, options_of
from sglang_jax.config import EngineConfig
from sglang_jax.engine.types import GenerateOutput, TextTokenizer
from sglang_jax.errors import ParameterError
from sglang_jax.sampling import GenerationDefaults, SamplingParams

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
_OF_THE_MODEL = {field.name for field in dataclasses.fields(GenerationDefaults)}


@dataclass(slots=True)
class Timing:
    """When the answer's first and last output came, and the last output itself."""

    start: float
    first: float = 0.0
    last: float = 0.0
    output: GenerateOutput | None = None


def _sampling_option(name: str, help_text: str) -> Callable[[Command], Command]:
    """An option that is None unless it was given: what it is then may be up to the model."""
    default = _DEFAULTS[name]
    shown = f"the model's, or {default}" if name in _OF_THE_MODEL else str(default)
    return click.option(flag_name(name), name, type=type(default), help=f"{help_text}  [default: {shown}]")


@click.command()
@click.argument("prompt")
@click.option("--system", help="system message put before the prompt")
@click.option("--raw", is_flag=True, help="complete the prompt as it stands, without the chat template")
@_sampling_option("max_new_tokens", "most output tokens; 0: compute the prompt alone")
@_sampling_option("min_new_tokens", "least output tokens")
@_sampling_option("temperature", "0 is greedy")
@_sampling_option("top_k", "the number of likeliest tokens kept; -1: all")
@_sampling_option("top_p", "the probability that the likeliest tokens kept have together")
@_sampling_option("min_p", "the least share of the likeliest token's probability")
@_sampling_option("frequency_penalty", "taken from a token's logit for each time it was generated")
@_sampling_option("presence_penalty", "taken from the logit of every token generated")
@_sampling_option("repetition_penalty", "divides the logits of tokens in the prompt or the output; 1: off")
@click.option("--stop", multiple=True, help="string that ends the output; may be given several times")
@click.option("--ignore-eos", is_flag=True, help="go on after the model's end-of-sequence token")
@click.option("--seed", type=int, help="makes sampling repeatable")
@options_of(config=EngineConfig)
def generate(config: EngineConfig, prompt: str, system: str | None, raw: bool, **sampling: Any) -> int:
    """Answer PROMPT (`-`: read it from standard input), streaming to the terminal."""
    if raw and system is not None:
        raise click.UsageError("--system needs the chat template, which --raw leaves out")
    chosen = {name: value for name, value in sampling.items() if value is not None}
    try:
        SamplingParams(**chosen)  # here, so that a bad value is told before the model is loaded
    except ParameterError as error:
        raise click.BadParameter(error.message, param_hint=flag_name(error.param or "sampling")) from error
    if prompt == "-":
        prompt = sys.stdin.read()

    from sglang_jax.engine.engine import Engine  # here, so that --help and bad flags are answered at once

    with Engine(config=config) as engine:
        ids = prompt_ids(engine.tokenizer, prompt, system=system, raw=raw)
        timing = Timing(start=time.perf_counter())
        interrupted = False
        try:
            stream_to_terminal(engine.generate(ids, chosen, stream=True, continues_text=raw), timing)
        except KeyboardInterrupt:
            interrupted = True
    click.echo()
    click.echo(summary(timing, interrupted=interrupted), err=True)
    return 130 if interrupted else 0


def prompt_ids(tokenizer: TextTokenizer, prompt: str, *, system: str | None, raw: bool) -> list[int]:
    """The prompt's tokens. The chat template writes the special tokens itself, so none are added to its text."""
    if raw:
        ids = tokenizer.encode(prompt)
        if not ids:
            raise ParameterError("the prompt holds no tokens, at least one is needed", param="prompt")
        return ids
    messages: list[dict[str, object]] = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": prompt})
    return tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)


def stream_to_terminal(outputs: Iterable[GenerateOutput], timing: Timing) -> None:
    """Prints text as it comes."""
    for output in outputs:
        timing.last = time.perf_counter()
        if timing.output is None:
            timing.first = timing.last
        timing.output = output
        click.echo(output.delta_text, nl=False)


def summary(timing: Timing, *, interrupted: bool) -> str:
    """One line: tokens, tokens per second after the first output, time to first token, how it ended. Where no token was
    asked for, the time to the end."""
    output = timing.output
    if output is None:
        return "no tokens, interrupted" if interrupted else "no tokens"
    ended = "interrupted" if interrupted or output.finish is None else f"finished: {output.finish.kind}"
    decoding = timing.last - timing.first
    speed = f"{(output.completion_tokens - 1) / decoding:.1f} tok/s, " if decoding > 0 else ""
    first = "TTFT " if output.completion_tokens else ""
    return (
        f"{output.completion_tokens} tokens, {speed}{first}{timing.first - timing.start:.3f} s, "
        f"prompt {output.prompt_tokens} tokens ({output.cached_tokens} cached), {ended}"
    )
