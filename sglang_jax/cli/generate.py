"""`generate`: one answer, streamed to the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import click

from sglang_jax.cli.help import GroupedCommand
from sglang_jax.cli.options import options_of
from sglang_jax.cli.program import INTERRUPTED
from sglang_jax.cli.sampling import chosen_sampling, sampling_options
from sglang_jax.cli.starting import for_one_request, print_loading, start_engine
from sglang_jax.config import EngineConfig
from sglang_jax.engine.collector import rare_collections
from sglang_jax.engine.types import GenerateOutput, TextTokenizer
from sglang_jax.errors import ParameterError


@dataclass(slots=True)
class Timing:
    """When the answer and its first and last output started, in seconds; and the last output."""

    start: float
    first: float = 0.0
    last: float = 0.0
    output: GenerateOutput | None = None


@click.command(cls=GroupedCommand, short_help="Answer one prompt.")
@click.argument("prompt")
@click.option("--system", help="system message")
@click.option("--raw", is_flag=True, help="complete the prompt without the chat template")
@sampling_options()
@options_of("seed", config=EngineConfig)
def generate(config: EngineConfig, prompt: str, system: str | None, raw: bool, **sampling: Any) -> int:
    """Answer PROMPT (`-`: read it from standard input), streaming to the terminal."""
    if raw and system is not None:
        raise click.UsageError("--system needs the chat template, which --raw turns off")
    chosen = chosen_sampling(sampling)
    if prompt == "-":
        prompt = sys.stdin.read()

    print_loading(config)
    with rare_collections(), start_engine(for_one_request(config)) as engine:
        ids = prompt_ids(engine.tokenizer, prompt, system=system, raw=raw)
        timing = Timing(start=time.perf_counter())
        interrupted = False
        try:
            stream_to_terminal(engine.generate(ids, chosen, stream=True, continues_text=raw), timing)
        except KeyboardInterrupt:
            interrupted = True
    click.echo()
    click.echo(summary(timing, interrupted=interrupted), err=True)
    return INTERRUPTED if interrupted else 0


def prompt_ids(tokenizer: TextTokenizer, prompt: str, *, system: str | None, raw: bool) -> list[int]:
    """Returns the prompt's tokens. The chat template writes special tokens itself, so no more are added."""
    if raw:
        ids = tokenizer.encode(prompt)
        if not ids:
            raise ParameterError("the prompt is empty, at least one token is needed", param="prompt")
        return ids
    messages: list[dict[str, object]] = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": prompt})
    return tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)


def stream_to_terminal(outputs: Iterable[GenerateOutput], timing: Timing) -> None:
    """Prints text as it arrives, and records its times."""
    for output in outputs:
        timing.last = time.perf_counter()
        if timing.output is None:
            timing.first = timing.last
        timing.output = output
        click.echo(output.delta_text, nl=False)


def summary(timing: Timing, *, interrupted: bool) -> str:
    """Returns one line: tokens, tokens per second after the first output, TTFT (or time to the end), finish reason."""
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
