"""Takes a reply apart as its text grows: text, reasoning, calls of tools.

What may yet become a marker or a call is held back, so that a stream never takes back what it has sent. What turns out
to be no call is text, as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from sglang_jax.replies.call_reader import CallReader, Reading
from sglang_jax.replies.forms import CallForm, ReplyLayout

_AT_ONCE = 4096
"""Characters that are looked at together: what is held is copied with each call in it."""


@dataclass(frozen=True, slots=True)
class Text:
    """What is new of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What is new of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call, the `index`th of the reply."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """What is new of the arguments of a call: a part of a JSON object's text."""

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
        """Where the first marker stands, and which; the longest of those at a place. Without one an empty text, and
        how much of the front can be no part of one."""
        certain = len(text) if final else self._certain(text)
        found = self._any.search(text)
        if found is not None and found.start() < certain:
            return found.start(), found[0]
        return certain, ""

    def _certain(self, text: str) -> int:
        """Where the end of the text begins a marker that is not whole yet."""
        for candidate in self._begin.finditer(text, max(0, len(text) - self._longest + 1)):
            tail = text[candidate.start() :]
            if any(len(marker) > len(tail) and marker.startswith(tail) for marker in self._markers):
                return candidate.start()
        return len(text)


def _block(forms: Sequence[CallForm]) -> tuple[str, str] | None:
    """Between what enforced calls stand, if a call begins nowhere else."""
    for form in forms:
        written = form.written
        if written is not None and written.before and not written.before.startswith(form.opening):
            return written.before, written.after
    return None


class ReplyParser:
    """The machine. Pieces, joined by their kinds, are the same however the text is cut.

    **Arguments:**

    - `layout`: what the reply may be made of.
    - `in_reasoning`: it begins with reasoning whose beginning is in the prompt.
    - `live`: a grammar enforces the calls, so that each is given as it grows. Otherwise it is given once it is whole,
      as it may yet turn out to be none.
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
        self._in_text = _Markers([*openings, *begins, *layout.silent, *(self._block or ())])
        self._in_reasoning = _Markers([] if reasoning is None else [reasoning.begin, reasoning.end, *reasoning.stops])
        self._silent = _Markers(layout.silent)

    @property
    def num_calls(self) -> int:
        """Calls that were found so far."""
        return self._num_calls

    @property
    def cut(self) -> bool:
        """The reply ended within a call that was given as it grew."""
        return self._cut

    def push(self, text: str) -> list[Piece]:
        """What more text makes certain."""
        self._pieces = []
        for start in range(0, len(text), _AT_ONCE):
            self._held += text[start : start + _AT_ONCE]
            self._run(final=False)
        return self._pieces

    def finish(self) -> list[Piece]:
        """What was held back, at the end of the reply."""
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
        """Goes on to the next marker; whether there may be more to do."""
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
                self._add(Text, before[len(text) :] + self._without_silent(marker))
                self._at_start = self._may_be_bare = False
        elif self._block is not None and marker in self._block:
            self._in_block = marker == self._block[0]
        return True

    def _is_cut_marker(self) -> bool:
        """Nothing but the beginning of a marker is held, behind a call."""
        place, _ = self._in_text.find(self._held, final=False)
        return self._num_calls > 0 and self._may_be_bare and not self._held[:place].strip()

    def _begin(self, *, final: bool) -> bool | None:
        """What a reply may begin with alone: reasoning, or a call without an opening. None if it is neither."""
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
            if marker == reasoning.begin:  # said again by a model whose prompt has said it
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
        """A call may begin with what is held."""
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
                    if self._live and len(self._readers) == 1 and self._broken(reader):
                        return True
        if done:
            self._end_call(min(done, key=lambda reader: reader.at))
            return True
        if self._live and len(going) == 1:
            self._give(going[0])
        self._readers = going
        if going and not final:
            return False
        if self._sent:  # a call that was cut: what was given of it stays given
            self._num_calls += len(self._sent)
            self._cut = True
            self._held = ""
        elif going:  # a reply that ends within what may have been a call
            self._add(Text, self._space + self._without_silent(self._held))
            self._held = ""
        else:
            self._give_up()
            return True
        self._region = _Region.TEXT
        return False

    def _end_call(self, reader: CallReader) -> None:
        self._give(reader)
        self._num_calls += len(reader.found)
        self._held = self._held[reader.at :]
        self._region = _Region.TEXT
        self._readers, self._sent = [], []
        self._at_start, self._may_be_bare = False, True

    def _broken(self, reader: CallReader) -> bool:
        """A call that is enforced and yet is none: what was read of it stays a call, and is cut. Whether there was any
        of it."""
        self._give(reader)
        if not self._sent:
            return False
        self._num_calls += len(self._sent)
        self._cut = True
        self._held = self._held[reader.reached :]
        self._region = _Region.TEXT
        self._readers, self._sent = [], []
        self._at_start = self._may_be_bare = False
        return True

    def _give_up(self) -> None:
        """It was no call: its opening is text, and what follows is looked at again."""
        self._region = _Region.TEXT
        self._at_start = self._may_be_bare = False
        self._add(Text, self._space + self._without_silent(self._opening))
        self._held = self._held[len(self._opening) :]

    def _give(self, reader: CallReader) -> None:
        """Gives what is new of the calls that a reader has found."""
        most = self._layout.most_calls
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

    def _without_silent(self, text: str) -> str:
        kept = ""
        while text:
            place, marker = self._silent.find(text, final=True)
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
