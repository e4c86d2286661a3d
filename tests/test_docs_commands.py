"""The programs parse every command of the docs pages, with all options, and stop before their work starts."""

from __future__ import annotations

import json
import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest
import tpu_tune
from helpers.documented_commands import Command, commands_of, documented_commands

import tpu.check
import tpu.launch
from sglang_jax.cli.bench.commands import bench_offline, bench_serving
from sglang_jax.cli.main import cli, run
from sglang_jax.cli.serve import serve
from sglang_jax.config import ServerConfig

ROOT = Path(__file__).parent.parent

MODULES: dict[str, click.Command] = {
    "sglang_jax": cli,
    "sglang_jax.launch_server": serve,
    "sglang_jax.bench_serving": bench_serving,
    "sglang_jax.bench_offline_throughput": bench_offline,
    "tpu.check": tpu.check.check,
    "tpu.launch": tpu.launch.launch,
}
"""The programs started by `python -m`."""

STARTS = (
    "sglang_jax.server.serve.run",
    "sglang_jax.batch.run.run_batch",
    "sglang_jax.cli.batch._run_on_ray",
    "sglang_jax.cli.generate.start_engine",
    "sglang_jax.cli.chat.start_engine",
    "sglang_jax.cli.bench.accuracy.start_engine",
    "sglang_jax.cli.bench.commands.start_engine",
    "sglang_jax.cli.bench.commands._measure",
    "sglang_jax.cli.eval.commands.start_engine",
    "sglang_jax.cli.eval.commands._ask_server",
    "sglang_jax.cli.cache_report._ask",
    "sglang_jax.checkpoint.open_checkpoint",
    "tpu.check.require_compiler",
    "tpu.launch.detect_machine",
    "tpu_tune.has_tpu",
)
"""The calls that commands make after parsing: to start a server, an engine or a model, or to reach another machine."""

FILES = {
    "facts.jsonl": json.dumps({"prompt": "one", "choices": ["two", "three"], "answer": 0}),
    "ShareGPT_V3_unfiltered_cleaned_split.json": json.dumps(
        [{"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]}]
    ),
    "test.jsonl": '{"question": "one", "answer": "#### 1"}\n' * 6,
    "mmlu/test/virology_test.csv": "one,two,three,four,five,A\n" * 6,
}
"""Files that commands read before that."""

COMMANDS = documented_commands()
LEFT_OUT = re.compile(r"Error: (Missing (option|argument)|[Nn]o model is given)")


class Started(Exception):
    """Raised after a command has parsed its options. `arguments`: the arguments of the call."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.arguments = arguments


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def start(*arguments: Any, **keywords: Any) -> NoReturn:
        raise Started(*arguments)

    for name in STARTS:
        module, _, attribute = name.rpartition(".")
        monkeypatch.setattr(import_module(module), attribute, start)
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)


def readings(command: Command) -> list[tuple[click.Command, list[str]]]:
    """The click commands that parse it, each with its arguments. The server parses what `tpu.launch` passes on."""
    match command.words:
        case ("sglang-jax", *arguments):
            return [(cli, arguments)]
        case ("python", "-m", "tpu.launch", *arguments):
            return [(tpu.launch.launch, arguments), (serve, arguments)]
        case ("python", "-m", module, *arguments):
            return [(MODULES[module], arguments)]
        case ("python", "benchmarks/tpu_tune.py", *arguments):
            return [(tpu_tune.tune, arguments)]
        case ("docker", "run", *words):
            image = next(place for place, word in enumerate(words) if word.startswith("sglang-jax:"))
            return [(serve, words[image + 1 :])]
        case ("make", *words) if "serve" in words:
            return [(serve, shlex.split(word.removeprefix("ARGS="))) for word in words if word.startswith("ARGS=")]
    return []


READ = [each for each in COMMANDS if readings(each)]


def outcome(reader: click.Command, arguments: list[str]) -> tuple[Any, ...] | int:
    """The arguments that the command starts its work with, or its exit status if it ends before."""
    try:
        return run(reader, "program", arguments)
    except Started as started:
        return started.arguments


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("command", READ, ids=lambda each: f"{each.page}: {each.line}")
def test_a_command_is_parsed(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    for reader, arguments in readings(command):
        ended = outcome(reader, arguments)
        match ended, command.words:
            case int(), _:
                said = capsys.readouterr().err
                assert not command.whole, said
                assert ended == 0 or LEFT_OUT.match(said) or said.startswith("Usage: "), said
            case (config, *_), ("sglang-jax", "serve", model, *_) if not model.startswith("-"):
                assert isinstance(config, ServerConfig)
                assert config.model_path == model


def test_pages_have_commands_of_every_program() -> None:
    assert len(READ) > 60
    subcommands = {each.words[1] for each in READ if each.words[0] == "sglang-jax" and len(each.words) > 1}
    assert subcommands >= {"serve", "chat", "generate", "batch", "bench", "eval", "convert", "check", "cache-report"}
    assert any("ray" in each.words for each in READ)


def test_targets_and_variables_of_make_exist() -> None:
    lines = [each.words[1:] for each in COMMANDS if each.words[0] == "make"]
    makefile = (ROOT / "Makefile").read_text()
    variables = set(re.findall(r"^(\w+) \?=", makefile, re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert len(lines) > 10
    for words in lines:
        named = {word.partition("=")[0] for word in words if "=" in word}
        assert named <= variables, words
        assert {word for word in words if "=" not in word} <= targets, words


def test_commands_are_found_in_blocks_and_sentences() -> None:
    page = """Run `make serve` or `sglang-jax check`, not `maker`.
```sh
X=1 .venv/bin/sglang-jax serve M \\
    --port 1    # a comment
cd folder && make EXTRA=tpu serve
gcloud ssh '
  cd clone &&
  python -m tpu.launch --host H'
```
```json
sglang-jax
```
"""
    assert [(each.line, each.whole) for each in commands_of("page", page)] == [
        ("sglang-jax serve M --port 1", True),
        ("make EXTRA=tpu serve", True),
        ("python -m tpu.launch --host H", True),
        ("make serve", False),
        ("sglang-jax check", False),
    ]


def parameters(command: click.Command, name: str = "sglang-jax") -> list[tuple[str, click.Command]]:
    """Every command without subcommands, with its name."""
    if isinstance(command, click.Group):
        return [each for sub, below in command.commands.items() for each in parameters(below, f"{name} {sub}")]
    return [(name, command)]


LEAVES = parameters(cli) + [(name, command) for name, command in MODULES.items() if name.startswith("tpu.")]


@pytest.mark.parametrize("command", [command for _, command in LEAVES], ids=[name for name, _ in LEAVES])
def test_no_two_parameters_share_a_name_or_a_flag(command: click.Command) -> None:
    """click stores values by name: the second parameter would get the first one's value."""
    names = [parameter.name for parameter in command.params]
    assert {name for name in names if names.count(name) > 1} == set()
    flags = [flag for parameter in command.params if isinstance(parameter, click.Option) for flag in parameter.opts]
    assert {flag for flag in flags if flags.count(flag) > 1} == set()
