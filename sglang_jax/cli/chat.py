"""`chat`: a conversation in the terminal."""

from __future__ import annotations

import readline  # noqa: F401  # lets input() edit lines and recall earlier ones
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import click

from sglang_jax.cli.help import GroupedCommand
from sglang_jax.cli.options import options_of, with_model
from sglang_jax.cli.sampling import chosen_sampling, sampling_options
from sglang_jax.cli.starting import for_one_request, print_loading, start_engine
from sglang_jax.config import EngineConfig
from sglang_jax.engine.collector import rare_collections
from sglang_jax.engine.types import GenerateOutput
from sglang_jax.errors import RequestError

FENCE = '"""'
"""Starts and ends a message of several lines."""

HELP = f"""\
  /reset          start a new conversation
  /system TEXT    set the system message and start a new conversation; without TEXT: none
  /help           show this
  /exit           leave; so does Ctrl-D
{FENCE} starts and ends a message with several lines. Ctrl-C stops an answer."""

Answer = Callable[[list[dict[str, object]]], Iterator[GenerateOutput]]


class Step(Enum):
    """Whether the conversation continues after a line."""

    NEXT = auto()
    LEAVE = auto()


@dataclass(slots=True)
class Conversation:
    """The messages so far, in OpenAI's format. `answer`: streams the model's answer to messages."""

    answer: Answer
    system: str | None = None
    turns: list[dict[str, object]] = field(default_factory=list)

    def take(self, line: str) -> Step:
        command, _, argument = line.partition(" ")
        match command:
            case "":
                pass
            case "/exit" | "/quit" | "/bye":
                return Step.LEAVE
            case "/help" | "/?":
                click.echo(HELP)
            case "/reset":
                self._begin("a new conversation")
            case "/system":
                self.system = argument.strip() or None
                self._begin(f"a new conversation, {'without a' if self.system is None else 'with this'} system message")
            case _ if command.startswith("/"):
                click.echo(f"Unknown command {command}:\n{HELP}", err=True)
            case _:
                self._say(line)
        return Step.NEXT

    def _begin(self, what: str) -> None:
        self.turns.clear()
        click.echo(f"({what})", err=True)

    def _say(self, message: str) -> None:
        """Prints the answer as it arrives. Removes a message that fails, or is stopped before any answer."""
        self.turns.append({"role": "user", "content": message})
        text = ""
        try:
            for output in self.answer(self._messages()):
                text = output.text
                click.echo(output.delta_text, nl=False)
        except RequestError as error:
            self.turns.pop()
            click.echo(f"Error: {error} (/reset starts a new conversation)", err=True)
            return
        except KeyboardInterrupt:
            click.echo(" [stopped]", nl=False)
            if not text:
                self.turns.pop()
                click.echo()
                return
        click.echo()
        self.turns.append({"role": "assistant", "content": text})

    def _messages(self) -> list[dict[str, object]]:
        system: list[dict[str, object]] = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + self.turns


def lines_of_terminal() -> Iterator[str]:
    """Yields messages and commands from the terminal, a file or a pipe until its end. Ctrl-C drops the current line."""
    shown = sys.stdin.isatty()
    while True:
        try:
            line = input(">>> " if shown else "").strip()
            if line.startswith(FENCE):
                line = _until_fence(line.removeprefix(FENCE), "... " if shown else "")
        except EOFError:
            if shown:
                click.echo()
            return
        except KeyboardInterrupt:
            click.echo("\n(Ctrl-D or /exit leaves)")
            continue
        yield line


def _until_fence(first: str, prompt: str) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith(FENCE):
        lines.append(input(prompt))
    lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
    return "\n".join(lines).strip()


@click.command(cls=GroupedCommand, short_help="Chat with a model in the terminal.")
@click.argument("model", required=False)
@click.option("--system", help="system message")
@sampling_options(max_new_tokens="the remaining context")
@options_of("seed", config=EngineConfig)
def chat(config: EngineConfig, model: str | None, system: str | None, **sampling: Any) -> int:
    """Chat with MODEL (as for --model-path) in the terminal; /help lists the commands."""
    config = for_one_request(with_model(config, model))
    chosen = {"max_new_tokens": None, **chosen_sampling(sampling)}

    print_loading(config)
    with rare_collections(), start_engine(config) as engine:

        def answer(messages: list[dict[str, object]]) -> Iterator[GenerateOutput]:
            ids = engine.tokenizer.encode(engine.tokenizer.render_chat(messages), add_special_tokens=False)
            return engine.generate(ids, chosen, stream=True)

        conversation = Conversation(answer, system)
        if sys.stdin.isatty():
            click.echo(f"{config.model_path} is ready; /help lists the commands.")
        for line in lines_of_terminal():
            if conversation.take(line) is Step.LEAVE:
                break
    return 0
