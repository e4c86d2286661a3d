"""Tracks finished lines. A finished line is one line of the output or the error file, and its id has the number of the
input line. Each is written in one piece, so after a kill it is either complete, or torn at the very end of a file,
which is truncated before the next run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import msgspec

from sglang_jax.batch.append_file import AppendFile, lines_of, truncate
from sglang_jax.errors import BatchError

_ID = re.compile(r"batch_req_([1-9][0-9]*)")


class Kind(StrEnum):
    """The file of a finished line."""

    OUTPUT = "output"
    ERROR = "error"


class _Stored(msgspec.Struct):
    id: str


_decoder = msgspec.json.Decoder(_Stored)


def line_id(number: int) -> str:
    return f"batch_req_{number + 1}"


def number_of(line: bytes) -> int | None:
    """Returns the number of the input line that an output line answers; None for a foreign or torn line."""
    try:
        found = _ID.fullmatch(_decoder.decode(line).id) if line.endswith(b"\n") else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return int(found[1]) - 1 if found is not None else None


def recover(path: Path, read_number: Callable[[bytes], int | None]) -> Iterator[tuple[int, int, bytes]]:
    """Yields number, offset and content of every line of a file, and truncates a torn last line. Raises `BatchError`
    for any other line that cannot be read, whose input line is unknown."""
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
        truncate(path, torn[1])


class Sink(Protocol):
    """Stores finished lines, each once."""

    @property
    def num_ahead(self) -> int:
        """Lines read beyond the oldest unfinished one; 0 if that need not be bounded."""
        ...

    def is_written(self, number: int) -> bool:
        """Whether the line is in its file. May be called from any thread."""
        ...

    def is_finished(self, number: int) -> bool:
        """Whether the line is in its file or spooled."""
        ...

    def expect(self, number: int) -> None:
        """Adds the next line of the input that is not in its file."""
        ...

    def add(self, number: int, kind: Kind, line: bytes) -> None:
        """Stores a finished line. Raises `BatchError` if it cannot be written."""
        ...

    def sync(self) -> None:
        """Waits until everything is on disk. May run in a different thread."""
        ...


class Journal:
    """The output and error files, and the set of lines in them. Lines are written as they finish. `written`: lines that
    are stored elsewhere. Raises `BatchError` for files that no run wrote, or that have a line twice."""

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
        return len(self._written)

    @property
    def num_ahead(self) -> int:
        """Always 0, because lines need no order."""
        return 0

    def is_written(self, number: int) -> bool:
        return number in self._written

    def is_finished(self, number: int) -> bool:
        return number in self._written

    def expect(self, number: int) -> None:
        """Does nothing."""

    def add(self, number: int, kind: Kind, line: bytes) -> None:
        assert number not in self._written, f"line {number + 1} is finished twice"
        self._files[kind].add(line)
        self._written.add(number)
        self.num_errors += kind is Kind.ERROR

    def sync(self) -> None:
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class LineSet:
    """Numbers from 0. Takes one bit for each up to the largest: 12 MB for a hundred million lines."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: int) -> bool:
        byte = number >> 3
        return byte < len(self._bits) and bool(self._bits[byte] >> (number & 7) & 1)

    def add(self, number: int) -> bool:
        """Adds a number. Returns False if the set has it already."""
        if number in self:
            return False
        byte = number >> 3
        if byte >= len(self._bits):
            self._bits.extend(bytes(byte + 1 - len(self._bits)))
        self._bits[byte] |= 1 << (number & 7)
        self._count += 1
        return True
