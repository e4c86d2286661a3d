"""Looks for the habits of habits.yaml in docs, help texts, errors and log lines, and for misspelt words in all of them.

Run by `make check`: python tests/prose/check.py [FILE ...]
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PACKAGES = ("sglang_jax", "torch_backend", "tpu")
LOG_METHODS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
SHOWN = frozenset({"help", "description", "short_help", "epilog"})
"""Keywords whose texts a user reads."""


@dataclass(frozen=True, slots=True)
class Habit:
    """`find`: what to look for; `write`: what to write instead."""

    find: re.Pattern[str]
    write: str


@dataclass(frozen=True, slots=True)
class Text:
    """A passage of a file, from `line` on."""

    path: Path
    line: int
    text: str


def habits() -> list[Habit]:
    entries = yaml.safe_load((Path(__file__).parent / "habits.yaml").read_text())
    return [Habit(re.compile(entry["find"], re.IGNORECASE), entry["write"]) for entry in entries]


def passages(path: Path) -> Iterator[Text]:
    """What of a file is read by people who use the project."""
    return _of_python(path) if path.suffix == ".py" else _of_markdown(path)


def _of_markdown(path: Path) -> Iterator[Text]:
    """Its lines, without code and without what stands as an example between `<!-- prose: off -->` and `on`."""
    left_out = r"^```.*?^```$|^<!-- prose: off -->.*?^<!-- prose: on -->$"
    text = re.sub(left_out, lambda block: "\n" * block[0].count("\n"), path.read_text(), flags=re.M | re.S)
    text = re.sub(r"`[^`\n]*`", "``", text)
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield Text(path, number, line)


def _of_python(path: Path) -> Iterator[Text]:
    """Help texts, the first argument of what is raised, and of what is logged."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from _strings(path, node.exc.args[:1])
        elif isinstance(node, ast.Call):
            yield from _strings(path, [word.value for word in node.keywords if word.arg in SHOWN])
            if isinstance(node.func, ast.Attribute) and node.func.attr in LOG_METHODS:
                yield from _strings(path, node.args[:1])
        elif isinstance(node, ast.FunctionDef) and any("command" in ast.unparse(one) for one in node.decorator_list):
            yield Text(path, node.lineno, ast.get_docstring(node) or "")


def _strings(path: Path, expressions: list[ast.expr]) -> Iterator[Text]:
    for expression in expressions:
        for node in ast.walk(expression):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield Text(path, node.lineno, re.sub(r"`[^`\n]*`", "``", node.value))


def found(paths: list[Path], bad: list[Habit]) -> Iterator[str]:
    """A line for each habit met."""
    for path in paths:
        for passage in passages(path):
            for habit in bad:
                for hit in habit.find.finditer(passage.text):
                    line = passage.line + passage.text.count("\n", 0, hit.start())
                    yield f"{path.relative_to(ROOT)}:{line}: {hit[0]!r}: write {habit.write}"


def checked_files() -> list[Path]:
    """Changes of the past stay as they were written."""
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *(path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))),
    ]


def main() -> None:
    paths = [Path(name).resolve() for name in sys.argv[1:]] or checked_files()
    lines = list(found(paths, habits()))
    print(*lines, sep="\n", end="\n" if lines else "")
    spelling = subprocess.run([sys.executable, "-m", "codespell_lib", *map(str, paths)], check=False)
    sys.exit(bool(lines or spelling.returncode))


if __name__ == "__main__":
    main()
