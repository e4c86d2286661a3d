"""Rows of requests that are over: given back once no step in flight has them, a few at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_jax.mem_cache.kv_cache import KVCache
from sglang_jax.scheduler.request import Request
from sglang_jax.scheduler.request_table import RequestTable

RELEASES_PER_STEP = 64
"""Rows released in one step while nobody needs them: when a thousand requests end at once, no step pays for all."""

RECLAIMED_AT_ONCE = 32
"""Rows released when somebody needs a row or pages."""


@dataclass(slots=True)
class Departure:
    """A request that is over, whether its KV is kept (`insert`), and whether it goes back to the queue (`requeue`)."""

    request: Request
    insert: bool
    requeue: bool


class Departures:
    """Requests without a part in further steps that still have their rows.

    **Arguments:** `released` is told of each request whose row was given back, and whether it goes back to the queue.
    """

    def __init__(self, cache: KVCache, table: RequestTable, released: Callable[[Request, bool], None]) -> None:
        self._cache = cache
        self._table = table
        self._released = released
        self._leaving: dict[int, Departure] = {}
        self.finished_step = -1

    def __len__(self) -> int:
        return len(self._leaving)

    def add(self, request: Request, *, insert: bool, requeue: bool = False) -> None:
        """A request is over. Its row is given back by a `release` once no step in flight has it. Who was to go back to
        the queue may end for good before that."""
        self._table.end(request)
        self._leaving[request.row] = Departure(request, insert, requeue)

    def release(self, most: int) -> int:
        """Gives back up to `most` rows that no step in flight has; how many there were."""
        done = []
        for row in self._leaving:
            if self._done(row):
                done.append(row)
                if len(done) == most:
                    break
        for row in done:
            self._release(self._leaving.pop(row))
        return len(done)

    def _done(self, row: int) -> bool:
        return bool(self._table.last_step[row] <= self.finished_step)

    def _release(self, departure: Departure) -> None:
        request = departure.request
        record = request.record
        tokens = self._table.token_bytes(record.row, 0, record.kv_committed_len) if departure.insert else b""
        self._table.vacate(request)
        self._cache.release_kv_cache(record, tokens, insert=departure.insert)
        request.kv = None
        self._released(request, departure.requeue)
