"""Scans the structure of JSON as its text grows: its end, and the positions of the members of its objects. Strings,
numbers and names are not validated here: a JSON parser reads them when the text is complete."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum, auto

MAX_DEPTH = 100

_PLAIN = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[-+.\w]*")
_SPACE = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")


class Scan(Enum):
    """The state of a scan: more text is needed; the JSON is complete; or the text is not JSON."""

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
    """A member of an object: its key with quotes, and where its value begins and ends; -1 if not known yet."""

    key: str
    begin: int = -1
    end: int = -1


class JsonScanner:
    """Scans one object from position `at`; with `lists`, also a list; with `values`, any JSON. `objects`: the members
    of the object, or of each in the list; `ends`: the end of each complete one; `max_depth`: None for no limit."""

    def __init__(
        self, at: int, *, lists: bool = False, values: bool = False, max_depth: int | None = MAX_DEPTH
    ) -> None:
        self.at = at
        self.objects: list[list[Member]] = []
        self.ends: list[int] = []
        self._opens = "" if values else "{[" if lists else "{"
        self._max_depth = max_depth
        self._stack: list[str] = []
        self._expect = _Expect.VALUE
        self._string_from = -1
        self._in_scalar = False

    def scan(self, text: str) -> Scan:
        """Continues to the end of the JSON, which is then `at`, or of `text`, all text so far."""
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
        """Reads a character outside of strings, numbers and names; False if it is not valid there."""
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
            if len(self._stack) == self._max_depth:
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
        """Whether the position is directly within the object, or an object of the list."""
        return self._stack == ["{"] or self._stack == ["[", "{"]


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None  # it matches empty text
    return found.end()


def json_object(text: str) -> str | None:
    """Returns a JSON object as text that a client can parse; None for other texts. Escapes line ends within strings,
    which models write, and unpacks an object that is written as a string."""
    repaired = _repaired(text)
    value = json_value(repaired)
    if isinstance(value, str):
        repaired = _repaired(value)
        value = json_value(repaired)
        repaired = escape_surrogates(repaired)
    return repaired if isinstance(value, dict) else None


def escape_surrogates(text: str) -> str:
    """Escapes lone surrogates in the strings of JSON, because they cannot be encoded."""
    return _SURROGATE.sub(_escaped, text)


def _repaired(text: str) -> str:
    return _STRING.sub(lambda string: _CONTROL.sub(_escaped, string[0]), text)


def json_value(text: str) -> object:
    """Returns the value of a JSON text; None for null and for invalid JSON."""
    try:
        value: object = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return value


def _refuse(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _escaped(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]
