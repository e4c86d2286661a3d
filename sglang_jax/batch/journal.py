"""Which lines are finished: said by the output and error files themselves, and by nothing else.

A finished line is one line of one of the two files, and its id has the number of the input line. It is written in one
piece, so after a kill at any moment a line is either there as a whole, or torn at the very end of a file, where it is
cut off before the next run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import msgspec

from sglang_jax.batch.append_file import AppendFile, cut, lines_of
from sglang_jax.batch.line_set import LineSet
from sglang_jax.errors import BatchError

_ID = re.compile(r"batch_req_([1-9][0-9]*)")


class Kind(StrEnum):
    """Where a finished line goes."""

    OUTPUT = "output"
    ERROR = "error"


class _Stored(msgspec.Struct):
    id: str


_decoder = msgspec.json.Decoder(_Stored)


def line_id(number: int) -> str:
    """The id of an output line."""
    return f"batch_req_{number + 1}"


def number_of(line: bytes) -> int | None:
    """The number of the input line that an output line answers; None if it is no line of ours, or not a whole one."""
    try:
        found = _ID.fullmatch(_decoder.decode(line).id) if line.endswith(b"\n") else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return int(found[1]) - 1 if found is not None else None


def recover(path: Path, read_number: Callable[[bytes], int | None]) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and content of every line of a file; a last one that is torn is cut off the file.

    **Raises:** `BatchError` for any other line that cannot be read: it is not known what it was.
    """
    torn: tuple[int, int] | None = None
    for place, (offset, line) in enumerate(lines_of(path)):
        if torn is not None:
            raise BatchError(
                f"line {torn[0] + 1} of {path} was not written by this command, or is damaged; "
                "remove it and run the same command again, which recomputes its response"
            )
        number = read_number(line)
        if number is None:
            torn = place, offset
        else:
            yield number, offset, line
    if torn is not None:
        cut(path, torn[1])


class Sink(Protocol):
    """Takes finished lines, each once."""

    @property
    def num_ahead(self) -> int:
        """Lines read beyond the oldest one that is not finished, where that must be bounded."""
        ...

    def is_written(self, number: int) -> bool:
        """The line is in its file. May be asked from any thread."""
        ...

    def is_finished(self, number: int) -> bool:
        """The line is in its file, or waits for its turn there."""
        ...

    def expect(self, number: int) -> None:
        """The next line of the input that is not written."""
        ...

    def add(self, number: int, kind: Kind, line: bytes) -> None:
        """A line is finished. Raises `BatchError` if it cannot be written."""
        ...

    def sync(self) -> None:
        """Waits until everything is on the disk. May run in a thread of its own."""
        ...


class Journal:
    """The two files, and which lines stand in them. Lines are written as they come.

    **Arguments:** `written`: lines that stand somewhere else.

    **Raises:** `BatchError` for files that hold what no run wrote, or a line twice.
    """

    def __init__(self, output: Path, errors: Path, written: LineSet | None = None) -> None:
        self._written = written or LineSet()
        self.num_errors = 0
        for path in (output, errors):
            for number, _, _ in recover(path, number_of):
                if not self._written.add(number):
                    raise BatchError(
                        f"{path} has a second response to line {number + 1} of the input; remove one of them"
                    )
                self.num_errors += path == errors
        self._files = {Kind.OUTPUT: AppendFile(output), Kind.ERROR: AppendFile(errors)}

    @property
    def num_written(self) -> int:
        """Lines that are not to be asked again."""
        return len(self._written)

    @property
    def num_ahead(self) -> int:
        """See `Sink`. The order does not matter here, so nothing is held up."""
        return 0

    def is_written(self, number: int) -> bool:
        """See `Sink`."""
        return number in self._written

    def is_finished(self, number: int) -> bool:
        """See `Sink`."""
        return number in self._written

    def expect(self, number: int) -> None:
        """See `Sink`. Nothing is expected."""

    def add(self, number: int, kind: Kind, line: bytes) -> None:
        """See `Sink`."""
        assert number not in self._written, f"line {number + 1} is finished twice"
        self._files[kind].add(line)
        self._written.add(number)
        self.num_errors += kind is Kind.ERROR

    def sync(self) -> None:
        """See `Sink`."""
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        """Nothing more is added."""
        for file in self._files.values():
            file.close()
