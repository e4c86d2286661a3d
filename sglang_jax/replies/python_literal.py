"""Reads Python lists and dicts, which models sometimes write instead of JSON."""

from __future__ import annotations

import ast
import json
import re

from sglang_jax.replies.json_scan import escape_surrogates

MAX_CHARACTERS = 16_384
"""Maximum characters of a literal: Python's parser takes some hundred bytes for each."""

_HEX = r"[\da-fA-F]"
_OCTAL = r"(?![4-7][0-7]{2})[0-7]{1,3}"
_ESCAPE = rf"\\(?:[\\'\"abfnrtv\n]|x{_HEX}{{2}}|u{_HEX}{{4}}|U00(?:0{_HEX}|10){_HEX}{{4}}|{_OCTAL})"
_LITERAL = re.compile(
    rf"""(?:'(?:[^'\\\n]|{_ESCAPE})*+' | "(?:[^"\\\n]|{_ESCAPE})*+"
    | (?:-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)? | True | False | None)(?![\w.'"])
    | [\[\](){{}},:] | \s)*+""",
    re.VERBOSE | re.ASCII,
)
"""The tokens of a literal. Python's parser warns of some others, and would accept prefixes and names."""


def python_literal(text: str) -> tuple[object, str] | None:
    """Returns the value of a Python list or dict, and the same as JSON; None for others, long ones and non-JSON."""
    if len(text) > MAX_CHARACTERS or text[:1] not in ("[", "{") or not _LITERAL.fullmatch(text):
        return None
    try:
        value: object = ast.literal_eval(text)
        if not _has_text_keys(value):
            return None
        return value, escape_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _has_text_keys(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_text_keys(inner) for key, inner in value.items())
    return not isinstance(value, (list, tuple)) or all(map(_has_text_keys, value))
