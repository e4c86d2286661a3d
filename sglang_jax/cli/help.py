"""Help of commands with many options: a short screen, groups of options, and a search."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import click

from sglang_jax.cli.options import HIDDEN_PREFIX, GroupedOption, with_dashes
from sglang_jax.config import OptionGroup
from sglang_jax.config.groups import COMMON, FIELDS, SUMMARIES
from sglang_jax.config.suggestions import did_you_mean
from sglang_jax.spellings import NEEDLESS, refusal

EVERYTHING = "all"
"""The value of `--help` that shows every option."""

UNLISTED = frozenset({OptionGroup.DEVELOPMENT})
"""Groups that the short screen does not name."""


class GroupedCommand(click.Command):
    """A command whose `--help` shows only the most common options and the names of groups. `--help=GROUP` shows a
    group, `--help=WORD` the options with a word, `--help=all` all options."""

    def __init__(self, name: str | None, **attributes: Any) -> None:
        super().__init__(name, add_help_option=False, **attributes)
        self.params.append(
            click.Option(
                ["-h", "--help", "help_word"],
                is_flag=False,
                flag_value="",
                default=None,
                is_eager=True,
                expose_value=False,
                callback=_show_help,
                metavar="[=WORD]",
                help="show help: of a group, of options with a word, or of all; then exit",
            )
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the arguments. For click, the value of `--help=--page-size` would be another option."""
        return super().parse_args(ctx, [re.sub("^--help=-+", "--help=", each) for each in args])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the short screen."""
        options = visible_options(self)
        own = [each for each in options if group_of_option(each) is OptionGroup.COMMAND]
        others = {each.name: each for each in options if each not in own}
        common = [(_long_name(others[field]), text) for field, text in COMMON.items() if field in others]
        with formatter.section("Options of this command"):
            formatter.write_dl([(_long_name(each), _first_clause(each)) for each in own])
        with formatter.section("Common options"):
            formatter.write_dl(common)
        with formatter.section("Groups of options"):
            formatter.write_dl([(group, SUMMARIES[group]) for group in _listed_groups(options)])
        with formatter.section("More help"):
            formatter.write_dl(
                [
                    ("--help=GROUP", "show the options of a group"),
                    ("--help=WORD", "show options with a word, such as --help=cache"),
                    (f"--help={EVERYTHING}", "show all options"),
                ]
            )


def _show_help(context: click.Context, parameter: click.Parameter, word: str | None) -> None:
    if word is None:
        return
    click.echo(help_about(context, word) if word.strip() else context.get_help(), color=context.color)
    context.exit()


def help_about(context: click.Context, word: str) -> str:
    """Returns the options of the group `word`, or else those whose names or help have the word; of the whole command
    for `all`. Raises `UsageError` if there are none."""
    options = visible_options(context.command)
    name = _plain(word)
    formatter = context.make_formatter()
    context.command.format_usage(context, formatter)
    if name == EVERYTHING:
        context.command.format_help_text(context, formatter)
        found = options
    elif name in _groups(options):
        found = [each for each in options if group_of_option(each) == name]
    else:
        found = [each for each in options if _has(each, name)]
    note = _note_on_other_engines(context.command, name)
    if not found and note is None:
        raise click.UsageError(_nothing_found(context, options, word))
    for group in _groups(found):
        with formatter.section(f"{group} ({SUMMARIES[group]})"):
            listed = [each for each in found if group_of_option(each) is group]
            formatter.write_dl(
                [record for each in _ordered(listed, group) if (record := each.get_help_record(context)) is not None]
            )
    if note is not None:
        with formatter.section("Of other engines"):
            formatter.write_text(note)
    return formatter.getvalue().rstrip("\n")


def visible_options(command: click.Command) -> list[click.Option]:
    """Returns the options of a command that help shows, in its order."""
    return [each for each in command.params if isinstance(each, click.Option) and not each.hidden]


def group_of_option(option: click.Option) -> OptionGroup:
    return option.group if isinstance(option, GroupedOption) else OptionGroup.COMMAND


def _ordered(options: Iterable[click.Option], group: OptionGroup) -> list[click.Option]:
    """The options of a group in the order of `FIELDS`, then the others."""
    order = FIELDS.get(group, ())
    return sorted(options, key=lambda each: order.index(each.name) if each.name in order else len(order))


def _groups(options: Iterable[click.Option]) -> list[OptionGroup]:
    present = {group_of_option(each) for each in options}
    return [group for group in OptionGroup if group in present]


def _listed_groups(options: Iterable[click.Option]) -> list[OptionGroup]:
    return [group for group in _groups(options) if group not in UNLISTED and group is not OptionGroup.COMMAND]


def _plain(word: str) -> str:
    return with_dashes(word.strip().lower()).lstrip("-")


def _has(option: click.Option, word: str) -> bool:
    texts = (*option.opts, *option.secondary_opts, option.help or "")
    return any(word in with_dashes(text.lower()) for text in texts)


def _long_name(option: click.Option) -> str:
    return next(each for each in option.opts if each.startswith("--"))


def _first_clause(option: click.Option) -> str:
    """The start of the option's help, up to a semicolon or a colon outside quotation marks."""
    return re.split(r'; |(?<!"): |  \[default', option.help or "")[0]


def _note_on_other_engines(command: click.Command, word: str) -> str | None:
    """Why the command takes or refuses an option of other engines, by the option's whole name; None if there is none of
    this name."""
    field = word.replace("-", "_")
    hidden = {each.name for each in command.params if isinstance(each, click.Option) and each.hidden}
    if HIDDEN_PREFIX + field not in hidden:
        return None
    reason = f"has no effect: {NEEDLESS[field].note}" if field in NEEDLESS else f"is {refusal(field)}"
    return f"--{word} {reason}"


def _nothing_found(context: click.Context, options: Sequence[click.Option], word: str) -> str:
    groups = _listed_groups(options)
    names = [flag.lstrip("-").replace("-", "_") for each in options for flag in each.opts]
    meant = did_you_mean(_plain(word).replace("-", "_"), [*names, *groups], show=with_dashes)
    return (
        f"--help={word}: no group and no option of {context.command_path} has this word"
        + (f"; {meant}" if meant else ".")
        + f" Groups: {', '.join(groups)}; --help={EVERYTHING} shows all options"
    )
