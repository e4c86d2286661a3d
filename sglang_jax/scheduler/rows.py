"""The rows of running requests, with their tokens and flags as arrays. A request in a row is prefilling, then decoding,
then leaving: it has ended, or returns to the queue, and keeps the row while a step in flight uses it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from sglang_jax.mem_cache.data_parallel import AnyCache
from sglang_jax.mem_cache.lengths import ONE, Index
from sglang_jax.mem_cache.radix_tree import Probe
from sglang_jax.runner.plan import Bool, Int32
from sglang_jax.sampling.params import MAX_STOP_TOKEN_IDS
from sglang_jax.scheduler.request import Request, RequestState
from sglang_jax.scheduler.waiting_queue import Queues

NO_TOKEN = -2
"""Fills unused stop columns: neither a token id nor `INVALID_TOKEN`."""

RELEASES_PER_STEP = 64
"""Maximum rows released in a step while none are needed: spreads the cost if a thousand requests end at once."""

RECLAIMED_AT_ONCE = 32
"""Rows released at once when a row or pages are needed."""


class Advance(msgspec.Struct, frozen=True):
    """The effect of samples on rows, `[rows]` each. `kept`: how many of the tokens count, up to a stop token or the
    limit; `num_tokens`: of the row now; `stopped`: by a stop token; `full`: at the limit."""

    kept: Int32
    num_tokens: Index
    stopped: Bool
    full: Bool


@dataclass(slots=True)
class Departure:
    """A request that is leaving its row. `insert`: its KV is kept; `requeue`: it returns to the queue."""

    request: Request
    insert: bool
    requeue: bool


class Rows:
    """A struct of arrays, `[rows]` each unless stated, so that a few vector operations advance a decode batch.

    - `ids`: the clients' ids; `streams`: whether to publish each token; `top_logprobs`: number of alternatives, or -1.
    - `prompt_len`, `num_tokens` (that the host knows), `total_len` (limit): in tokens.
    - `stop_ids`: `[rows, MAX_STOP_TOKEN_IDS]`; rows use the first `stop_width` columns.
    - `tokens`: `[rows, max_context + 1]`, prompt and output.
    - `last_step`: the last launched step that uses the row.
    - `masked`: the row samples under the mask of a grammar; `one_by_one`: it gets no drafts, because a mask is for one
      token, and penalties depend on the previous one; `drafts`: `[rows, 3]`, see `DraftCounts`.
    - `active`: the row's request is not leaving, so its samples count.

    The rows of the next step are in `decode_rows` `[decoding]`, an array that is replaced and never changed, and in
    `prefilling`, in order of admission. Requests that are leaving stay in both until the next `sweep`.
    """

    def __init__(self, cache: AnyCache, queue: Queues, rows: int, max_context: int) -> None:
        self.ids: NDArray[np.int64] = np.zeros(rows, np.int64)
        self.streams: NDArray[np.bool_] = np.zeros(rows, np.bool_)
        self.top_logprobs: NDArray[np.int8] = np.full(rows, -1, np.int8)
        self.prompt_len: Index = np.zeros(rows, np.intp)
        self.num_tokens: Index = np.zeros(rows, np.intp)
        self.total_len: Index = np.zeros(rows, np.intp)
        self.stop_ids: Int32 = np.full((rows, MAX_STOP_TOKEN_IDS), NO_TOKEN, np.int32)
        self.stop_width = 1
        self.tokens: Int32 = np.zeros((rows, max_context + 1), np.int32)
        self.last_step: NDArray[np.int64] = np.full(rows, -1, np.int64)
        self.active: Bool = np.zeros(rows, np.bool_)
        self.masked: Bool = np.zeros(rows, np.bool_)
        self.one_by_one: Bool = np.zeros(rows, np.bool_)
        self.num_masked = 0
        self.drafts: NDArray[np.int64] = np.zeros((rows, 3), np.int64)
        self.requests: list[Request | None] = [None] * rows
        self.num_with_logprobs = 0
        self.decode_rows: Index = np.zeros(0, np.intp)
        self.prefilling: list[Request] = []
        self._cache = cache
        self._queue = queue
        self._leaving: dict[int, Departure] = {}
        self._stale = False
        self._widths = [0] * (MAX_STOP_TOKEN_IDS + 1)

    @property
    def num_leaving(self) -> int:
        return len(self._leaving)

    @property
    def num_running(self) -> int:
        return len(self._cache.open_rows) - len(self._leaving)

    def at(self, row: int) -> Request:
        request = self.requests[row]
        assert request is not None, f"row {row} is empty"
        return request

    def runs(self, request: Request) -> bool:
        """Whether it has a row and is not leaving."""
        return request.kv is not None and bool(self.active[request.row])

    def open(self, request: Request, probe: Probe) -> None:
        """Gives a request a free row that starts with the prefix just probed. `seat` then enters all requests that a
        look chose."""
        session, stops = request.turn is not None, bool(request.sampling.stop)
        request.kv = self._cache.open_row(
            probe, session=session, stops=stops, shared_len=request.shared_len, total=request.prefill_len
        )
        request.move_to(RequestState.PREFILL)

    def seat(self, requests: list[Request]) -> None:
        rows = np.array([request.row for request in requests])
        self.ids[rows] = [request.id for request in requests]
        self.streams[rows] = [request.stream for request in requests]
        self.top_logprobs[rows] = [request.top_logprobs for request in requests]
        self.prompt_len[rows] = [request.prompt_len for request in requests]
        self.num_tokens[rows] = [request.prefill_len for request in requests]
        self.total_len[rows] = [request.total_len for request in requests]
        self.stop_ids[rows] = NO_TOKEN
        self.active[rows] = True
        self.drafts[rows] = 0
        self.masked[rows] = [request.matcher is not None for request in requests]
        self.one_by_one[rows] = [request.matcher is not None or request.sampling.counts_tokens for request in requests]
        self.num_masked += int(np.count_nonzero(self.masked[rows]))
        for row, request in zip(rows.tolist(), requests, strict=True):
            self.requests[row] = request
            self.num_with_logprobs += request.top_logprobs >= 0
            width = len(request.stop_ids)
            self._widths[width] += 1
            self.stop_ids[row, :width] = request.stop_ids
            tokens = np.frombuffer(request.tokens, np.int32)
            self.tokens[row, : len(tokens)] = tokens
        self._set_stop_width()
        self.prefilling += requests

    def prefilled(self, requests: list[Request]) -> None:
        """The last chunks of these requests are launched: those that sample decode from the next step on."""
        for request in requests:
            request.move_to(RequestState.DECODE)
        joining = [request.row for request in requests if request.samples]
        self._stale = True
        self.decode_rows = np.concatenate((self.decode_rows, np.array(joining, np.intp)))

    def leave(self, request: Request, *, insert: bool, requeue: bool = False) -> None:
        """Excludes a request from further steps; `release` releases its row. A request that was to return to the queue
        may end first."""
        self.active[request.row] = False
        self._stale = True
        self._leaving[request.row] = Departure(request, insert, requeue)

    def sweep(self) -> None:
        """Removes requests that are leaving from `decode_rows` and `prefilling`."""
        if self._stale:
            self.decode_rows = self.decode_rows[self.active[self.decode_rows]]
            self.prefilling = [request for request in self.prefilling if request.state is RequestState.PREFILL]
            self._stale = False

    def release(self, most: int) -> int:
        """Releases up to `most` rows of leaving requests that no step in flight uses. Returns their number."""
        done = []
        for row in self._leaving:
            if self._done(row):
                done.append(row)
                if len(done) == most:
                    break
        for row in done:
            self._give_back(self._leaving.pop(row))
        return len(done)

    def advance(self, rows: Index, tokens: Int32, counts: Int32) -> Advance:
        """Appends the first `counts` `[rows]`, at least 1, of `tokens` `[rows, width]` to each of `rows` `[rows]`."""
        if tokens.shape[1] == 1:
            known, stopped, full = self._append(rows, tokens[:, 0])
            return Advance(counts, known, stopped, full)
        kept, known = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.intp)
        stopped = np.zeros(len(rows), np.bool_)
        full = np.zeros(len(rows), np.bool_)
        for place in range(tokens.shape[1]):
            going = np.flatnonzero((counts > place) & ~stopped & ~full)
            known[going], stopped[going], full[going] = self._append(rows[going], tokens[going, place])
            kept[going] += 1
        return Advance(kept, known, stopped, full)

    def token_bytes(self, row: int, first: int, last: int) -> bytes:
        """Tokens `[first, last)` of a row as int32 bytes."""
        return self.tokens[row, first:last].tobytes()

    def drafts_of(self, request: Request) -> tuple[int, int, int]:
        """The draft counts of a request, earlier rows included: see `DraftCounts`."""
        own = self.drafts[request.row].tolist() if request.kv is not None else (0, 0, 0)
        steps, drafts, right = (before + now for before, now in zip(request.drafts, own, strict=True))
        return steps, drafts, right

    def _append(self, rows: Index, tokens: Int32) -> tuple[Index, Bool, Bool]:
        """Appends one token to each row. Returns their number of tokens, whether the token stopped them, and whether
        they are full."""
        counts = self.num_tokens[rows]
        self.tokens[rows, counts] = tokens
        counts += ONE
        self.num_tokens[rows] = counts
        if self.stop_width == 1:
            stopped = self.stop_ids[:, 0][rows] == tokens
        else:
            stopped = (self.stop_ids[rows, : self.stop_width] == tokens[:, None]).any(axis=1)
        return counts, stopped, counts >= self.total_len[rows]

    def _done(self, row: int) -> bool:
        return bool(self.last_step[row] <= self._cache.finished_step)

    def _give_back(self, departure: Departure) -> None:
        request, turn = departure.request, departure.request.turn
        record = request.record
        tokens = self.tokens[record.row].data.cast("B") if departure.insert else b""
        self._vacate(request)
        kept = None if turn is None else turn.kept()
        self._cache.release_kv_cache(record, tokens, insert=departure.insert, kept=kept)
        if turn is not None:
            turn.row_released()
        request.kv = None
        self._queue.look_again()
        if departure.requeue:
            self._queue.add(request)

    def _vacate(self, request: Request) -> None:
        row = request.row
        self.requests[row] = None
        self.num_with_logprobs -= request.top_logprobs >= 0
        self.num_masked -= int(self.masked[row])
        self.masked[row] = False
        self._widths[len(request.stop_ids)] -= 1
        self._set_stop_width()
        self.last_step[row] = -1

    def _set_stop_width(self) -> None:
        width = max(self.stop_width, 1)
        while width < MAX_STOP_TOKEN_IDS and any(self._widths[width + 1 :]):
            width += 1
        while width > 1 and not self._widths[width]:
            width -= 1
        self.stop_width = width
