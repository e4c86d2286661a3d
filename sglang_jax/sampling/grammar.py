"""What an output must look like: the grammar that a request brings, as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sglang_jax.errors import ParameterError, shown

MAX_GRAMMAR_CHARACTERS = 1 << 20
"""Most characters of a grammar's text, whatever a server allows. What compiling takes grows with it, in places by its
square."""

MAX_CHOICES = 4096
"""Most texts of which an output may be one."""


class GrammarKind(StrEnum):
    """- JSON_SCHEMA: a JSON Schema; `{"type": "object"}` is any JSON object.
    - REGEX: matched from the output's first character to its last.
    - EBNF: Lark, or the GBNF of llama.cpp; the text shows which.
    - CHOICE: a JSON list of texts; the output is one of them.
    - STRUCTURAL_TAG: JSON; free text in which triggers begin tagged parts, each of which follows a schema.
    """

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar as its request gave it.

    - `text`: what `kind` says.
    - `field`: what the client calls it, for errors; not a part of what it means.

    **Raises:** `ParameterError` for an empty text (white space alone is empty, except as a regular expression), one
    that is too long, or JSON that is none.
    """

    kind: GrammarKind
    text: str
    field: str = "grammar"

    def __post_init__(self) -> None:
        if not (self.text if self.kind is GrammarKind.REGEX else self.text.strip()):  # " " is an expression
            raise ParameterError(f"{self.field} is empty", param=self.field)
        if len(self.text) > MAX_GRAMMAR_CHARACTERS:
            raise ParameterError(
                f"{self.field} has {len(self.text)} characters, the limit is {MAX_GRAMMAR_CHARACTERS}", param=self.field
            )
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise ParameterError(
                f"{self.field} contains the lone surrogate U+{ord(self.text[error.start]):04X} at character "
                f"{error.start}",
                param=self.field,
            ) from error
        if self.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.CHOICE, GrammarKind.STRUCTURAL_TAG):
            self._check_json()

    @property
    def content(self) -> tuple[GrammarKind, str]:
        """What it means: grammars with the same content are compiled once."""
        return self.kind, self.text

    def _check_json(self) -> None:
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise ParameterError(f"{self.field} is not JSON: {error}", param=self.field) from error
        if self.kind is GrammarKind.CHOICE:
            if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
                raise ParameterError(
                    f"{self.field} must be a list of non-empty texts, got {shown(value)}", param=self.field
                )
            if len(value) > MAX_CHOICES:
                raise ParameterError(
                    f"{self.field} has {len(value)} choices, the limit is {MAX_CHOICES}", param=self.field
                )
        elif not isinstance(value, (dict, bool)) or (
            self.kind is GrammarKind.STRUCTURAL_TAG and value in (True, False)
        ):
            raise ParameterError(f"{self.field} must be a JSON object, got {shown(value)}", param=self.field)


def json_grammar(schema: object, field: str = "grammar") -> Grammar:
    """The grammar of a JSON Schema: its text, or the value itself. Raises `ParameterError`."""
    return Grammar(GrammarKind.JSON_SCHEMA, schema if isinstance(schema, str) else _as_json(schema, field), field)


def any_json_object(field: str) -> Grammar:
    """The grammar of any JSON object."""
    return Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}', field)


def regex_grammar(pattern: str) -> Grammar:
    """The grammar of what a regular expression matches from end to end. Raises `ParameterError`."""
    return Grammar(GrammarKind.REGEX, pattern)


def ebnf_grammar(text: str) -> Grammar:
    """A grammar in Lark or GBNF. Raises `ParameterError`."""
    return Grammar(GrammarKind.EBNF, text)


def choice_grammar(choices: Sequence[str], field: str = "grammar") -> Grammar:
    """The grammar of one of some texts. Raises `ParameterError`."""
    return Grammar(GrammarKind.CHOICE, _as_json(list(choices), field), field)


def tag_grammar(tags: object, field: str = "grammar") -> Grammar:
    """The grammar of text with tagged parts: JSON text, or the value itself. Raises `ParameterError`."""
    return Grammar(GrammarKind.STRUCTURAL_TAG, tags if isinstance(tags, str) else _as_json(tags, field), field)


def _as_json(value: object, field: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ParameterError(f"{field} cannot be written as JSON: {error}", param=field) from error
