"""Grammars that requests give as text, to constrain their outputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sglang_jax.errors import ParameterError, quote

MAX_GRAMMAR_CHARACTERS = 1 << 20
"""Maximum length of a grammar's text, whatever a server allows: the time to compile it grows with its length, in some
places quadratically."""

MAX_CHOICES = 4096
"""Maximum number of texts in a grammar of kind `CHOICE`."""


class GrammarKind(StrEnum):
    """The language that a grammar is written in.

    - JSON_SCHEMA: a JSON Schema; `{"type": "object"}` allows any JSON object.
    - REGEX: a regular expression that the whole output matches.
    - EBNF: Lark, or the GBNF of llama.cpp; recognised by the text.
    - CHOICE: a JSON list of texts; the output is one of them.
    - STRUCTURAL_TAG: JSON; free text in which triggers start tagged parts, each of which follows a schema.
    """

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    CHOICE = "choice"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar as a request gives it. `text`: in the language of `kind`; `field`: the client's name for it, for error
    messages. Raises `ParameterError` for a text that is empty (only whitespace counts as empty, except in a regular
    expression), too long, or invalid JSON where `kind` needs JSON."""

    kind: GrammarKind
    text: str
    field: str = "grammar"

    def __post_init__(self) -> None:
        if not (
            self.text if self.kind is GrammarKind.REGEX else self.text.strip()
        ):  # " " is a valid regular expression
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
        """Its meaning: grammars with the same content are compiled once."""
        return self.kind, self.text

    def _check_json(self) -> None:
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise ParameterError(f"{self.field} is not JSON: {error}", param=self.field) from error
        if self.kind is GrammarKind.CHOICE:
            if not isinstance(value, list) or not value or not all(isinstance(one, str) and one for one in value):
                raise ParameterError(
                    f"{self.field} must be a list of non-empty texts, got {quote(value)}", param=self.field
                )
            if len(value) > MAX_CHOICES:
                raise ParameterError(
                    f"{self.field} has {len(value)} choices, the limit is {MAX_CHOICES}", param=self.field
                )
        elif not isinstance(value, (dict, bool)) or (
            self.kind is GrammarKind.STRUCTURAL_TAG and value in (True, False)
        ):
            raise ParameterError(f"{self.field} must be a JSON object, got {quote(value)}", param=self.field)


def json_grammar(schema: object, field: str = "grammar") -> Grammar:
    """The grammar of a JSON Schema, given as text or as a value. Raises `ParameterError`."""
    return Grammar(GrammarKind.JSON_SCHEMA, schema if isinstance(schema, str) else _as_json(schema, field), field)


def any_json_object(field: str) -> Grammar:
    """The grammar of any JSON object."""
    return Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}', field)


def regex_grammar(pattern: str) -> Grammar:
    """The grammar of texts that a regular expression matches as a whole. Raises `ParameterError`."""
    return Grammar(GrammarKind.REGEX, pattern)


def ebnf_grammar(text: str) -> Grammar:
    """A grammar in Lark or GBNF. Raises `ParameterError`."""
    return Grammar(GrammarKind.EBNF, text)


def choice_grammar(choices: Sequence[str], field: str = "grammar") -> Grammar:
    """The grammar of exactly one of `choices`. Raises `ParameterError`."""
    return Grammar(GrammarKind.CHOICE, _as_json(list(choices), field), field)


def tag_grammar(tags: object, field: str = "grammar") -> Grammar:
    """The grammar of text with tagged parts, given as JSON text or as a value. Raises `ParameterError`."""
    return Grammar(GrammarKind.STRUCTURAL_TAG, tags if isinstance(tags, str) else _as_json(tags, field), field)


def _as_json(value: object, field: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise ParameterError(f"{field} cannot be written as JSON: {error}", param=field) from error
