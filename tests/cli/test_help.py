"""Help with groups: every option is in one, and a word finds it."""

from __future__ import annotations

import re

import click
import pytest

from sglang_jax.cli.bench.accuracy import bench_accuracy
from sglang_jax.cli.bench.commands import bench_offline
from sglang_jax.cli.help import UNLISTED, GroupedCommand, group_of_option, help_about, visible_options
from sglang_jax.cli.main import cli, run
from sglang_jax.config import EngineConfig, OptionGroup, ServerConfig, group_of
from sglang_jax.config.groups import COMMON, FIELDS, SUMMARIES

GROUPED = [*(each for each in cli.commands.values() if isinstance(each, GroupedCommand)), bench_offline, bench_accuracy]
MAX_LINES = 60


def shown(capsys: pytest.CaptureFixture[str], command: click.Command, *arguments: str) -> str:
    assert run(command, "x", arguments) == 0
    return capsys.readouterr().out


def options_in(text: str) -> list[str]:
    """The first long name of each option of a help text, in order."""
    return re.findall(r"^  (?:-[a-z]+, )?(--[a-z][a-z-]*)", text, re.MULTILINE)


def first_name(option: click.Option) -> str:
    return next(name for name in option.opts if name.startswith("--"))


def test_commands_with_an_engine_have_groups() -> None:
    assert {each.name for each in GROUPED} >= {"serve", "chat", "generate", "batch"}
    commands: list[click.Command] = [cli]
    while commands:
        command = commands.pop()
        commands += command.commands.values() if isinstance(command, click.Group) else []
        engine = any(each.name == "mem_fraction_static" for each in command.params)
        assert not engine or isinstance(command, GroupedCommand)


def test_every_field_has_one_group_and_every_group_a_summary() -> None:
    fields = [field for listed in FIELDS.values() for field in listed]
    assert len(fields) == len(set(fields))
    assert set(fields) == {*EngineConfig.model_fields, *ServerConfig.model_fields}
    assert set(SUMMARIES) == set(OptionGroup)
    assert set(COMMON) <= set(fields)
    with pytest.raises(ValueError, match="some_field has no group"):
        group_of("some_field")


@pytest.mark.parametrize("command", GROUPED, ids=lambda each: each.name)
def test_the_groups_together_have_every_option_once(capsys: pytest.CaptureFixture[str], command: click.Command) -> None:
    options = visible_options(command)
    names = sorted(first_name(option) for option in options)
    groups = {group_of_option(option) for option in options}
    by_group = [name for group in groups for name in options_in(shown(capsys, command, f"--help={group.upper()}"))]
    assert sorted(by_group) == names
    assert sorted(options_in(shown(capsys, command, "--help=ALL"))) == names


@pytest.mark.parametrize("command", GROUPED, ids=lambda each: each.name)
def test_the_short_screen_names_the_groups_and_fits(capsys: pytest.CaptureFixture[str], command: click.Command) -> None:
    text = shown(capsys, command, "--help")
    assert len(text.splitlines()) <= MAX_LINES
    listed = re.findall(r"^  ([a-z]+)  ", text.partition("Groups of options:")[2], re.MULTILINE)
    present = {group_of_option(option) for option in visible_options(command)}
    assert set(listed) == present - UNLISTED - {OptionGroup.COMMAND}
    own = [option for option in visible_options(command) if group_of_option(option) is OptionGroup.COMMAND]
    assert {first_name(option) for option in own} <= set(options_in(text))


@pytest.mark.parametrize("command", GROUPED, ids=lambda each: each.name)
def test_each_name_of_an_option_finds_it(command: click.Command) -> None:
    for option in visible_options(command):
        for name in option.opts:
            for word in (name, name.lstrip("-").replace("-", "_").upper()):
                context = click.Context(command, info_name="x")
                assert first_name(option) in options_in(help_about(context, word)), word


@pytest.mark.parametrize(
    ("word", "options", "others"),
    [
        ("page", {"--page-size", "--debug-memory"}, {"--port"}),  # name, help
        ("--max_model_len", {"--context-length"}, {"--port"}),
        ("test", {"--test-retract", "--test-evict"}, {"--port"}),
        ("KV cache", {"--kv-cache-dtype", "--max-total-tokens"}, {"--port"}),
    ],
)
def test_a_word_finds_options_by_name_spelling_and_help(
    capsys: pytest.CaptureFixture[str], word: str, options: set[str], others: set[str]
) -> None:
    found = set(options_in(shown(capsys, cli, "serve", f"--help={word}")))
    assert options <= found
    assert not others & found


def test_the_word_may_be_a_separate_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, cli, "serve", "--help", "memory") == shown(capsys, cli, "serve", "--help=memory")
    assert shown(capsys, cli, "serve", "--help", "--port=1") == shown(capsys, cli, "serve", "-h")


def test_an_option_of_another_engine_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--trust-remote-code has no effect" in shown(capsys, cli, "serve", "--help=trust_remote_code")
    assert "--enable-eplb is not implemented" in shown(capsys, cli, "chat", "--help=--enable-eplb")


@pytest.mark.parametrize(("word", "near"), [("pagesize", "did you mean page-size?"), ("qqqq", "has this word. Groups")])
def test_a_word_without_options_is_an_error_that_names_the_groups(
    capsys: pytest.CaptureFixture[str], word: str, near: str
) -> None:
    assert run(cli, "x", ["serve", f"--help={word}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert near in captured.err
    assert f"--help={word}" in captured.err
    assert "parallelism, memory" in captured.err
    assert "development" not in captured.err
