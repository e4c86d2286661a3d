"""Looks for the habits of habits.yaml in docs, examples, help texts, errors, log lines, returned texts, docstrings,
comments, names of tests, and comments of files that operators copy; and for misspelt words in all of them.

Run by `make check`: python tests/prose/check.py [FILE ...]
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PACKAGES = ("sglang_jax", "torch_backend", "tpu")
TOOLS = ("tests", "benchmarks")
"""Folders in which words are misspelt on purpose."""

LOG_METHODS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
SHOWN = frozenset({"help", "description", "short_help", "epilog", "note", "reason"})
"""Keywords whose texts a user reads."""

NOT_YET = (
    "tests/helpers/simulation.py",  # hypothesis seeds schedules from its source on Python 3.11
    "tests/prose/test_check.py",  # has the habits as examples
)
"""Where comments and docstrings are not all checked yet."""

NEWLINE = "\n"
ROUTES = frozenset({"get", "post", "put", "delete", "head"})
FULL_OF_TEXTS = frozenset(
    {
        "sglang_jax/cli/chat.py",
        "sglang_jax/config/choices.py",
        "sglang_jax/server/metrics.py",
    }
)
"""Modules whose strings of a few words are all shown somewhere."""

FEW_WORDS = 4
OPERATORS_FILES = ("Dockerfile", "Makefile", "deploy/**/*.*", "docs/recipes/*.yaml")
REFERENCE = ROOT / "docs/reference.md"


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
    """The texts of a file that people read."""
    match path.suffix:
        case ".py":
            return _of_python(path)
        case ".md":
            return _of_markdown(path)
        case ".toml":
            return _of_data(path)
        case _:
            return _of_comments(path)


def _of_markdown(path: Path) -> Iterator[Text]:
    """Its lines, without code and without the examples between `<!-- prose: off -->` and `on`."""
    left_out = r"^```.*?^```$|^<!-- prose: off -->.*?^<!-- prose: on -->$"
    text = re.sub(left_out, lambda block: "\n" * block[0].count("\n"), path.read_text(), flags=re.M | re.S)
    text = re.sub(r"`[^`\n]*`", "``", text)
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield Text(path, number, line)


def _of_comments(path: Path) -> Iterator[Text]:
    """Comments of a configuration, without the commands in them."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if comment := re.search(r"(?:^|\s)##? (.*)", line):
            yield Text(path, number, re.sub(r"`[^`\n]*`", "``", comment[1]))


def _of_data(path: Path) -> Iterator[Text]:
    """Comments, and the keys and values that are sentences."""
    yield from _of_comments(path)
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for text in re.findall(r'"([^"]*)"', line):
            if len(text.split()) >= FEW_WORDS:
                yield Text(path, number, text)


def _of_python(path: Path) -> Iterator[Text]:
    """Docstrings and comments, help texts, and texts that are raised, logged, printed or returned."""
    tree = ast.parse(path.read_text())
    where = path.relative_to(ROOT)
    if where.parts[0] in TOOLS and where.as_posix().startswith(NOT_YET):
        return
    if not where.as_posix().startswith(NOT_YET):
        yield from _all_docstrings(path, tree)
        yield from _of_comments(path)
        yield from _test_names(path, tree)
    if path in referred():
        yield from _docstrings(path, tree)
    if where.as_posix() in FULL_OF_TEXTS or where.parts[0] == "examples":
        yield from _sentences(path, tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Return) and node.value is not None:
            yield from _sentences(path, node.value)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from _strings(path, node.exc.args[:1])
        elif isinstance(node, ast.Call):
            yield from _strings(path, [word.value for word in node.keywords if word.arg in SHOWN])
            if isinstance(node.func, ast.Attribute) and node.func.attr in LOG_METHODS | {"echo"}:
                yield from _strings(path, node.args[:1])
            elif isinstance(node.func, ast.Name) and node.func.id == "print":
                yield from _strings(path, node.args)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(map(_shown, node.decorator_list)):
            yield _docstring(path, node)


def _shown(decorator: ast.expr) -> bool:
    """Whether the decorated function's docstring is a command's help or a route's description."""
    if "command" in ast.unparse(decorator):
        return True
    return (
        isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Attribute) and decorator.func.attr in ROUTES
    )


def _docstrings(path: Path, tree: ast.Module) -> Iterator[Text]:
    """Those of the module's public names and of their public methods, and texts under attributes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield _docstring(path, node)
            for part in node.body[1:] if isinstance(node, ast.ClassDef) else ():
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and not part.name.startswith("_"):
                    yield _docstring(path, part)
                elif isinstance(part, ast.Expr):
                    yield from _strings(path, [part.value])


def _all_docstrings(path: Path, tree: ast.Module) -> Iterator[Text]:
    """Those of private names as well, and texts under attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield from _strings(path, [node.value])


def _test_names(path: Path, tree: ast.Module) -> Iterator[Text]:
    """The names of tests, as sentences."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield Text(path, node.lineno, node.name.removeprefix("test_").replace("_", " "))


def _docstring(path: Path, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Text:
    """It begins in the line of the first statement."""
    text = re.sub(r"`[^`\n]*`", "``", ast.get_docstring(node, clean=False) or "")
    return Text(path, node.body[0].lineno, text)


@cache
def referred() -> frozenset[Path]:
    """The modules that the site's reference shows, or that define names in it."""
    names = re.findall(r"^::: ([\w.]+)$", REFERENCE.read_text(), re.MULTILINE)
    paths = set()
    for name in names:
        parts = name.split(".")
        for module in (ROOT.joinpath(*parts), ROOT.joinpath(*parts[:-1])):
            if module.with_suffix(".py").is_file():
                paths.add(module.with_suffix(".py"))
    paths |= {ROOT / "sglang_jax/engine/engine.py", ROOT / "sglang_jax/sampling/params.py"}
    return frozenset(paths)


def _strings(path: Path, expressions: list[ast.expr]) -> Iterator[Text]:
    for expression in expressions:
        for node in ast.walk(expression):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield Text(path, node.lineno, re.sub(r"`[^`\n]*`", "``", node.value))


def _sentences(path: Path, tree: ast.AST) -> Iterator[Text]:
    """Strings of a few words or more, apart from docstrings."""
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            text = re.sub(r"`[^`\n]*`", "``", node.value)
            if len(text.split()) >= FEW_WORDS:
                yield Text(path, node.lineno, text)


def found(paths: list[Path], bad: list[Habit]) -> Iterator[str]:
    """A line for each habit found."""
    for path in paths:
        lines = [
            f"{path.relative_to(ROOT)}:{passage.line + passage.text.count(NEWLINE, 0, hit.start())}: "
            f"{hit[0]!r}: write {habit.write}"
            for passage in passages(path)
            for habit in bad
            for hit in habit.find.finditer(passage.text)
        ]
        yield from dict.fromkeys(lines)  # a text may be read for two reasons


def checked_files() -> list[Path]:
    """Without CHANGELOG.md: its past entries stay as they were written."""
    return [
        ROOT / "README.md",
        ROOT / "requirements/README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").glob("*.py")),
        *(path for pattern in OPERATORS_FILES for path in sorted(ROOT.glob(pattern)) if path.suffix != ".json"),
        *sorted((ROOT / "sglang_jax").glob("*.toml")),
        *(path for package in (*PACKAGES, *TOOLS) for path in sorted((ROOT / package).rglob("*.py"))),
    ]


def main() -> None:
    paths = [Path(name).resolve() for name in sys.argv[1:]] or checked_files()
    lines = list(found(paths, habits()))
    print(*lines, sep="\n", end="\n" if lines else "")
    spelt = [str(path) for path in paths if path.relative_to(ROOT).parts[0] not in TOOLS]
    spelling = subprocess.run([sys.executable, "-m", "codespell_lib", *spelt], check=False)
    sys.exit(bool(lines or spelling.returncode))


if __name__ == "__main__":
    main()
