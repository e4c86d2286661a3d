"""The check of prose finds each habit in texts that people read, and ignores code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from check import NOT_YET, ROOT, checked_files, found, habits, passages, referred

sys.path.pop()

MARKDOWN = """# Title

Only the host is asked, `alone` in code is a name.

```sh
echo anew
```

It is compiled
anew at each start.
"""

PYTHON = '''"""A module that is begun anew."""

import click
# begun anew


@click.command()
@click.option("--most", help="whoever reaches it")
def command(most: int) -> None:
    """Answers likewise."""
    logger.warning("stopped %s, in the place of another", "begun")
    raise ValueError(f"{most!r} is no number", "begun")


@router.get("/begun")
async def route() -> None:
    """Stands ready."""
    click.echo("as it were")
    print("left alone", "by turns")
    Refusal(reason="of course not")
    return describe("so to speak, begun at last") or "begun anew"


class Shown:
    """Beside others, not `beside`."""

    field: int
    """Read
    anew."""

    def method(self) -> None:
        """Whoever."""

    def _hidden(self) -> None:
        """Whoever."""


async def shown() -> None:
    """Likewise."""
'''

RECIPE = """# The router alone.
kind: alone
        - name: key # whoever has it
        - args: ["--x#alone"]  # `alone` in code
"""


def hits(path: Path) -> set[tuple[int, str]]:
    return {(int(line.split(":")[1]), line.split("'")[1]) for line in found([path], habits())}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("check.ROOT", tmp_path)
    monkeypatch.setattr("check.referred", frozenset)
    return tmp_path


def test_a_page_is_read_without_its_code(here: Path) -> None:
    (here / "page.md").write_text(MARKDOWN)
    assert hits(here / "page.md") == {(10, "anew")}


def test_help_errors_and_log_lines_of_a_module_are_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "module.py").write_text(PYTHON)
    monkeypatch.setattr("check.NOT_YET", ("module.py",))
    assert hits(here / "module.py") == {
        (8, "whoever"),
        (10, "likewise"),
        (11, "in the place of"),
        (12, "is no number"),
        (17, "Stands ready"),
        (18, "as it were"),
        (19, "by turns"),
        (20, "of course"),
        (21, "begun"),
        (21, "so to speak"),
    }


def test_all_sentences_of_examples_and_modules_of_texts_are_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("check.NOT_YET", ("sglang_jax/",))
    for name in ("examples/one.py", "sglang_jax/server/metrics.py", "sglang_jax/other.py"):
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            '"""Begun, as a docstring is."""\nTEXT = "nobody here has begun"\nNAME = "begun"\nA = 1  # anew\n'
        )
    assert hits(here / "examples/one.py") == {(1, "Begun"), (2, "begun"), (4, "anew")}
    assert hits(here / "sglang_jax/server/metrics.py") == {(2, "begun")}
    assert hits(here / "sglang_jax/other.py") == set()


def test_docstrings_of_modules_in_the_reference_are_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = here / "module.py"
    module.write_text(PYTHON)
    monkeypatch.setattr("check.NOT_YET", ("module.py",))
    without = hits(module)
    monkeypatch.setattr("check.referred", lambda: {module})
    assert hits(module) - without == {(25, "Beside"), (29, "anew"), (32, "Whoever"), (39, "Likewise")}


def test_docstrings_comments_and_names_of_tests_are_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = here / "tests/test_module.py"
    module.parent.mkdir()
    module.write_text(PYTHON + "\n\ndef test_a_row_is_begun() -> None: ...\n")
    monkeypatch.setattr("check.NOT_YET", ("tests/",))
    assert hits(module) == set()
    monkeypatch.setattr("check.NOT_YET", ("other.py",))
    of_module = {(1, "begun"), (1, "anew"), (4, "begun"), (4, "anew")}
    of_names = {(25, "Beside"), (29, "anew"), (32, "Whoever"), (35, "Whoever"), (39, "Likewise"), (42, "begun")}
    assert of_module | of_names <= hits(module)
    assert all((ROOT / path).exists() for path in NOT_YET)


def test_the_reference_is_read() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in referred()}
    assert {"sglang_jax/engine/engine.py", "sglang_jax/runner/plan.py", "sglang_jax/errors.py"} <= names
    texts = [passage.text for passage in passages(ROOT / "sglang_jax/sampling/params.py")]
    assert any("Applied in this order" in text for text in texts)


def test_comments_of_a_configuration_are_read(here: Path) -> None:
    (here / "recipe.yaml").write_text(RECIPE)
    assert hits(here / "recipe.yaml") == {(1, "alone"), (3, "whoever")}


def test_checked_files_exist_and_have_texts() -> None:
    files = checked_files()
    recipes = {ROOT / "docs/recipes/fleet-kubernetes.yaml", ROOT / "deploy/proxy/nginx.conf", ROOT / "Dockerfile"}
    assert recipes <= set(files)
    assert {ROOT / "README.md", ROOT / "docs/api.md", ROOT / "sglang_jax/config/server.py"} <= set(files)
    assert {ROOT / "requirements/README.md", ROOT / "examples/ray_serve.py"} <= set(files)
    assert ROOT / "CHANGELOG.md" not in files
    texts = [passage.text for passage in passages(ROOT / "sglang_jax/config/server.py")]
    assert "minimum log level" in texts


def test_every_habit_says_what_to_write() -> None:
    assert all(habit.write for habit in habits())
