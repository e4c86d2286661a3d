"""Keeps control tokens that a message spells out as plain text: only the chat template starts and ends turns.

A rendered conversation is one string, in which the template's `<|im_start|>` and one that a client wrote look the same.
So spellings in messages are replaced by marks before rendering, and the marks are resolved when the text is tokenized.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from typing import TypeVar

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Noncharacters, which Unicode reserves for internal use."""

_MARK = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")

_DEEPEST = 50
"""Maximum nesting of a pattern; deeper branches are listed as alternatives."""

Value = TypeVar("Value")


class ControlTokens:
    def __init__(self, spellings: Iterable[str]) -> None:
        self._spellings = sorted(filter(None, spellings))
        self._numbers = {spelling: number for number, spelling in enumerate(self._spellings)}
        self._any = re.compile(_pattern(self._spellings)) if self._spellings else None

    def mark(self, value: Value) -> Value:
        """Replaces each control token by a mark, in all texts of a value: in lists and dicts, keys too."""
        if isinstance(value, str):
            return value if self._any is None else self._any.sub(self._mark_of, value)  # type: ignore[return-value]
        if isinstance(value, list):
            return [self.mark(item) for item in value]  # type: ignore[return-value]
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}  # type: ignore[return-value]
        return value

    @staticmethod
    def has_marks(text: str) -> bool:
        return _OPEN in text

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """Splits a text at its marks. Yields each piece, marks as spellings, and whether it was a mark."""
        end = 0
        for found in _MARK.finditer(text):
            number = int(found[1][:9])
            if number < len(self._spellings):
                if found.start() > end:
                    yield text[end : found.start()], False
                yield self._spellings[number], True
                end = found.end()
        if end < len(text):
            yield text[end:], False

    def before_first(self, text: str, takes_spaces: Set[str] = frozenset()) -> tuple[str, str]:
        """Cuts a text without marks before its first control token, or before the white space in front of it if the
        token is in `takes_spaces`."""
        found = None if self._any is None else self._any.search(text)
        if found is None:
            return text, ""
        start = found.start()
        if found[0] in takes_spaces:
            start = len(text[:start].rstrip())
        return text[:start], text[start:]

    def ends(self, text: str, takes_spaces: Set[str] = frozenset()) -> bool:
        """Whether a text without marks ends with a control token, or with white space after one in `takes_spaces`."""
        return text.endswith(tuple(self._spellings)) or text.rstrip().endswith(tuple(takes_spaces))

    def _mark_of(self, found: re.Match[str]) -> str:
        return f"{_OPEN}{self._numbers[found[0]]}{_CLOSE}"


def _pattern(words: list[str], depth: int = 0) -> str:
    """A regular expression for any of `words`, the longest that matches. It is a trie: words share prefixes, so that a
    search costs no more for thousands of words."""
    begin = _common_start(min(words), max(words))
    rests = [word[len(begin) :] for word in words]
    if depth == _DEEPEST:
        longest_first = sorted(rests, key=len, reverse=True)
        return f"{re.escape(begin)}(?:{'|'.join(map(re.escape, longest_first))})"
    by_first: dict[str, list[str]] = {}
    for rest in filter(None, rests):
        by_first.setdefault(rest[0], []).append(rest)
    if not by_first:
        return re.escape(begin)
    branches = "|".join(_pattern(some, depth + 1) for some in by_first.values())
    return f"{re.escape(begin)}(?:{branches}){'?' if '' in rests else ''}"


def _common_start(first: str, last: str) -> str:
    """The common prefix of two texts, and so of all texts between them in sorted order."""
    same = (place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
    return first[: next(same, min(len(first), len(last)))]
