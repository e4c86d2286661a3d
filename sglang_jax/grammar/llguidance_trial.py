"""Converts grammars for llguidance and tries them on a vocabulary of single bytes; explains errors."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from sglang_jax.errors import GrammarError
from sglang_jax.grammar.lark import HEADER_LINES, find_bound_fault, json_lark, tag_writer, to_lark
from sglang_jax.grammar.schema_paths import MAX_SECONDS, find_constant_fault, find_fault, find_reference_fault
from sglang_jax.sampling.grammar import Grammar, GrammarKind

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Limits of one grammar: seconds and tens of megabytes to compile, a few milliseconds per step, and some 60 MB for its
lexer states, which grow with outputs: 10,000 characters that a schema counts take 35,000 states."""

_EXCERPT = re.compile(r"\n +\d+ \| ")
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_LONG_NUMBER = re.compile(r"\d{16}")
_LEAD = re.compile(r"^(?:at \d+\(\d+\): )?(?:failed to compile JSON schema: )?")


class Trial:
    def __init__(self, specials: Mapping[str, int]) -> None:
        self._specials = specials
        self._bytes = LLTokenizer("byte")
        self._executor = LLExecutor(1)

    def try_out(self, grammar: Grammar) -> str:
        """Converts a grammar to Lark, compiles it, and computes its first mask. Raises `GrammarError`."""
        lark = to_lark(grammar, self._specials)
        if _LONG_NUMBER.search(grammar.text):
            self._check_numbers(grammar)
        text = LLMatcher.grammar_from_lark(lark)
        # A vocabulary of bytes has no named tokens.
        names_tokens = "<[" in lark or "<|" in lark
        if error := _fault(text) if names_tokens else self._try_first_mask(text):
            raise self._explain(grammar, error)
        return lark

    def _check_numbers(self, grammar: Grammar) -> None:
        for field, schema in self._schemas(grammar):
            if found := find_constant_fault(schema) or find_bound_fault(schema):
                raise GrammarError(f"{field} at {found[0]}: {found[1]}", param=field)

    def _schemas(self, grammar: Grammar) -> list[tuple[str, Any]]:
        """Returns the schemas of a grammar, each with the client's name for it."""
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return [(grammar.field, json.loads(grammar.text))]
            case GrammarKind.STRUCTURAL_TAG:
                writer = tag_writer(grammar, self._specials)
                writer.write(json.loads(grammar.text))
                return writer.schemas
        return []

    def _explain(self, grammar: Grammar, error: str) -> GrammarError:
        """Returns an error with its cause and place in the client's terms."""
        message = brief(error)
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return _schema_error(grammar.field, json.loads(grammar.text), message)
            case GrammarKind.STRUCTURAL_TAG:
                until = time.monotonic() + MAX_SECONDS
                for field, schema in self._schemas(grammar):
                    if time.monotonic() > until:
                        break
                    if _schema_fault(schema):
                        return _schema_error(field, schema, message)
            case GrammarKind.EBNF:
                message = _shift_lines(error)
        return GrammarError(f"{grammar.field}: {message}", param=grammar.field)

    def _try_first_mask(self, text: str) -> str:
        """Computes a mask on a library thread, whose stack is smaller than this one's. Returns the error or ''."""
        matcher = LLMatcher(self._bytes, text, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            words = np.zeros((2, -(-self._bytes.vocab_size // 32)), np.int32)
            pairs = [(matcher, 0), (matcher.deep_copy(), 1)]
            self._executor.unsafe_compute_mask_ptr(pairs, words.ctypes.data, words.shape[1] * 4, 2)
        error: str = matcher.get_error()
        return error


def brief(error: str) -> str:
    """Removes excerpts and places that refer to a text that the client has not written."""
    return _LEAD.sub("", _EXCERPT.split(error)[0].split("\n<state>")[0]).removesuffix("<non-verbose/>").strip()


def _schema_error(field: str, schema: Any, message: str) -> GrammarError:
    place, fault = find_reference_fault(schema) or find_fault(schema, _schema_fault)
    where = f" at {place}" if place else ""
    return GrammarError(f"{field}{where}: {fault or message}", param=field)


def _schema_fault(schema: Any) -> str:
    return brief(_fault(LLMatcher.grammar_from_lark(json_lark(schema))))


def _fault(text: str) -> str:
    failed, messages = LLMatcher.validate_grammar_with_warnings(text, limits=LIMITS)
    return messages[0] if failed else ""


def _shift_lines(error: str) -> str:
    """Shifts places to the lines of the client's text."""

    def shifted(found: re.Match[str]) -> str:
        return f"line {max(int(found[1]) - HEADER_LINES, 1)}, column {found[2]}: "

    return _PLACE.sub(shifted, _EXCERPT.split(error)[0]).strip()
