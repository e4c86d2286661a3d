"""Names and values of other engines' options, read from `spellings.toml`: aliases, options that have no effect, and
options that are refused with a reason.

Flags, keys of a configuration file and keyword arguments of `Engine` are all looked up here, by their names with
underscores. `tests/migration_tables.py` writes the tables of `docs/migration.md` from the same file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

_FILE: Mapping[str, Any] = tomllib.loads(files("sglang_jax").joinpath("spellings.toml").read_text())


@dataclass(frozen=True, slots=True)
class OtherFlag:
    """An option of other engines that this one does not have. `takes_value`: a value follows it on the command line;
    `note`: what to use or expect instead, as a sentence."""

    note: str
    takes_value: bool = False


def _flags(section: str) -> Mapping[str, OtherFlag]:
    """The options of a section by name, in alphabetical order, without its families."""
    names = sorted((name, note) for note, names in _FILE[section].items() for name in names if not name.endswith("*"))
    return {name.removesuffix("="): OtherFlag(note, takes_value=name.endswith("=")) for name, note in names}


def _families(section: str) -> Mapping[str, OtherFlag]:
    """The families of a section by the start of their names, in alphabetical order."""
    names = sorted((name, note) for note, names in _FILE[section].items() for name in names if name.endswith("*"))
    return {name.removesuffix("*"): OtherFlag(note) for name, note in names}


ALIASES: Mapping[str, Sequence[str]] = _FILE["aliases"]
"""Fields of a configuration, and their aliases."""

OTHER_ALIASES: Mapping[str, Sequence[str]] = _FILE["aliases_of_other_commands"]
"""The same for fields of other commands: a benchmark's load and workload, `convert`."""

SHORT_FLAGS: Mapping[str, str] = _FILE["short_flags"]
"""Fields, and their flags with one dash."""

OTHER_SHORT_FLAGS: Mapping[str, str] = _FILE["refused_short_flags"]
"""Refused options of other engines, and their flags with one dash."""

COMMANDS: Mapping[str, str] = _FILE["commands"]
"""Subcommands of other engines, and their names here; `serve` is a subcommand of `bench`."""

NEEDLESS: Mapping[str, OtherFlag] = _flags("without_effect")
"""Options for this engine's fixed behaviour."""

REFUSED: Mapping[str, OtherFlag] = _flags("refused")
"""Options for features that this engine does not have."""

REFUSED_FAMILIES: Mapping[str, OtherFlag] = _families("refused")
"""Families of such options, by the start of their names. No option of this engine is in one."""

BENCHMARK_REFUSED: Mapping[str, OtherFlag] = _flags("refused_by_benchmarks")
"""The same for options of benchmarks that measure a server."""

VARIABLES: Mapping[str, str] = _FILE["environment"]
"""Environment variables of other engines that `config.environment` reads, and what they are the same as."""

NEEDLESS_VARIABLES: Mapping[str, str] = {
    name: note for note, names in _FILE["environment_without_effect"].items() for name in names
}
"""Environment variables of other engines that have no effect, and notes on the behaviour."""

SAMPLING_FIELDS: Mapping[str, str] = _FILE["sampling"]
"""Other engines' names of fields of `SamplingParams`, and their names here."""

SAMPLING_ELSEWHERE: Mapping[str, str] = _FILE["sampling_elsewhere"]
"""Fields of other engines' sampling parameters that this engine does not have, and their alternatives."""

VALUES: Mapping[str, Mapping[str, str]] = _FILE["values"]
"""Enums, and aliases of their values, in lower case and with underscores like the values."""

REFUSED_VALUES: Mapping[str, Mapping[str, str]] = {
    enum: {value: note for note, values in notes.items() for value in values}
    for enum, notes in _FILE["refused_values"].items()
}
"""Enums, and values that only other engines have for the option, with their alternatives."""

_FIELD_OF = {alias: field for field, aliases in ALIASES.items() for alias in aliases}


def canonical(name: str) -> str:
    """Returns the engine's field for an alias, or `name` itself."""
    return _FIELD_OF.get(name, name)


def refusal(name: str) -> str | None:
    """Returns the reason for which an option is refused, by its name or its family; None if it is not."""
    if name in REFUSED:
        return REFUSED[name].note
    return next((family.note for start, family in REFUSED_FAMILIES.items() if name.startswith(start)), None)


def value_named(enum: str, value: str) -> str:
    """Returns the value of the enum `enum` for one of its spellings, ignoring case and the difference of dashes and
    underscores."""
    plain = _plain(value)
    return VALUES.get(enum, {}).get(plain, plain)


def refused_value(enum: str, value: str) -> str | None:
    """Returns the alternative to a value that only other engines have for the enum `enum`; None if the value is
    unknown."""
    return REFUSED_VALUES.get(enum, {}).get(_plain(value))


def _plain(value: str) -> str:
    return value.lower().replace("-", "_")
