"""What this project is called where packages are installed, and its version: pyproject.toml says both."""

from __future__ import annotations

from functools import cache
from importlib.metadata import Distribution, entry_points
from pathlib import Path

BACKENDS = "sglang_jax.backends"
"""The group of entry points by which backends are found; those of this project are what it is recognised by."""


@cache
def distribution() -> Distribution:
    """What pip installed this package as. Raises `LookupError` where it was not installed."""
    for entry in entry_points(group=BACKENDS):
        if entry.value.startswith(f"{__package__}.") and entry.dist is not None:
            return entry.dist
    raise LookupError(f"{__package__} is not installed: run `pip install -e .` in the clone")


def documentation(page: str) -> str:
    """Where a page of the documentation is: in the clone that this package is imported from, or in the repository."""
    of_clone = Path(__file__).parents[1] / "docs" / page
    return str(of_clone) if of_clone.is_file() else f"docs/{page} in the repository"


def version() -> str:
    """As in `0.1.0`."""
    return distribution().version
