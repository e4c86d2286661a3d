"""Starting an engine within a command's process."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from sglang_jax.cli.program import ended_by_interrupts
from sglang_jax.config import EngineConfig, GrammarLibrary

if TYPE_CHECKING:
    from sglang_jax.engine.engine import Engine


def tell_loading(config: EngineConfig) -> None:
    """Says in a terminal what the next seconds are spent on. Elsewhere standard error is for what went wrong, and for
    `generate`'s last line."""
    if sys.stderr.isatty():
        click.echo(f"Loading {config.model_path} ...", err=True)


def for_one_request(config: EngineConfig) -> EngineConfig:
    """The options, of which those left out fit one request at a time.

    Programs are made when they are first needed, and those of a short prompt and its answer while weights are read:
    warming up the others, for prompts of other lengths, would take longer than the answer. No option asks for a
    grammar, so that nothing need be read for one.
    """
    fitting = {"max_running_requests": 1, "skip_warmup": True, "grammar_backend": GrammarLibrary.NONE}
    return config.model_copy(update={name: it for name, it in fitting.items() if name not in config.model_fields_set})


def start_engine(config: EngineConfig) -> Engine:
    """An engine in this process. Ctrl-C ends the process until there is one: waiting for the thread that loads it would
    take as long as loading. Raises as `Engine` does."""
    with ended_by_interrupts():
        from sglang_jax.engine.engine import Engine  # here, so that --help and bad flags are answered at once

        return Engine(config=config)
