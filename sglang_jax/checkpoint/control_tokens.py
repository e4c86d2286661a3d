"""Control tokens that a message spells out are text: the chat template alone begins and ends turns.

Rendered, a conversation is one string, in which nothing tells the template's `<|im_start|>` from one that a client
wrote. So what messages spell is marked before it is rendered, and the marks are taken out when the text is tokenized.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from typing import TypeVar

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Code points that Unicode keeps for a program's own use: no text is to hold them."""

_MARK = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")

_DEEPEST = 50
"""Levels of a pattern; what branches on behind them is listed."""

Value = TypeVar("Value")


class ControlTokens:
    """The control tokens of a vocabulary, by their spellings."""

    def __init__(self, spellings: Iterable[str]) -> None:
        self._spellings = sorted(filter(None, spellings))
        self._numbers = {spelling: number for number, spelling in enumerate(self._spellings)}
        self._any = re.compile(_pattern(self._spellings)) if self._spellings else None

    def mark(self, value: Value) -> Value:
        """The value with a mark in the place of each control token, in whatever texts it holds: in lists and
        mappings, keys too."""
        if isinstance(value, str):
            return value if self._any is None else self._any.sub(self._mark_of, value)  # type: ignore[return-value]
        if isinstance(value, list):
            return [self.mark(item) for item in value]  # type: ignore[return-value]
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}  # type: ignore[return-value]
        return value

    @staticmethod
    def has_marks(text: str) -> bool:
        """Whether a text may hold marks."""
        return _OPEN in text

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """Parts of a text with marks, one after the other: the text, and whether it is a control token that was marked,
        by its spelling."""
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
        """A text without marks, cut before its first control token; before the white space in front of that, if the
        token takes it."""
        found = None if self._any is None else self._any.search(text)
        if found is None:
            return text, ""
        start = found.start()
        if found[0] in takes_spaces:
            start = len(text[:start].rstrip())
        return text[:start], text[start:]

    def ends(self, text: str, takes_spaces: Set[str] = frozenset()) -> bool:
        """Whether a text without marks ends with a control token; or with the white space behind one that takes it."""
        return text.endswith(tuple(self._spellings)) or text.rstrip().endswith(tuple(takes_spaces))

    def _mark_of(self, found: re.Match[str]) -> str:
        return f"{_OPEN}{self._numbers[found[0]]}{_CLOSE}"


def _pattern(words: list[str], depth: int = 0) -> str:
    """A pattern for any of `words`, the longest that fits. Words that begin alike share their beginning, so that a
    search costs no more for thousands of them."""
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
    """What two texts begin with, and so all that are between them in order."""
    same = (place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other)
    return first[: next(same, min(len(first), len(last)))]
