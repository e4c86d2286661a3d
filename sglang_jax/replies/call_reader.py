"""Reads one call of a tool, or a list of them, as its text grows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from sglang_jax.replies.forms import Arguments, CallForm, Calls, Literal, Name, Parameters, Part, Space, Tool, UpTo
from sglang_jax.replies.json_scan import JsonScanner, Member, Scan, json_object, json_value

MOST_NAME_CHARACTERS = 128

NAME = re.compile(r"[A-Za-z0-9_.-]+")
"""The names that tools may have."""

_NAME_KEY = '"name"'
_ARGUMENT_KEYS = ('"arguments"', '"parameters"')
_KEY_END = re.compile(r"[>\n]")
_SPACE = re.compile(r"\s*")


class Reading(Enum):
    """It may go on; the call is whole; it is no call."""

    MORE = auto()
    DONE = auto()
    FAILED = auto()


@dataclass(slots=True)
class FoundCall:
    """A call as far as it was read: `arguments` is the beginning of a JSON object's text."""

    name: str
    arguments: str = ""


class CallReader:
    """Reads a call of one form, from behind its opening.

    **Arguments:** `at`: where it begins in the text that `read` is given; `tools`: those that may be called.
    """

    def __init__(self, form: CallForm, tools: Mapping[str, Tool], at: int) -> None:
        self.at = at
        self.found: list[FoundCall] = []
        self._parts = form.parts
        self._tools = tools
        self._place = 0
        self._scanner: JsonScanner | None = None
        self._searched = at

    def read(self, text: str, *, final: bool, live: bool = False) -> Reading:
        """Reads on. `at` is behind the call once it is whole.

        **Arguments:** `text`: the whole text so far; `final`: there will be no more; `live`: `found` is wanted as it
        grows, and the text is known to be a call.
        """
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
                return self._calls(text, live=live)
            case Parameters():
                return self._parameters(part, text)

    def _literal(self, part: Literal, text: str, *, final: bool) -> Reading:
        if text.startswith(part.text, self.at):
            self.at += len(part.text)
            return Reading.DONE
        if not final and part.text.startswith(text[self.at :]):
            return Reading.MORE
        return Reading.DONE if part.optional else Reading.FAILED

    def _name(self, text: str, *, final: bool) -> Reading:
        found = NAME.match(text, self.at)
        end = self.at if found is None else found.end()
        if end == len(text) and not final and end - self.at <= MOST_NAME_CHARACTERS:
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
        scanner = self._scanner = self._scanner or JsonScanner(self.at)
        begin, scan = self.at, scanner.scan(text)
        call = self.found[-1]
        if live:
            call.arguments = text[begin : scanner.at]
        if scan is not Scan.DONE:
            return Reading.MORE if scan is Scan.MORE else Reading.FAILED
        self.at = scanner.at
        return self._whole(call, text[begin : scanner.at])

    def _calls(self, text: str, *, live: bool) -> Reading:
        scanner = self._scanner = self._scanner or JsonScanner(self.at, lists=True)
        scan = scanner.scan(text)
        if scan is Scan.BROKEN:
            return Reading.FAILED
        if live:
            self.found = _growing(scanner.objects, text, scanner.at)
        if scan is Scan.MORE:
            return Reading.MORE
        self.at = scanner.at
        self.found = [FoundCall("") for _ in scanner.objects]
        for call, members in zip(self.found, scanner.objects, strict=True):
            name = json_value(_value(members, (_NAME_KEY,), text))
            if not isinstance(name, str) or name not in self._tools:
                return Reading.FAILED
            call.name = name
            if self._whole(call, _value(members, _ARGUMENT_KEYS, text) or "{}") is Reading.FAILED:
                return Reading.FAILED
        return Reading.DONE if self.found else Reading.FAILED

    @staticmethod
    def _whole(call: FoundCall, text: str) -> Reading:
        arguments = json_object(text)
        if arguments is None:
            return Reading.FAILED
        call.arguments = arguments
        return Reading.DONE

    def _parameters(self, part: Parameters, text: str) -> Reading:
        """One after the other. Between two of them `at` is behind the first."""
        call = self.found[-1]
        while True:
            found = _SPACE.match(text, self.at)
            assert found is not None  # it matches nothing, too
            at = self.at = found.end()
            if not text.startswith(part.begin, at):
                if part.begin.startswith(text[at:]):
                    return Reading.MORE
                call.arguments = (call.arguments or "{") + "}"
                return Reading.DONE
            key_at = at + len(part.begin)
            key_end = _KEY_END.search(text, key_at, key_at + MOST_NAME_CHARACTERS + 1)
            if key_end is None:
                return Reading.MORE if len(text) - key_at <= MOST_NAME_CHARACTERS else Reading.FAILED
            if not text.startswith(part.named, key_end.start()):
                return Reading.FAILED
            # The search goes on where it ended: values may be long.
            value_end = text.find(part.end, max(self._searched, key_end.end()))
            if value_end < 0:
                self._searched = len(text) - len(part.end)
                return Reading.MORE
            key = text[key_at : key_end.start()].strip()
            value = _without_ends(text[key_end.end() : value_end])
            schema = self._tools[call.name].properties().get(key)
            written = f"{json.dumps(key, ensure_ascii=False)}: {_typed(value, schema)}"
            call.arguments += ("{" if not call.arguments else ", ") + written
            self.at = value_end + len(part.end)


def _growing(objects: Sequence[Sequence[Member]], text: str, at: int) -> list[FoundCall]:
    """The calls of a text that is known to be right, as far as they are there."""
    found = []
    for members in objects:
        name = json_value(_value(members, (_NAME_KEY,), text))
        if not isinstance(name, str):
            break
        found.append(FoundCall(name, _value(members, _ARGUMENT_KEYS, text, at)))
    return found


def _value(members: Sequence[Member], keys: Sequence[str], text: str, at: int = -1) -> str:
    """The text of a member's value, up to `at` where it has not ended; empty if it is not there."""
    for member in members:
        if member.key in keys and member.begin >= 0 and max(member.end, at) >= 0:
            return text[member.begin : member.end if member.end >= 0 else at]
    return ""


def _without_ends(value: str) -> str:
    """Without the line end that stands on each side of a value."""
    return value.removeprefix("\n").removesuffix("\n")


def _typed(value: str, schema: Any) -> str:
    """A bare value as JSON: what its schema says that it is, else a text."""
    types = schema_types(schema)
    plain = value.strip()
    if types and types != {"string"}:
        if plain.lower() in ("true", "false", "null", "none"):
            word = "null" if plain.lower() == "none" else plain.lower()
            if ("null" if word == "null" else "boolean") in types:
                return word
        if "string" not in types and (json_value(plain) is not None or plain == "null"):
            return plain
    return json.dumps(value, ensure_ascii=False)


def schema_types(schema: Any) -> set[str]:
    """The types that a schema lets a value have; empty where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        types |= {one for one in declared if isinstance(one, str)}
    for several in ("anyOf", "oneOf"):
        for one in schema.get(several) or ():
            types |= schema_types(one)
    if not types and isinstance(schema.get("enum"), list):
        types = {"string" if isinstance(one, str) else "value" for one in schema["enum"]}
    return types
