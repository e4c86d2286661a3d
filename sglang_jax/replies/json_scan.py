"""Follows JSON as its text grows, for its structure alone: where it ends, and where the members of its objects lie.

What strings, numbers and names hold is looked at once the whole is there, by a parser of JSON.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum, auto

MOST_DEPTH = 100

_PLAIN = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[-+.\w]*")
_SPACE = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


class Scan(Enum):
    """More may follow; it is whole; it is not JSON."""

    MORE = auto()
    DONE = auto()
    BROKEN = auto()


class _Expect(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()


@dataclass(slots=True)
class Member:
    """A member of an object: its key as written, quotes included, and the places where its value begins and ends; -1
    where that is not known yet."""

    key: str
    begin: int = -1
    end: int = -1


class JsonScanner:
    """One object, or with `lists` a list too, or with `values` whatever is JSON, from `at` on. `objects`: the members
    of the object, or of each object of the list; `ends`: behind each of these that is whole. `deepest`: levels that it
    may have; None for any number."""

    def __init__(self, at: int, *, lists: bool = False, values: bool = False, deepest: int | None = MOST_DEPTH) -> None:
        self.at = at
        self.objects: list[list[Member]] = []
        self.ends: list[int] = []
        self._opens = "" if values else "{[" if lists else "{"
        self._deepest = deepest
        self._stack: list[str] = []
        self._expect = _Expect.VALUE
        self._string_from = -1
        self._in_scalar = False

    def scan(self, text: str) -> Scan:
        """Goes on to the end of `text`, which begins with what it was at the last call, or of the JSON, behind which
        `at` then is."""
        while self.at < len(text):
            if self._string_from >= 0:
                self._string(text)
                if self._string_from >= 0:
                    return Scan.MORE
            elif self._in_scalar:
                self.at = _end(_SCALAR, text, self.at)
                if self.at < len(text):
                    self._in_scalar = False
                    self._value_ended()
            else:
                self.at = _end(_SPACE, text, self.at)
                if self.at < len(text) and not self._character(text[self.at]):
                    return Scan.BROKEN
            if not self._stack and self._expect is _Expect.COMMA_OR_END:
                return Scan.DONE
        return Scan.MORE

    def _string(self, text: str) -> None:
        """Goes on to the end of a string."""
        while True:
            self.at = _end(_PLAIN, text, self.at)
            if self.at == len(text) or (text[self.at] == "\\" and self.at + 1 == len(text)):
                return
            if text[self.at] == '"':
                break
            self.at += 2
        self.at += 1
        begin, self._string_from = self._string_from, -1
        if self._expect in (_Expect.KEY, _Expect.KEY_OR_END):
            if self._in_outer_object():
                self.objects[-1].append(Member(text[begin : self.at]))
            self._expect = _Expect.COLON
        else:
            self._value_ended()

    def _character(self, char: str) -> bool:
        """Takes what stands outside of strings, numbers and names; False if it cannot stand there."""
        match self._expect, char:
            case ((_Expect.KEY | _Expect.KEY_OR_END), '"'):
                self._string_from = self.at
            case _Expect.COLON, ":":
                self._expect = _Expect.VALUE
            case _Expect.COMMA_OR_END, ",":
                self._expect = _Expect.KEY if self._stack[-1] == "{" else _Expect.VALUE
            case ((_Expect.KEY_OR_END | _Expect.COMMA_OR_END), "}") if self._stack[-1] == "{":
                self._close()
                return True
            case ((_Expect.VALUE_OR_END | _Expect.COMMA_OR_END), "]") if self._stack[-1] == "[":
                self._close()
                return True
            case ((_Expect.VALUE | _Expect.VALUE_OR_END), _):
                return self._begin_value(char)
            case _:
                return False
        self.at += 1
        return True

    def _begin_value(self, char: str) -> bool:
        if not self._stack and self._opens and char not in self._opens:
            return False
        if self._in_outer_object():
            self.objects[-1][-1].begin = self.at
        if char in "{[":
            if len(self._stack) == self._deepest:
                return False
            self._stack.append(char)
            if self._in_outer_object():
                self.objects.append([])
            self._expect = _Expect.KEY_OR_END if char == "{" else _Expect.VALUE_OR_END
        elif char == '"':
            self._string_from = self.at
        elif not _SCALAR.fullmatch(char):
            return False
        else:
            self._in_scalar = True
            return True
        self.at += 1
        return True

    def _close(self) -> None:
        closed_object = self._in_outer_object()
        self._stack.pop()
        self.at += 1
        if closed_object:
            self.ends.append(self.at)
        self._value_ended()

    def _value_ended(self) -> None:
        if self._in_outer_object():
            self.objects[-1][-1].end = self.at
        self._expect = _Expect.COMMA_OR_END

    def _in_outer_object(self) -> bool:
        """Whether what comes next belongs to the object itself, or to an object of the list."""
        return self._stack == ["{"] or self._stack == ["[", "{"]


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None  # it matches nothing, too
    return found.end()


def json_object(text: str) -> str | None:
    """The text of a JSON object as a client can parse it, or None if it is none: line ends within strings, as models
    write them, are escaped, and an object written as a string is that object."""
    repaired = _repaired(text)
    value = json_value(repaired)
    if isinstance(value, str):
        repaired = _repaired(value)
        value = json_value(repaired)
        repaired = escape_surrogates(repaired)
    return repaired if isinstance(value, dict) else None


def escape_surrogates(text: str) -> str:
    """JSON whose strings hold no halves of characters, which no text can: they are escaped."""
    return _SURROGATE.sub(_escaped, text)


def _repaired(text: str) -> str:
    return _STRING.sub(lambda string: _CONTROL.sub(_escaped, string[0]), text)


def json_value(text: str) -> object:
    """What a JSON text says; `None` for what is none, and for null."""
    try:
        value: object = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return value


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _escaped(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]
