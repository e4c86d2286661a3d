"""Prints the test files that a change affects: `make test-changed`, or since a commit, `make test-changed SINCE=main`.

A test file is affected if it or a helper that it imports has changed, or if it imports a changed module, directly or
through others. Test files that start processes depend on all modules, because imports do not show what those run.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path, PurePosixPath

import grimp

ROOT = Path(__file__).parent.parent
PACKAGES = ("sglang_jax", "torch_backend", "tpu")
EVERYTHING = ("tests",)
STARTS_PROCESSES = ("subprocess", "multiprocessing")
LOADS_BACKENDS = "sglang_jax.runner.backends"
"""Imports backends by their entry points, which the import graph does not show."""

READERS = {
    "docs": ("tests/prose", *(f"tests/test_docs_{name}.py" for name in ("examples", "links", "models", "reference"))),
    "README.md": ("tests/test_docs_examples.py", "tests/test_docs_links.py", "tests/test_packaging_wheel.py"),
    "CHANGELOG.md": ("tests/test_docs_links.py",),
    "benchmarks": ("tests/benchmarks", "tests/cli", "tests/test_docs_links.py"),
    "deploy": ("tests/test_deployment.py", "tests/test_fleet_recipe.py"),
    "examples": ("tests/test_docs_examples.py",),
    "Dockerfile": ("tests/test_packaging_commands.py", "tests/test_deployment.py"),
}
"""Test files that read files outside the packages; a file not listed here may be read by any test."""


def changed_files(since: str) -> list[str]:
    """Paths relative to the root of tracked files that differ from this commit, and of new ones."""
    commands = (["diff", "--name-only", since], ["ls-files", "--others", "--exclude-standard"])
    found = (
        subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        for command in commands
    )
    return sorted({path for paths in found for path in paths})


def import_graph() -> grimp.ImportGraph:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None, exclude_type_checking_imports=True)
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for target in {entry.partition(":")[0] for entries in groups.values() for entry in entries.values()}:
        graph.add_import(importer=LOADS_BACKENDS, imported=target)
    return graph


@cache
def imported_names(path: Path) -> set[str]:
    """Dotted names that a file imports, with their packages; for `from a import b` both a and a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    found |= {module for name, module in lazy_names().items() if name in found}
    return {part for name in found for part in with_packages(name)}


@cache
def lazy_names() -> dict[str, str]:
    """The lazily imported names of `sglang_jax`, and their modules."""
    tree = ast.parse((ROOT / "sglang_jax/__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return {f"sglang_jax.{alias.name}": str(node.module) for node in imports for alias in node.names}


def with_packages(name: str) -> list[str]:
    """`a.b.c`: a.b.c, a.b and a."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def touched_tests(changed: Iterable[str]) -> list[str]:
    """Paths of test files and folders for pytest, relative to the root."""
    chosen: set[str] = set()
    modules: set[str] = set()
    helpers: set[str] = set()
    for path in map(PurePosixPath, changed):
        match path.parts:
            case (package, *_) if package in PACKAGES:
                modules.add(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
            case ("tests", "helpers", *_) if path.suffix == ".py":
                helpers.add(f"helpers.{path.stem}")
            case ("tests", *_, name) if name.startswith("test_") and (ROOT / path).exists():
                chosen.add(str(path))
            case ("tests", _, "conftest.py"):
                chosen.add(str(path.parent))
            case (top, *_) if top in READERS:
                chosen.update(READERS[top])
            case _:
                return list(EVERYTHING)
    return sorted(chosen | _importers(modules, helpers))


def _importers(modules: set[str], helpers: set[str]) -> set[str]:
    """Test files that depend on one of these modules of the product or of the tests' helpers."""
    graph = import_graph()
    # a file that was removed, or is not Python, belongs to its package
    known = {next(part for part in with_packages(name) if part in graph.modules) for name in modules}
    wanted = known.union(*(graph.find_downstream_modules(name) for name in known))
    wanted |= helpers | set(STARTS_PROCESSES if modules else ())
    imported = {f"helpers.{path.stem}": imported_names(path) for path in (ROOT / "tests/helpers").glob("*.py")}
    while more := {name for name, names in imported.items() if name not in wanted and names & wanted}:
        wanted |= more
    tests = (path for path in (ROOT / "tests").rglob("test_*.py") if not {"on_ray", "web"} & {*path.parts})
    return {str(path.relative_to(ROOT)) for path in tests if imported_names(path) & wanted}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", default="HEAD", metavar="COMMIT", help="compare the working tree with this commit")
    since = parser.parse_args().since
    changed = changed_files(since)
    if not changed:
        print(f"nothing differs from {since}; give another commit: make test-changed SINCE=main", file=sys.stderr)
        return 1
    print(*touched_tests(changed) or EVERYTHING)
    return 0


if __name__ == "__main__":
    sys.exit(main())
