"""The page on models names every family, and its commands are read as the program reads them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from sglang_jax.architectures.registry import known_families
from sglang_jax.cli.main import run
from sglang_jax.cli.serve import serve
from sglang_jax.server import serve as server

DOCS = Path(__file__).parent.parent / "docs"
COMMANDS = [
    pytest.param(line, id=f"{page.stem}: {line}")
    for page in sorted(DOCS.glob("*.md"))
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    for line in re.sub(r"\\\n *", " ", block).splitlines()
    if re.match(r"(sglang-jax|python -m sglang_jax) serve\b", line)
]


def test_every_family_has_a_command() -> None:
    page = (DOCS / "models.md").read_text()
    sections = re.split(r"^#+ ", page, flags=re.MULTILINE)
    for family in known_families():
        named = [section for section in sections if f"`{family.class_name}`" in section]
        assert named, family.class_name
        assert any("sglang-jax serve" in section for section in named), family.class_name


def test_the_table_is_what_the_code_refuses() -> None:
    """`python tests/helpers/model_table.py` writes it."""
    from helpers.model_table import model_table, table_of  # here: it imports transformers

    assert table_of((DOCS / "models.md").read_text()) == model_table()


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_read(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Up to where the server would start."""
    begun: list[Any] = []
    monkeypatch.setattr(server, "run", lambda config: begun.append(config) or 0)
    _, arguments = re.split(r" serve\b", line.partition(" #")[0], maxsplit=1)
    assert run(serve, "serve", shlex.split(arguments)) == 0, capsys.readouterr().err
    (config,) = begun
    named = re.search(r"serve (?!-)(\S+)", line)
    assert named is None or config.model_path == named[1]


def test_there_are_commands_to_read() -> None:
    assert len(COMMANDS) > 20
