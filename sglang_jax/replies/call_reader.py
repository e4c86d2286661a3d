"""Reads one tool call, or a list of them, as its text grows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from sglang_jax.replies.argument_schemas import ArgumentSchemas
from sglang_jax.replies.forms import Arguments, CallForm, Calls, Literal, Name, Parameters, Part, Space, Tool, UpTo
from sglang_jax.replies.json_scan import MAX_DEPTH, JsonScanner, Member, Scan, json_object, json_value

MAX_TOOL_NAME_CHARACTERS = 128

NAME = re.compile(r"[A-Za-z0-9_.-]+")
"""Valid names of tools."""

_NAME_KEY = '"name"'
_ARGUMENT_KEYS = ('"arguments"', '"parameters"')
_SCALAR = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?|true|false|null")
_NO_ARGUMENTS = ("null", '""')
_KEY_END = re.compile(r"[>\n]")
_SPACE = re.compile(r"\s*")


class Reading(Enum):
    """The state of reading: more text is needed; the call is complete; or the text is not a call."""

    MORE = auto()
    DONE = auto()
    FAILED = auto()


@dataclass(slots=True)
class FoundCall:
    """A call as far as it was read. `arguments`: the text of a JSON object so far."""

    name: str
    arguments: str = ""


class CallReader:
    """Reads a call of one form, after its opening, from position `at` of the text for `read`. `tools`: those that may
    be called; `required`: see `ReplyLayout`."""

    def __init__(self, form: CallForm, tools: Mapping[str, Tool], at: int, *, required: bool = False) -> None:
        self.at = at
        self.found: list[FoundCall] = []
        self._parts = form.parts
        self._tools = tools
        self._required = required
        self._schemas: ArgumentSchemas | None = None
        self._place = 0
        self._scanner: JsonScanner | None = None
        self._searched = at
        self._value_end, self._value_scan = -1, Scan.MORE

    @property
    def reached(self) -> int:
        return self.at if self._scanner is None else max(self.at, self._scanner.at)

    def read(self, text: str, *, final: bool, live: bool = False) -> Reading:
        """Continues reading in `text`, all text so far. After a complete call, `at` is its end. `final`: there will be
        no more; `live`: the text is known to be a call, and `found` is to grow with it."""
        while self._place < len(self._parts):
            reading = self._part(self._parts[self._place], text, final=final, live=live)
            if reading is not Reading.DONE:
                return reading
            self._place += 1
            self._scanner = None
        return Reading.DONE if all(call.name in self._tools for call in self.found) else Reading.FAILED

    def _part(self, part: Part, text: str, *, final: bool, live: bool) -> Reading:
        match part:
            case Literal():
                return self._literal(part, text, final=final)
            case Space():
                while self.at < len(text) and text[self.at].isspace():
                    self.at += 1
                return Reading.DONE if final or self.at < len(text) else Reading.MORE
            case Name():
                return self._name(text, final=final)
            case UpTo():
                return self._up_to(part, text)
            case Arguments():
                return self._arguments(text, live=live)
            case Calls():
                return self._calls(text, final=final, live=live)
            case Parameters():
                return self._parameters(part, text, live=live)

    def _literal(self, part: Literal, text: str, *, final: bool) -> Reading:
        at = self.at
        while part.spaced and at < len(text) and text[at].isspace():
            at += 1
        if text.startswith(part.text, at):
            self.at = at + len(part.text)
            return Reading.DONE
        if part.text.startswith(text[at:]):
            if not final:
                return Reading.MORE
            if self._has_arguments():  # the reply was cut within the end of the call
                self.at = len(text)
                return Reading.DONE
        return Reading.DONE if part.optional or (part.ends and at == len(text)) else Reading.FAILED

    def _has_arguments(self) -> bool:
        return any(isinstance(part, (Arguments, Calls, Parameters)) for part in self._parts[: self._place])

    def _name(self, text: str, *, final: bool) -> Reading:
        found = NAME.match(text, self.at)
        end = self.at if found is None else found.end()
        if end == len(text) and not final and end - self.at <= MAX_TOOL_NAME_CHARACTERS:
            return Reading.MORE
        name = text[self.at : end]
        if name not in self._tools:
            return Reading.FAILED
        self.at = end
        self.found.append(FoundCall(name))
        return Reading.DONE

    def _up_to(self, part: UpTo, text: str) -> Reading:
        end = text.find(part.text, self.at, self.at + part.most + len(part.text))
        if end >= 0:
            self.at = end + len(part.text)
            return Reading.DONE
        return Reading.MORE if len(text) - self.at < part.most + len(part.text) else Reading.FAILED

    def _arguments(self, text: str, *, live: bool) -> Reading:
        scanner = self._scanner = self._scanner or JsonScanner(self.at, max_depth=None if live else MAX_DEPTH)
        begin, scan = self.at, scanner.scan(text)
        call = self.found[-1]
        if live:
            call.arguments = text[begin : scanner.at]
        if scan is not Scan.DONE:
            return Reading.MORE if scan is Scan.MORE else Reading.FAILED
        self.at = scanner.at
        return Reading.DONE if live else self._whole(call, text[begin : scanner.at])

    def _calls(self, text: str, *, final: bool, live: bool) -> Reading:
        scanner = self._scanner
        if scanner is None:
            scanner = self._scanner = JsonScanner(self.at, lists=True, max_depth=None if live else MAX_DEPTH)
        scan = scanner.scan(text)
        if live:
            self._grow(scanner, text)
        whole, end = len(scanner.objects), scanner.at
        if scan is Scan.MORE and final and scanner.ends and (not live or len(scanner.ends) == whole):
            whole, end, scan = len(scanner.ends), scanner.ends[-1], Scan.DONE  # a list was cut after a complete call
            while end < len(text) and (text[end].isspace() or text[end] == ","):
                end += 1
        if scan is not Scan.DONE:
            return Reading.MORE if scan is Scan.MORE else Reading.FAILED
        self.at = end
        if live:
            return Reading.DONE if self.found and len(self.found) == whole else Reading.FAILED
        for members in scanner.objects[:whole]:
            name = json_value(_value(members, (_NAME_KEY,), text))
            if not isinstance(name, str) or name not in self._tools:
                return Reading.FAILED
            self.found.append(FoundCall(name))
            if self._whole(self.found[-1], _value(members, _ARGUMENT_KEYS, text) or "{}") is Reading.FAILED:
                return Reading.FAILED
        return Reading.DONE if self.found else Reading.FAILED

    def _grow(self, scanner: JsonScanner, text: str) -> None:
        """Updates `found` from a text that is known to be calls. Calls before the last one are complete and stay."""
        for number in range(max(len(self.found) - 1, 0), len(scanner.objects)):
            members = scanner.objects[number]
            name = json_value(_value(members, (_NAME_KEY,), text))
            if not isinstance(name, str) or number > len(self.found):
                return
            self.found[number:] = [FoundCall(name, _value(members, _ARGUMENT_KEYS, text, scanner.at))]

    @staticmethod
    def _whole(call: FoundCall, text: str) -> Reading:
        arguments = "{}" if text in _NO_ARGUMENTS else json_object(text)
        if arguments is None:
            return Reading.FAILED
        call.arguments = arguments
        return Reading.DONE

    def _parameters(self, part: Parameters, text: str, *, live: bool) -> Reading:
        """Reads arguments one by one. Between two of them, `at` is the end of the first."""
        call = self.found[-1]
        tool = self._tools[call.name]
        if self._schemas is None:
            self._schemas = ArgumentSchemas(tool.parameters, part.end)
        schemas = self._schemas
        while True:
            found = _SPACE.match(text, self.at)
            assert found is not None  # it matches empty text
            at = self.at = found.end()
            if not text.startswith(part.begin, at):
                if part.begin.startswith(text[at:]):
                    return Reading.MORE
                call.arguments = (call.arguments or "{") + "}"
                return Reading.DONE
            key_at = at + len(part.begin)
            key_end = _KEY_END.search(text, key_at, key_at + MAX_TOOL_NAME_CHARACTERS + 1)
            if key_end is None:
                return Reading.MORE if len(text) - key_at <= MAX_TOOL_NAME_CHARACTERS else Reading.FAILED
            if not text.startswith(part.named, key_end.start()):
                return Reading.FAILED
            key = text[key_at : key_end.start()]
            key = key if key in schemas.named else key.strip()
            schema = schemas.of(key)
            begin = self._searched = max(self._searched, key_end.end())
            as_json = ""
            if live and (self._required or tool.strict) and not schemas.bare(schema):
                # JSON strings may contain the marker that ends bare values.
                scan = self._json_end(text, key_end.end())
                if scan is Scan.MORE:
                    return Reading.MORE
                as_json = text[key_end.end() : self._value_end].strip()
                if scan is Scan.DONE and (as_json[0] in '"{[' or _SCALAR.fullmatch(as_json)):
                    begin = max(begin, self._value_end)
                else:
                    as_json = ""
            ends = re.compile(re.escape(part.end) if live else f"{re.escape(part.end)}|\n{re.escape(part.begin)}")
            end = ends.search(text, begin)
            if end is None:
                # The next search continues here, because values may be long.
                self._searched = max(begin, len(text) - len(part.end) - len(part.begin))
                return Reading.MORE
            value = _without_ends(text[key_end.end() : end.start()])
            written = f"{json.dumps(key, ensure_ascii=False)}: {as_json or schemas.as_json(value, schema)}"
            call.arguments += ("{" if not call.arguments else ", ") + written
            self.at = end.end() if end[0] == part.end else end.start()
            self._searched, self._scanner, self._value_end = self.at, None, -1

    def _json_end(self, text: str, at: int) -> Scan:
        """Continues reading a JSON value, and sets `_value_end` when it is complete."""
        if self._value_end < 0:
            self._scanner = self._scanner or JsonScanner(at, values=True, max_depth=None)
            self._value_scan = self._scanner.scan(text)
            if self._value_scan is not Scan.MORE:
                self._value_end = self._scanner.at
        return self._value_scan


def _value(members: Sequence[Member], keys: Sequence[str], text: str, at: int = -1) -> str:
    """Returns the text of a member's value, up to `at` if it is incomplete; empty if there is no such member."""
    for member in members:
        if member.key in keys and member.begin >= 0 and max(member.end, at) >= 0:
            return text[member.begin : member.end if member.end >= 0 else at]
    return ""


def _without_ends(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")
