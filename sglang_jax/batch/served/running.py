"""Answers the lines of one batch: its files on disk, and a run of the driver over the server's own routes."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from sglang_jax.batch.answers import Answer, Tokens, error_answer, tokens_of
from sglang_jax.batch.append_file import lines_of
from sglang_jax.batch.driver import READ_LINES, Driver
from sglang_jax.batch.journal import Journal, Kind
from sglang_jax.batch.lines import BadLine, parse_line
from sglang_jax.batch.served.record import BatchRecord, Counts
from sglang_jax.batch.served.room import CallerRoom, LineApp
from sglang_jax.batch.source import JsonLines, Record
from sglang_jax.batch.work_queue import WorkQueue
from sglang_jax.engine.lookahead import Lookahead
from sglang_jax.engine.types import EngineClient
from sglang_jax.errors import EngineDeadError
from sglang_jax.server.context import ServerContext
from sglang_jax.server.file_store import Space

LOOKAHEAD = 1024
WINDOW_BYTES = 16 * 2**20
"""Lines that are read ahead, and their bytes after which no more are read."""

BODIES_IN_FLIGHT = 2
"""Lines in flight of a batch may have as many bytes as this many of the largest bodies."""

MAX_RETRIES = 3
"""Maximum retries of a line whose engine was lost."""

RESTART_POLL_SECONDS = 0.2
"""Seconds between two looks whether a lost engine serves again."""

OUTPUT, ERRORS = "output.jsonl", "errors.jsonl"


def places(folder: Path) -> dict[Kind, Path]:
    """Returns where a batch's finished lines are written."""
    return {Kind.OUTPUT: folder / OUTPUT, Kind.ERROR: folder / ERRORS}


class BatchFiles:
    """The finished lines of a batch. Opening them reads those of earlier runs. `most`: maximum bytes of the owner's
    files. Raises `BatchError`."""

    def __init__(self, record: BatchRecord, folder: Path, input_path: Path, most: int | None) -> None:
        self.input = input_path
        self.seed = int.from_bytes(hashlib.sha256(record.id.encode()).digest()[:7])
        self.journal = Journal(folder / OUTPUT, folder / ERRORS)
        self.counted = {kind: path.stat().st_size for kind, path in places(folder).items()}
        self.owner = record.owner
        self._most = most
        self._total = record.counts.total
        self._places = places(folder)

    def counts(self) -> Counts:
        failed = self.journal.num_errors
        return Counts(self._total, self.journal.num_written - failed, failed)

    def note(self, space: Space, answer: Answer) -> None:
        """Counts the bytes of a line that was written. Raises `StorageFullError`."""
        size = len(answer.line)
        space.take(self.owner, size, self._most)
        self.counted[answer.kind] += size

    def tokens(self) -> Tokens:
        """Reads the token counts of all answers."""
        counts = [tokens_of(line) for _, line in lines_of(self._places[Kind.OUTPUT])]
        return Tokens(
            sum(one.prompt for one in counts), sum(one.cached for one in counts), sum(one.output for one in counts)
        )


@dataclass(frozen=True, slots=True)
class _Watcher:
    files: BatchFiles
    space: Space
    room: CallerRoom

    def finished(self, answer: Answer) -> None:
        if answer.kind is Kind.OUTPUT:
            self.room.learn(answer.tokens.prompt + answer.tokens.output)
        self.files.note(self.space, answer)


@dataclass(frozen=True, slots=True)
class _OwnEngine:
    """The server's engines, as one replica of the driver."""

    client: EngineClient
    index: int = 0

    async def serving(self) -> EngineClient:
        """Waits until an engine serves. Raises `EngineDeadError` if none will."""
        while not self.client.alive:
            if self.client.gone:
                raise EngineDeadError("the engine is gone")
            await asyncio.sleep(RESTART_POLL_SECONDS)
        return self.client


async def answer_lines(
    files: BatchFiles, context: ServerContext, space: Space, app: LineApp, room: CallerRoom, max_in_flight: int
) -> None:
    """Answers all lines that are not finished. Raises `BatchError`; `StorageFullError`; `EngineDeadError`."""
    most_bytes = context.config.max_body_bytes
    source = JsonLines(files.input, max_line_bytes=most_bytes)
    driver = Driver(
        source.records(files.journal.is_written),
        files.journal,
        WorkQueue(Lookahead(LOOKAHEAD, WINDOW_BYTES), MAX_RETRIES, BODIES_IN_FLIGHT * most_bytes),
        _Watcher(files, space, room),
        defaults={},
        random_seed=files.seed,
        read_lines=READ_LINES,
        max_ahead=LOOKAHEAD,
        make_app=lambda _: app,
        max_in_flight=max_in_flight,
    )
    await driver.run([_OwnEngine(context.client)])


async def fail_rest(files: BatchFiles, max_line_bytes: int, space: Space, code: str, message: str) -> None:
    """Writes an error for each line that is not finished. Raises `BatchError`."""
    records = JsonLines(files.input, max_line_bytes=max_line_bytes).records(files.journal.is_written)

    def read() -> list[Record]:
        return list(islice(records, READ_LINES))

    while some := await asyncio.to_thread(read):
        for record in some:
            line = parse_line(record.number, record.raw or b"", {})
            answer = error_answer(BadLine(record.number, line.custom_id, code, message), code, message)
            files.journal.add(record.number, answer.kind, answer.line)
            files.counted[answer.kind] += len(answer.line)
            space.hold(files.owner, len(answer.line))
