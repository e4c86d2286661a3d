"""The name and version of this project's distribution, from pyproject.toml."""

from __future__ import annotations

from functools import cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path

BACKENDS = "sglang_jax.backends"
"""The group of entry points for backends; this project's entries identify its distribution."""

COMMANDS = "sglang_jax.commands"
"""The group of entry points for commands in packages of the distribution that `sglang_jax` must not import."""


@cache
def distribution() -> Distribution:
    """Returns the distribution of this package. Raises `LookupError` if it is not installed."""
    for entry in entry_points(group=BACKENDS):
        if entry.value.startswith(f"{__package__}.") and entry.dist is not None:
            return entry.dist
    raise LookupError(f"{__package__} is not installed: run `pip install -e .` in the clone")


def command(name: str) -> EntryPoint:
    """Returns the entry point of a command of `COMMANDS`. Raises `LookupError` if it is not installed."""
    for entry in distribution().entry_points.select(group=COMMANDS, name=name):
        return entry
    raise LookupError(f"the command {name} is not installed: run `pip install -e .` in the clone again")


def documentation(page: str) -> str:
    """Returns the path of a documentation page: in the clone that this package is imported from, or the repository."""
    of_clone = Path(__file__).parents[1] / "docs" / page
    return str(of_clone) if of_clone.is_file() else f"docs/{page} in the repository"


def version() -> str:
    """Returns the version, such as `0.1.0`."""
    return distribution().version
