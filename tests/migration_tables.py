"""Writes the tables of docs/migration.md from sglang_jax/spellings.toml: python tests/migration_tables.py"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sglang_jax.cli.bench.load import Api
from sglang_jax.cli.bench.workloads import Dataset
from sglang_jax.cli.options import flag_name
from sglang_jax.config import ServerConfig
from sglang_jax.spellings import (
    ALIASES,
    BENCHMARK_REFUSED,
    NEEDLESS,
    NEEDLESS_VARIABLES,
    OTHER_ALIASES,
    REFUSED,
    REFUSED_FAMILIES,
    REFUSED_VALUES,
    SAMPLING_ELSEWHERE,
    SAMPLING_FIELDS,
    SHORT_FLAGS,
    VALUES,
    VARIABLES,
    OtherFlag,
)

PAGE = Path(__file__).parent.parent / "docs/migration.md"
Row = Sequence[str]


def code(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names)


def aliases() -> Iterator[Row]:
    for field, names in ALIASES.items():
        short = [SHORT_FLAGS[field]] if field in SHORT_FLAGS else []
        yield code(*map(flag_name, names), *short), code(flag_name(field))


def options() -> Iterator[tuple[str, str]]:
    """Options with a choice of values, and the names of their enums."""
    for field, info in ServerConfig.model_fields.items():
        if isinstance(info.annotation, type):
            yield flag_name(field), info.annotation.__name__
    yield "bench serving --backend", Api.__name__
    yield "bench serving --dataset-name", Dataset.__name__


def values() -> Iterator[Row]:
    for option, enum in options():
        for spelling, value in VALUES.get(enum, {}).items():
            yield code(option), code(spelling), code(value)


def refused_values() -> Iterator[Row]:
    for option, enum in options():
        notes = REFUSED_VALUES.get(enum, {})
        for note in dict.fromkeys(notes.values()):
            yield code(option), code(*(value for value, reason in notes.items() if reason == note)), note


def benchmarks() -> Iterator[Row]:
    for field, names in OTHER_ALIASES.items():
        if field != "model_path":  # has an alias of every command
            yield code(*map(flag_name, names)), code(flag_name(field))
    yield from notes(BENCHMARK_REFUSED.items())


def notes(flags: Iterable[tuple[str, OtherFlag]]) -> Iterator[Row]:
    for name, other in flags:
        yield code(flag_name(name)), other.note


def families() -> Iterator[tuple[str, OtherFlag]]:
    for start, family in REFUSED_FAMILIES.items():
        yield f"{start}*", family


def sampling() -> Iterator[Row]:
    for name, ours in SAMPLING_FIELDS.items():
        yield code(name), code(ours)


def sampling_elsewhere() -> Iterator[Row]:
    for name, instead in SAMPLING_ELSEWHERE.items():
        yield code(name), code(instead) if "(" in instead else instead


TABLES = {
    "aliases": lambda: aliases(),
    "values": lambda: values(),
    "benchmarks": lambda: benchmarks(),
    "without effect": lambda: notes(NEEDLESS.items()),
    "refused": lambda: notes(sorted([*REFUSED.items(), *families()])),
    "refused values": lambda: refused_values(),
    "environment": lambda: ((code(name), note) for name, note in ({**VARIABLES, **NEEDLESS_VARIABLES}).items()),
    "sampling": lambda: sampling(),
    "sampling elsewhere": lambda: sampling_elsewhere(),
}
"""The rows of each table. In the page, `<!-- table: NAME -->` stands above its header."""


def written(page: str) -> str:
    """Returns the page with the rows of all tables replaced."""
    for name, rows in TABLES.items():
        mark = re.compile(rf"(<!-- table: {name} -->\n\n\|.*\n\|[-|]+\n)(?:\|.*\n)*")
        lines = "".join(f"| {' | '.join(row)} |\n" for row in rows())
        page, found = mark.subn(lambda head, lines=lines: head[1] + lines, page)
        if found != 1:
            raise ValueError(f"{PAGE} has {found} tables {name!r}; it must have one")
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
