"""`check`: checks whether a model would run on a TPU slice."""

from __future__ import annotations

import click

from sglang_jax import about
from sglang_jax.errors import ConfigError


@click.command(
    short_help="Check whether a model fits a TPU slice.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def check(arguments: tuple[str, ...]) -> int:
    """Check whether a model fits a TPU slice by compiling it ahead of time, without a TPU."""
    from sglang_jax.cli.main import run  # circular import

    try:
        command = about.command("check")
    except LookupError as error:
        raise ConfigError(str(error)) from error
    return run(command.load(), "sglang-jax check", arguments)
