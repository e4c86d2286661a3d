"""Stored responses: in memory, or in a file that outlives the server. Both are SQLite databases, with limits for the
number, the bytes and the age of what they hold."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sglang_jax.errors import ConfigError, ParameterError, quote
from sglang_jax.server.errors import ResponseNotFoundError, StorageError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

MAX_CHAIN = 4096
"""Maximum responses of one conversation."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, created REAL NOT NULL, used INTEGER NOT NULL,
    size INTEGER NOT NULL, status TEXT NOT NULL, session TEXT, input BLOB NOT NULL, response BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_use ON responses (owner, used);
CREATE INDEX IF NOT EXISTS by_age ON responses (created);
CREATE INDEX IF NOT EXISTS by_session ON responses (session);
"""

_UNFINISHED = ("queued", "in_progress")

_TURN = "id, previous, status, session, input, json_extract(CAST(response AS TEXT), '$.output')"
"""The columns of a `StoredTurn`: a response repeats its instructions and tools, which a conversation does not need."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and what it answers. `owner`: whose it is; `previous`: the response that it follows; `session`: the
    session that keeps the KV of its conversation; `input`, `response`: JSON, the input's items and the response."""

    id: str
    owner: str
    previous: str | None
    status: str
    session: str | None
    input: bytes
    response: bytes


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """What a stored response adds to a conversation: its input's items, and those of its output, as JSON."""

    id: str
    previous: str | None
    status: str
    session: str | None
    input: bytes
    output: str

    @property
    def finished(self) -> bool:
        return self.status not in _UNFINISHED

    @property
    def num_bytes(self) -> int:
        return len(self.input) + len(self.output)

    def items(self) -> list[dict[str, Any]]:
        """Returns its input, then its output."""
        return [*self.input_items(), *self.output_items()]

    def input_items(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = json.loads(self.input)
        return items

    def output_items(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = json.loads(self.output)
        return items


class ResponseStore:
    """Keeps at most `most` responses and `most_bytes` of their JSON, each for at most `seconds`. Beyond that, the owner
    with the most responses, or bytes, loses those that were not used for longest; a conversation loses its newest
    first.

    All methods run on one event loop; the database has a separate thread. `path`: a file, which no other server can use
    meanwhile; None for memory. Raises `ConfigError` for a file that cannot be used. Every method may raise
    `StorageError`.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        most: int,
        most_bytes: int,
        seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._most, self._most_bytes, self._seconds, self._clock = most, most_bytes, seconds, clock
        self._thread = ThreadPoolExecutor(1, "response-store")
        self._bytes: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._used = 0
        try:
            self._thread.submit(self._open, path).result()
        except (sqlite3.Error, OSError) as error:
            busy = isinstance(error, sqlite3.Error) and error.sqlite_errorcode == sqlite3.SQLITE_BUSY
            why = "another process uses it" if busy else str(error)
            raise ConfigError(f"response_store {path} cannot be used: {why}") from error

    def _open(self, path: Path | None) -> None:
        if path is not None:
            path.touch(mode=0o600)
        self._database = sqlite3.connect(":memory:" if path is None else path, timeout=0, isolation_level=None)
        self._database.execute("PRAGMA locking_mode=EXCLUSIVE")
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.executescript(_SCHEMA)
        self._fail_unfinished()
        for owner, count, size in self._database.execute("SELECT owner, COUNT(*), SUM(size) FROM responses GROUP BY 1"):
            self._bytes[owner], self._counts[owner] = size, count
        (self._used,) = self._database.execute("SELECT COALESCE(MAX(used), 0) FROM responses").fetchone()
        self._evict()

    def close(self) -> None:
        """Closes the database, so that another server can use its file."""
        self._thread.submit(self._database.close).result()
        self._thread.shutdown()

    def _fail_unfinished(self) -> None:
        """Marks responses as failed that an earlier server has not finished."""
        for response_id, text in self._database.execute(
            "SELECT id, response FROM responses WHERE status IN (?, ?)", _UNFINISHED
        ).fetchall():
            response = json.loads(text)
            response |= {"status": "failed", "error": {"code": "server_error", "message": "the server was restarted"}}
            self._database.execute(
                "UPDATE responses SET status = 'failed', response = ? WHERE id = ?",
                (json.dumps(response).encode(), response_id),
            )

    async def _run(self, work: Callable[[], Result]) -> Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except sqlite3.Error as error:
            logger.error("The store of responses failed: %s", error)
            raise StorageError(f"the server cannot use its store of responses ({error}); try again later") from error

    async def save(self, stored: StoredResponse) -> None:
        """Stores a response, or its new state."""
        await self._run(partial(self._save, stored))

    def _save(self, stored: StoredResponse) -> None:
        self._used += 1
        size = len(stored.input) + len(stored.response)
        before = self._size_of(stored.id)
        self._database.execute(
            "INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                stored.id,
                stored.owner,
                stored.previous,
                self._clock(),
                self._used,
                size,
                stored.status,
                stored.session,
                stored.input,
                stored.response,
            ),
        )
        self._count(before, -1)
        self._count((stored.owner, size), 1)
        self._evict()

    def _size_of(self, response_id: str) -> tuple[str, int] | None:
        """Returns the owner and the bytes of a response; None if it is not stored."""
        row: tuple[str, int] | None = self._database.execute(
            "SELECT owner, size FROM responses WHERE id = ?", (response_id,)
        ).fetchone()
        return row

    def _count(self, stored: tuple[str, int] | None, sign: int) -> None:
        if stored is not None:
            owner, size = stored
            self._bytes[owner] += sign * size
            self._counts[owner] += sign

    def _forget(self, response_id: str) -> None:
        stored = self._size_of(response_id)
        self._database.execute("DELETE FROM responses WHERE id = ?", (response_id,))
        self._count(stored, -1)

    def _evict(self) -> None:
        oldest = self._clock() - self._seconds
        aged = self._database.execute("SELECT id FROM responses WHERE created < ?", (oldest,)).fetchall()
        for (response_id,) in aged:
            self._forget(response_id)
        for used, most in ((self._counts, self._most), (self._bytes, self._most_bytes)):
            while used.total() > most:
                ((owner, _),) = used.most_common(1)
                (response_id,) = self._database.execute(
                    "SELECT id FROM responses WHERE owner = ? ORDER BY used LIMIT 1", (owner,)
                ).fetchone()
                self._forget(response_id)

    async def find(self, response_id: str, owner: str) -> StoredResponse:
        """Returns a response. Raises `ResponseNotFoundError`."""
        return await self._run(partial(self._find, response_id, owner))

    def _find(self, response_id: str, owner: str) -> StoredResponse:
        return StoredResponse(*self._row("id, owner, previous, status, session, input, response", response_id, owner))

    def _row(self, columns: str, response_id: str, owner: str, param: str | None = None) -> tuple[Any, ...]:
        row: tuple[Any, ...] | None = self._database.execute(
            f"SELECT {columns} FROM responses WHERE id = ? AND owner = ? AND created >= ?",
            (response_id, owner, self._clock() - self._seconds),
        ).fetchone()
        if row is None:
            raise ResponseNotFoundError(
                f"there is no stored response {quote(response_id)}: it was not stored, was deleted, or made room for "
                "newer ones",
                param=param,
            )
        return row

    async def turn(self, response_id: str, owner: str, param: str) -> StoredTurn:
        """Returns what a response adds to conversations. Raises `ResponseNotFoundError` for the field `param`."""
        return await self._run(partial(self._turn, response_id, owner, param))

    def _turn(self, response_id: str, owner: str, param: str) -> StoredTurn:
        return StoredTurn(*self._row(_TURN, response_id, owner, param))

    async def conversation(self, response_id: str, owner: str) -> list[StoredTurn]:
        """Returns the responses of a conversation up to this one, the oldest first, and counts them as used. Raises
        `ResponseNotFoundError` if one of them is not stored, `ParameterError` for too many."""
        return await self._run(partial(self._conversation, response_id, owner))

    def _conversation(self, response_id: str, owner: str) -> list[StoredTurn]:
        found: list[StoredTurn] = []
        wanted: str | None = response_id
        while wanted is not None:
            if len(found) == MAX_CHAIN:
                raise ParameterError(
                    f"previous_response_id is {quote(response_id)}, which ends a conversation of more than {MAX_CHAIN} "
                    "responses, the limit; send the conversation as input",
                    param="previous_response_id",
                )
            found.append(self._turn(wanted, owner, "previous_response_id"))
            wanted = found[-1].previous
        for one in found:  # the first response of a conversation counts as used last: without it, the others are lost
            self._used += 1
            self._database.execute("UPDATE responses SET used = ? WHERE id = ?", (self._used, one.id))
        return found[::-1]

    async def has_session(self, session: str) -> bool:
        """Whether a stored response belongs to this session."""
        find = "SELECT 1 FROM responses WHERE session = ? LIMIT 1"
        return await self._run(lambda: self._database.execute(find, (session,)).fetchone() is not None)

    async def delete(self, response_id: str, owner: str) -> StoredResponse:
        """Deletes a response and returns it. Raises `ResponseNotFoundError`."""
        return await self._run(partial(self._delete, response_id, owner))

    def _delete(self, response_id: str, owner: str) -> StoredResponse:
        found = self._find(response_id, owner)
        self._forget(response_id)
        return found
