"""Splits a reply into text, reasoning and tool calls as its text grows. Holds text back that may become a marker or a
call, because a stream cannot take it back; returns it unchanged if it turns out not to be one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from sglang_jax.replies.call_reader import CallReader, Reading
from sglang_jax.replies.forms import CallForm, ReplyLayout

_SLICE_CHARACTERS = 4096
"""Characters that are parsed at once: the held text is copied for each call in it."""


@dataclass(frozen=True, slots=True)
class Text:
    """The next part of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next part of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The start of the reply's call number `index`."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of a call's arguments, which are the text of a JSON object."""

    index: int
    text: str


Piece = Text | Reasoning | CallBegin | CallArguments


class _Region(Enum):
    TEXT = auto()
    REASONING = auto()
    CALL = auto()


class _Markers:
    """Finds the first of several literal texts in a text that grows."""

    def __init__(self, markers: Iterable[str]) -> None:
        self._markers = sorted(set(filter(None, markers)), key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, self._markers)) or r"(?!)")
        firsts = "".join(re.escape(marker[0]) for marker in self._markers)
        self._begin = re.compile(f"[{firsts}]" if firsts else r"(?!)")
        self._longest = max(map(len, self._markers), default=0)

    def find(self, text: str, *, final: bool) -> tuple[int, str]:
        """Returns the position of the first marker, and the longest one there. Without a marker, returns an empty text,
        and the length of the front that cannot be part of one."""
        certain = len(text) if final else self._certain(text)
        found = self._any.search(text)
        if found is not None and found.start() < certain:
            return found.start(), found[0]
        return certain, ""

    def _certain(self, text: str) -> int:
        """Returns the position where an incomplete marker starts at the end of the text, or the text's length."""
        for candidate in self._begin.finditer(text, max(0, len(text) - self._longest + 1)):
            tail = text[candidate.start() :]
            if any(len(marker) > len(tail) and marker.startswith(tail) for marker in self._markers):
                return candidate.start()
        return len(text)


def _block(forms: Sequence[CallForm]) -> tuple[str, str] | None:
    """Returns the markers around enforced calls, if calls start only between them."""
    for form in forms:
        written = form.written
        if written is not None and written.before and not written.before.startswith(form.opening):
            return written.before, written.after
    return None


class ReplyParser:
    """The parser of one reply. However the text is split, the pieces are the same once joined by kind.

    - `in_reasoning`: the prompt has opened the reasoning with which the reply starts.
    - `live`: a grammar enforces the calls, so that each is returned as it grows. Otherwise it is returned when it is
      complete, because until then it may turn out not to be a call.
    """

    def __init__(self, layout: ReplyLayout, *, in_reasoning: bool = False, live: bool = False) -> None:
        self._layout = layout
        self._live = live
        self._region = _Region.REASONING if in_reasoning else _Region.TEXT
        self._held = ""
        self._space = ""
        self._opening = ""
        self._readers: list[CallReader] = []
        self._pieces: list[Piece] = []
        self._num_calls = 0
        self._cut = False
        self._sent: list[int] = []
        self._skip_space = in_reasoning and layout.separate
        self._at_start = True
        self._may_be_bare = not in_reasoning
        reasoning = layout.reasoning
        self._bare = tuple(begin for form in layout.forms if not form.opening for begin in form.begins)
        self._block = _block(layout.forms) if live else None
        self._in_block = False
        begins = (reasoning.begin,) if reasoning is not None and reasoning.anywhere else ()
        openings = [form.opening for form in layout.forms]
        self._in_text = _Markers([*openings, *begins, *layout.hidden, *(self._block or ())])
        self._in_reasoning = _Markers([] if reasoning is None else [reasoning.begin, reasoning.end, *reasoning.stops])
        self._hidden = _Markers(layout.hidden)

    @property
    def num_calls(self) -> int:
        return self._num_calls

    @property
    def cut(self) -> bool:
        """Whether the reply ended within a call that was returned as it grew."""
        return self._cut

    def push(self, text: str) -> list[Piece]:
        """Adds text, and returns the pieces that are now certain."""
        self._pieces = []
        for start in range(0, len(text), _SLICE_CHARACTERS):
            self._held += text[start : start + _SLICE_CHARACTERS]
            self._run(final=False)
        return self._pieces

    def finish(self) -> list[Piece]:
        self._pieces = []
        self._run(final=True)
        return self._pieces

    def _run(self, *, final: bool) -> None:
        going = True
        while going:
            match self._region:
                case _Region.TEXT:
                    going = self._text(final=final)
                case _Region.REASONING:
                    going = self._reasoning(final=final)
                case _Region.CALL:
                    going = self._call(final=final)

    def _text(self, *, final: bool) -> bool:
        """Continues to the next marker. Returns whether there may be more to do."""
        if self._skip_space:
            self._held = self._held.lstrip()
            self._skip_space = not self._held
        if self._at_start or self._may_be_bare:
            begun = self._begin(final=final)
            if begun is not None:
                return begun
        place, marker = self._in_text.find(self._held, final=final)
        if final and not marker and self._is_cut_marker():
            self._held = ""
            return False
        before, rest = self._held[:place], self._held[place:]
        text = before.rstrip()
        if text:
            self._add(Text, text)
            self._at_start = self._may_be_bare = False
        if not marker:
            if final and not self._num_calls:
                self._add(Text, before[len(text) :])
            self._held = "" if final else before[len(text) :] + rest
            return False
        self._held = rest[len(marker) :]
        reasoning = self._layout.reasoning
        if reasoning is not None and marker == reasoning.begin:
            self._begin_reasoning(before[len(text) :] + marker)
        elif any(form.opening == marker for form in self._layout.forms):
            if self._block is None or self._in_block:
                self._begin_call(before[len(text) :], marker)
            else:
                self._add(Text, before[len(text) :] + self._without_hidden(marker))
                self._at_start = self._may_be_bare = False
        elif self._block is not None and marker in self._block:
            self._in_block = marker == self._block[0]
        return True

    def _is_cut_marker(self) -> bool:
        """Whether only the start of a marker is held, after a call."""
        place, _ = self._in_text.find(self._held, final=False)
        return self._num_calls > 0 and self._may_be_bare and not self._held[:place].strip()

    def _begin(self, *, final: bool) -> bool | None:
        """Handles reasoning and calls without an opening, which are valid only at the start or after another call.
        Returns whether there may be more to do; None if it is neither."""
        stripped = self._held.lstrip()
        reasoning = self._layout.reasoning
        if reasoning is not None and self._at_start and not reasoning.anywhere:
            if stripped.startswith(reasoning.begin):
                self._held = stripped[len(reasoning.begin) :]
                self._begin_reasoning(reasoning.begin)
                return True
            if reasoning.begin.startswith(stripped) and not final:
                return False
        if self._may_be_bare and self._bare:
            if not stripped and not final:
                return False
            if self._num_calls and self._layout.separator and stripped.startswith(self._layout.separator):
                self._held = stripped[len(self._layout.separator) :]
                return True
            if not final and any(begin.startswith(stripped) for begin in self._bare):
                return False
            if stripped.startswith(self._bare):
                space = self._held[: len(self._held) - len(stripped)]
                self._held = stripped
                self._begin_call(space, "")
                return True
        return None

    def _begin_reasoning(self, marker: str) -> None:
        self._region = _Region.REASONING
        self._at_start = False
        if self._layout.separate:
            self._skip_space = True
        else:
            self._add(Text, marker)

    def _reasoning(self, *, final: bool) -> bool:
        reasoning, separate = self._layout.reasoning, self._layout.separate
        assert reasoning is not None
        if self._skip_space:
            self._held = self._held.lstrip()
            self._skip_space = not self._held
        place, marker = self._in_reasoning.find(self._held, final=final)
        before, rest = self._held[:place], self._held[place:]
        if not separate:
            ended = marker in reasoning.stops
            self._add(Text, before if ended else before + marker)
            self._held = rest if ended else rest[len(marker) :]
        else:
            text = before.rstrip()
            if text:
                self._add(Reasoning, text)
                self._at_start = False
            space = before[len(text) :]
            if marker == reasoning.begin:  # repeated by a model whose prompt already has it
                self._held = space + rest[len(marker) :]
                self._skip_space = self._at_start
            elif marker in reasoning.stops:
                self._held = rest
            else:
                self._held = rest[len(marker) :] if marker or final else space + rest
        if marker == reasoning.end or marker in reasoning.stops:
            self._region = _Region.TEXT
            self._at_start, self._may_be_bare = False, True
            self._skip_space = separate
        return bool(marker)

    def _begin_call(self, space: str, opening: str) -> None:
        """Starts to read a possible call in the held text."""
        self._region = _Region.CALL
        self._space, self._opening = space, opening
        self._held = opening + self._held
        forms: list[CallForm] = [form for form in self._layout.forms if form.opening == opening]
        tools, required = self._layout.tools, self._layout.required
        self._readers = [CallReader(form, tools, len(opening), required=required) for form in forms]
        self._sent = []

    def _call(self, *, final: bool) -> bool:
        done: list[CallReader] = []
        going: list[CallReader] = []
        for reader in self._readers:
            match reader.read(self._held, final=final, live=self._live):
                case Reading.DONE:
                    done.append(reader)
                case Reading.MORE:
                    going.append(reader)
                case Reading.FAILED:
                    if self._live and len(self._readers) == 1 and self._cut_call(reader):
                        return True
        if done:
            self._end_call(min(done, key=lambda reader: reader.at))
            return True
        if self._live and len(going) == 1:
            self._add_pieces(going[0])
        self._readers = going
        if going and not final:
            return False
        if self._sent:  # a call was cut: its returned part cannot be taken back
            self._num_calls += len(self._sent)
            self._cut = True
            self._held = ""
        elif going:  # the reply ends within a possible call
            self._add(Text, self._space + self._without_hidden(self._held))
            self._held = ""
        else:
            self._treat_as_text()
            return True
        self._region = _Region.TEXT
        return False

    def _end_call(self, reader: CallReader) -> None:
        self._add_pieces(reader)
        self._num_calls += len(reader.found)
        self._held = self._held[reader.at :]
        self._region = _Region.TEXT
        self._readers, self._sent = [], []
        self._at_start, self._may_be_bare = False, True

    def _cut_call(self, reader: CallReader) -> bool:
        """Ends an enforced call that is invalid: the part read so far stays a call, which is cut. False without a
        part."""
        self._add_pieces(reader)
        if not self._sent:
            return False
        self._num_calls += len(self._sent)
        self._cut = True
        self._held = self._held[reader.reached :]
        self._region = _Region.TEXT
        self._readers, self._sent = [], []
        self._at_start = self._may_be_bare = False
        return True

    def _treat_as_text(self) -> None:
        """Treats the opening as text, because no call followed, and parses the rest again."""
        self._region = _Region.TEXT
        self._at_start = self._may_be_bare = False
        self._add(Text, self._space + self._without_hidden(self._opening))
        self._held = self._held[len(self._opening) :]

    def _add_pieces(self, reader: CallReader) -> None:
        """Adds the pieces for the new parts of a reader's calls."""
        most = self._layout.max_calls
        for number in range(max(len(self._sent) - 1, 0), len(reader.found)):
            call = reader.found[number]
            index = self._num_calls + number
            if most is not None and index >= most:
                return
            if number == len(self._sent):
                if call.name not in self._layout.tools:
                    return
                self._pieces.append(CallBegin(index, call.name))
                self._sent.append(0)
            new = call.arguments[self._sent[number] :]
            if new:
                self._pieces.append(CallArguments(index, new))
                self._sent[number] += len(new)

    def _without_hidden(self, text: str) -> str:
        kept = ""
        while text:
            place, marker = self._hidden.find(text, final=True)
            kept, text = kept + text[:place], text[place + len(marker) :]
        return kept

    def _add(self, kind: type[Text] | type[Reasoning], text: str) -> None:
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, kind):
            self._pieces[-1] = kind(last.text + text)
        else:
            self._pieces.append(kind(text))
