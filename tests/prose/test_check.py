"""The check of prose finds each habit where users read it, and leaves code and comments alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from check import ROOT, checked_files, found, habits, passages

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
'''


def hits(path: Path) -> set[tuple[int, str]]:
    return {(int(line.split(":")[1]), line.split("'")[1]) for line in found([path], habits())}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("check.ROOT", tmp_path)
    return tmp_path


def test_a_page_is_read_without_its_code(here: Path) -> None:
    (here / "page.md").write_text(MARKDOWN)
    assert hits(here / "page.md") == {(10, "anew")}


def test_of_a_module_help_errors_and_log_lines_are_read(here: Path) -> None:
    (here / "module.py").write_text(PYTHON)
    assert hits(here / "module.py") == {
        (8, "whoever"),
        (9, "likewise"),
        (11, "in the place of"),
        (12, "is no number"),
    }


def test_what_is_checked_is_there_and_has_texts() -> None:
    files = checked_files()
    assert {ROOT / "README.md", ROOT / "docs/api.md", ROOT / "sglang_jax/config/server.py"} <= set(files)
    assert ROOT / "CHANGELOG.md" not in files
    texts = [passage.text for passage in passages(ROOT / "sglang_jax/config/server.py")]
    assert "minimum log level" in texts


def test_every_habit_says_what_to_write() -> None:
    assert all(habit.write for habit in habits())
