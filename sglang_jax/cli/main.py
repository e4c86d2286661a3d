"""The command `sglang-jax`, also `python -m sglang_jax`: its subcommands and error messages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import TextIOWrapper

import click

from sglang_jax.about import version
from sglang_jax.cli.batch import batch
from sglang_jax.cli.bench.accuracy import bench_accuracy
from sglang_jax.cli.bench.commands import bench_offline, bench_serving
from sglang_jax.cli.cache_report import cache_report
from sglang_jax.cli.chat import chat
from sglang_jax.cli.check import check
from sglang_jax.cli.convert import convert
from sglang_jax.cli.eval.commands import eval_gsm8k, eval_mmlu
from sglang_jax.cli.generate import generate
from sglang_jax.cli.options import fields_as_flags, flag_name, with_dashes
from sglang_jax.cli.program import INTERRUPTED
from sglang_jax.cli.serve import serve
from sglang_jax.config import ServerConfig
from sglang_jax.config.suggestions import did_you_mean
from sglang_jax.errors import BatchError, CheckpointError, ConfigError, RequestError
from sglang_jax.sampling import SamplingParams
from sglang_jax.spellings import COMMANDS, REFUSED, SAMPLING_FIELDS, refusal

_SAMPLING = frozenset(SamplingParams.__dataclass_fields__)

USAGE_ERROR = 2
HELP = ("-h", "--help")


class CommandGroup(click.Group):
    """Commands, also by their names in other engines."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) or super().get_command(ctx, COMMANDS.get(cmd_name, cmd_name))


@click.group(cls=CommandGroup)
@click.option(
    "-V",
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda context, _, given: _print_version(context) if given else None,
    help="Show the version and exit.",
)
def cli() -> None:
    """Serve, query and benchmark large language models."""


def _print_version(context: click.Context) -> None:
    """Prints the version. click's own option needs the distribution's name."""
    click.echo(f"sglang-jax, version {version()}")
    context.exit()


@cli.group(cls=CommandGroup)
def bench() -> None:
    """Measure throughput, latency and accuracy."""


@cli.group("eval", cls=CommandGroup)
def evaluate() -> None:
    """Score a model's answers to published questions."""


cli.add_command(serve)
cli.add_command(chat)
cli.add_command(generate)
cli.add_command(batch)
cli.add_command(convert)
cli.add_command(check)
cli.add_command(cache_report)
bench.add_command(bench_accuracy, "accuracy")
bench.add_command(bench_offline, "offline")
bench.add_command(bench_serving, "serving")
evaluate.add_command(eval_gsm8k, "gsm8k")
evaluate.add_command(eval_mmlu, "mmlu")
for command in (cli, *cli.commands.values(), *bench.commands.values(), *evaluate.commands.values()):
    # click creates a command's help option once, with the names of the first context.
    command.context_settings.setdefault("help_option_names", list(HELP))
    command.get_help_option(click.Context(command, help_option_names=list(HELP)))


def run(command: click.Command, program: str, arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status. A user's mistake prints one line on stderr, and the status is 2."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals that cannot show all characters
    try:
        status = command.main(
            args=None if arguments is None else list(arguments),
            prog_name=program,
            standalone_mode=False,
            token_normalize_func=with_dashes,
            help_option_names=HELP,
        )
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.NoSuchOption as error:
        return _fail(_unknown_option(error), error.exit_code)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except (BatchError, ConfigError, CheckpointError, RequestError) as error:
        return _fail(fields_as_flags(str(error), ServerConfig), USAGE_ERROR)
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        return INTERRUPTED
    return status if isinstance(status, int) else 0


def _unknown_option(error: click.NoSuchOption) -> str:
    """Returns the error for an unknown option, with the nearest options, or the alternative to another engine's."""
    options = [] if error.ctx is None else [each for each in error.ctx.command.params if isinstance(each, click.Option)]
    field = _field_of(error.option_name)
    if SAMPLING_FIELDS.get(field, field) in _SAMPLING:
        return f"{error.option_name} is a sampling parameter: set it in requests, or pass it to generate or chat"
    others = [name for option in options if option.hidden for name in _long_names(option)]
    if any(name in REFUSED for name in others) and (reason := refusal(field)) is not None:
        return f"{error.option_name} is {reason}"
    meant = did_you_mean(
        field,
        [name for option in options if not option.hidden for name in _long_names(option)],
        others=others,
        show=lambda name: f"'{flag_name(name)}'",
    )
    return f"No such option '{error.option_name}'." + (f" D{meant[1:]}" if meant else "")


def _long_names(option: click.Option) -> list[str]:
    return [_field_of(flag) for flag in option.opts if flag.startswith("--")]


def _field_of(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _fail(message: str, status: int) -> int:
    click.echo(f"Error: {message}", err=True)
    return status
