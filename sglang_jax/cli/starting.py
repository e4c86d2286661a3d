"""Starts an engine within a command's process."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from sglang_jax.cli.program import ended_by_interrupts
from sglang_jax.config import EngineConfig, GrammarLibrary

if TYPE_CHECKING:
    from sglang_jax.engine.engine import Engine


def print_loading(config: EngineConfig) -> None:
    """Prints in a terminal that the model is loading. Else standard error has only errors and `generate`'s last
    line."""
    if sys.stderr.isatty():
        click.echo(f"Loading {config.model_path} ...", err=True)


def for_one_request(config: EngineConfig) -> EngineConfig:
    """Returns the options with defaults for one request at a time. Programs are compiled when they are first needed,
    and those for a short prompt and its answer while weights are read: warming up the others would take longer than the
    answer. No option asks for a grammar, so nothing is loaded for one."""
    fitting = {"max_running_requests": 1, "skip_warmup": True, "grammar_backend": GrammarLibrary.NONE}
    return config.model_copy(update={name: it for name, it in fitting.items() if name not in config.model_fields_set})


def start_engine(config: EngineConfig) -> Engine:
    """Returns an engine in this process. Until then, Ctrl-C ends the process: waiting for the thread that loads it
    would take as long as loading. Raises as `Engine` does."""
    with ended_by_interrupts():
        from sglang_jax.engine.engine import Engine  # imported late: --help must be fast

        return Engine(config=config)
