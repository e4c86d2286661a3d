"""Checks a batch's input before any of its lines runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_jax.batch.lines import BadLine, parse_line
from sglang_jax.batch.served.record import Fault
from sglang_jax.batch.source import JsonLines, Record
from sglang_jax.errors import quote

MAX_FAULTS = 100
"""Faults of an input that are reported."""


@dataclass(frozen=True, slots=True)
class Checked:
    """`total`: lines of the input, blank ones not counted."""

    total: int
    faults: tuple[Fault, ...]


def check_input(path: Path, endpoint: str, *, max_lines: int, max_line_bytes: int) -> Checked:
    """Reads the whole input, and returns its faults. Runs in a thread. Raises `BatchError`."""
    faults: list[Fault] = []
    total = 0
    check = _Check(endpoint, max_line_bytes)
    for record in JsonLines(path, max_line_bytes=max_line_bytes).records(lambda _: False):
        total += 1
        if total > max_lines:
            message = f"the file has more than {max_lines} lines, the limit of a batch (--max-batch-lines)"
            return Checked(total, (Fault("too_many_lines", message, record.number + 1),))
        faults.extend(check.faults(record))
        if len(faults) >= MAX_FAULTS:
            break
    if not total:
        faults.append(Fault("empty_file", "the file has no lines"))
    return Checked(total, tuple(faults))


class _Check:
    def __init__(self, endpoint: str, max_line_bytes: int) -> None:
        self._endpoint = endpoint
        self._max_line_bytes = max_line_bytes
        self._ids: set[bytes] = set()

    def faults(self, record: Record) -> Iterator[Fault]:
        number = record.number + 1
        if record.raw is None:
            limit = f"a line may have at most {self._max_line_bytes} bytes (--max-body-bytes), this one has more"
            yield Fault("line_too_long", limit, number)
            return
        line = parse_line(record.number, record.raw, {})
        if isinstance(line, BadLine):
            yield Fault(line.code, line.message, number)
            return
        if line.url != self._endpoint:
            yield Fault(
                "mismatched_url", f"url is {quote(line.url)}, but the batch's endpoint {self._endpoint}", number, "url"
            )
        name = hashlib.blake2b(line.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if name in self._ids:
            message = f"custom_id {quote(line.custom_id)} is that of an earlier line"
            yield Fault("duplicate_custom_id", message, number, "custom_id")
        self._ids.add(name)
