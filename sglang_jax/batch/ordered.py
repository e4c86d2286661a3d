"""Writes output in input order: lines that finish early wait in a spool on disk."""

from __future__ import annotations

import os
import re
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path

from sglang_jax.batch.append_file import AppendFile
from sglang_jax.batch.journal import Journal, Kind, number_of, recover

SEGMENT_BYTES = 16 * 2**20
"""Size in bytes after which a new segment of the spool is started."""

_MARKS = {Kind.OUTPUT: b"O", Kind.ERROR: b"E"}
_KINDS = {mark: kind for kind, mark in _MARKS.items()}
_SEGMENT = re.compile(r"spool-(\d+)")


@dataclass(frozen=True, slots=True)
class _Place:
    kind: Kind
    segment: int
    offset: int
    length: int


def _spooled_number(line: bytes) -> int | None:
    return number_of(line[1:]) if line[:1] in _KINDS else None


class Spool:
    """Finished lines by number, on disk. A segment is removed once none of its lines is waiting."""

    def __init__(self, folder: Path, journal: Journal, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._places: dict[int, _Place] = {}
        self._waiting: Counter[int] = Counter()
        self._readers: dict[int, int] = {}
        self._newest = 0
        for segment in sorted(int(found[1]) for path in folder.iterdir() if (found := _SEGMENT.fullmatch(path.name))):
            self._newest = segment
            for number, offset, line in recover(self._path(segment), _spooled_number):
                if not journal.is_written(number):
                    self._note(number, _Place(_KINDS[line[:1]], segment, offset, len(line)))
            self._remove_if_done(segment)
        self._writer = self._next_segment()

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_errors(self) -> int:
        """Spooled lines for the error file."""
        return sum(place.kind is Kind.ERROR for place in self._places.values())

    def add(self, number: int, kind: Kind, line: bytes) -> None:
        """Adds a finished line. Raises `BatchError`."""
        if self._writer.size >= self._segment_bytes:
            full = self._newest
            self._writer.close()
            self._writer = self._next_segment()
            self._remove_if_done(full)
        place = _Place(kind, self._newest, self._writer.size, len(line) + 1)
        self._writer.add(_MARKS[kind] + line)
        self._note(number, place)

    def read(self, number: int) -> tuple[Kind, bytes]:
        place = self._places[number]
        if place.segment not in self._readers:
            self._readers[place.segment] = os.open(self._path(place.segment), os.O_RDONLY | os.O_CLOEXEC)
        stored = os.pread(self._readers[place.segment], place.length, place.offset)
        return place.kind, stored[1:]

    def drop(self, number: int) -> None:
        """Removes a line after it was written to its file."""
        place = self._places.pop(number)
        self._waiting[place.segment] -= 1
        if place.segment != self._newest:
            self._remove_if_done(place.segment)

    def sync(self) -> None:
        self._writer.sync()

    def close(self) -> None:
        """Closes the spool. Waiting lines stay for the next run."""
        self._writer.close()
        self._remove_if_done(self._newest)
        for descriptor in self._readers.values():
            os.close(descriptor)

    def _next_segment(self) -> AppendFile:
        self._newest += 1
        return AppendFile(self._path(self._newest))

    def _path(self, segment: int) -> Path:
        return self._folder / f"spool-{segment:06d}"

    def _note(self, number: int, place: _Place) -> None:
        self._places[number] = place
        self._waiting[place.segment] += 1

    def _remove_if_done(self, segment: int) -> None:
        if self._waiting[segment] == 0:
            del self._waiting[segment]
            if segment in self._readers:
                os.close(self._readers.pop(segment))
            self._path(segment).unlink()


class OrderedJournal:
    """Writes finished lines to the journal in order. Until then they are spooled, also for later runs."""

    def __init__(self, journal: Journal, spool: Spool) -> None:
        self._journal = journal
        self._spool = spool
        self._expected: deque[int] = deque()

    @property
    def num_ahead(self) -> int:
        return len(self._expected)

    def is_written(self, number: int) -> bool:
        return self._journal.is_written(number)

    def is_finished(self, number: int) -> bool:
        return self._journal.is_written(number) or number in self._spool

    def expect(self, number: int) -> None:
        self._expected.append(number)
        self._write_ready()

    def add(self, number: int, kind: Kind, line: bytes) -> None:
        if self._expected[0] != number:
            self._spool.add(number, kind, line)
            return
        self._journal.add(number, kind, line)
        self._expected.popleft()
        self._write_ready()

    def sync(self) -> None:
        self._spool.sync()
        self._journal.sync()

    def _write_ready(self) -> None:
        while self._expected and self._expected[0] in self._spool:
            number = self._expected[0]
            self._journal.add(number, *self._spool.read(number))
            self._spool.drop(number)  # after a kill in between, it is in both, and the journal counts
            self._expected.popleft()
