"""Ends requests, and retracts them to the queue."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_jax.errors import CapacityError, NumericalError, RequestError
from sglang_jax.mem_cache.data_parallel import AnyCache
from sglang_jax.mem_cache.group import Group
from sglang_jax.scheduler.constraints import Closed, Constraints
from sglang_jax.scheduler.publisher import Publisher
from sglang_jax.scheduler.recent_outputs import KEY_TOKENS, RecentOutputs
from sglang_jax.scheduler.request import Request, RequestState
from sglang_jax.scheduler.reserve import NewTokenReserve
from sglang_jax.scheduler.rows import Rows
from sglang_jax.scheduler.sessions import Sessions
from sglang_jax.scheduler.step_log import StepLog
from sglang_jax.scheduler.waiting_queue import Queues

RETRACTIONS_IN_TURN = 4
"""A request retracted this many times more than another is spared before it, whatever their priorities."""

_FINISHED = ("stop", "length", None)
"""Kinds of end with a valid output; None if the client stopped the request."""


class Finisher:
    """Ends or retracts requests, and notifies client, queue, grammar and session. `Rows` releases the row later.
    `requests`: all that have not ended, by id; `finished_at`: end of the newest finished step, by the scheduler's
    clock."""

    def __init__(
        self,
        cache: AnyCache,
        rows: Rows,
        queue: Queues,
        publisher: Publisher,
        constraints: Constraints,
        sessions: Sessions,
        reserve: NewTokenReserve,
        log: StepLog,
        now: float,
        recent: RecentOutputs | None = None,
    ) -> None:
        self._recent = recent
        self.requests: dict[int, Request] = {}
        self.finished_at = now
        self._cache = cache
        self._rows = rows
        self._queue = queue
        self._publisher = publisher
        self._constraints = constraints
        self._sessions = sessions
        self._reserve = reserve
        self._log = log

    def end(
        self,
        request: Request,
        kind: str | None,
        *,
        insert: bool,
        matched_token: int | None = None,
        error: RequestError | None = None,
    ) -> None:
        """Ends a request in any state; a `kind` of None is not published. `insert`: keep its KV in the tree."""
        if kind is not None:
            self._publisher.finished(
                request, kind, last_step=self.finished_at, matched_token=matched_token, error=error
            )
        if request.waiting.queued:
            self._queue.remove(request)
        self._constraints.forget(request)
        if request.turn is not None:
            tokens = self._known_tokens(request) if kind in _FINISHED else None
            self._sessions.end(request.turn, tokens, request.namespace, request.kv is not None)
        if self._recent is not None and request.kv is not None and kind in _FINISHED:
            self._note_output(self._recent, request)
        request.move_to(RequestState.FINISHED)
        del self.requests[request.id]
        self._log.counts.finished += 1
        if request.kv is not None:
            self._rows.leave(request, insert=insert)

    def _note_output(self, recent: RecentOutputs, request: Request) -> None:
        row, begin = request.row, max(request.prompt_len - KEY_TOKENS, 0)
        recent.add(request.namespace, self._rows.tokens[row, begin : int(self._rows.num_tokens[row])])

    def close(self, closed: Iterable[Closed]) -> None:
        for one in closed:
            if one.error is not None:
                self.end(one.request, "error", insert=True, error=one.error)
            else:
                self.end(one.request, "stop", insert=True)

    def fail(self, request: Request) -> None:
        error = NumericalError("the model's logits for this request are not finite")
        self.end(request, "error", insert=False, error=error)

    def refuse_too_large(self, request: Request) -> None:
        group = self._too_small_for(request.prefill_len)
        message = f"{request.prefill_len} tokens do not fit the KV pool of {group.size}; raise {group.remedy}"
        self.end(request, "error", insert=False, error=CapacityError(message))

    def end_the_only_one(self, rank: int) -> None:
        """Ends the only running request of a rank, which has no room left."""
        (request,) = self.running(rank)
        tokens = int(self._rows.num_tokens[request.row])
        group = self._too_small_for(tokens + 1)
        error = CapacityError(
            f"the request needs KV of {tokens} tokens, which does not fit even without other requests: the pool "
            f"holds {group.size}; "
            f"raise {group.remedy}"
        )
        self._log.ended_for_pages(self._reserve.ratio)
        self.end(request, "error", insert=False, error=error)

    def _too_small_for(self, tokens: int) -> Group:
        group = self._cache.too_small_for(tokens) or self._cache.ranks[0].first_growing
        assert group is not None, "states do not grow"
        return group

    def running(self, rank: int | None) -> list[Request]:
        """The running requests of a rank, or of all."""
        requests = [one for one in self._rows.requests if one is not None and self._rows.runs(one)]
        return requests if rank is None else [one for one in requests if self._cache.of_row(one.row).rank == rank]

    def retract_newest(self, rank: int | None = None) -> bool:
        """Retracts a rank's newest request of the lowest priority, of the background first; False if none runs. The
        oldest of the highest priority keeps running, so something always ends; and `RETRACTIONS_IN_TURN` lets every
        request end, whatever its priority."""
        return self.retract_one_of(self.running(rank))

    def retract_one_of(self, running: list[Request]) -> bool:
        if not running:
            return False
        self.retract(max(running, key=_retraction_key))
        return True

    def retract(self, request: Request) -> None:
        """Takes a request's row and returns it, with its output, to the queue, before new requests. No step may be in
        flight."""
        request.retractions += 1
        self._log.retracted(self._reserve.ratio)
        self.requeue(request)
        self._rows.release(self._rows.num_leaving)
        self._reserve.raise_ratio()

    def take_row(self, request: Request) -> None:
        """Retracts a request in the background for others to be admitted. No step may be in flight."""
        self._log.retracted(self._reserve.ratio)
        self.requeue(request)
        self._rows.release(self._rows.num_leaving)

    def restart(self, request: Request) -> None:
        """Returns a request to the queue, to recompute its prompt and output from valid KV."""
        request.restarts += 1
        self.requeue(request)

    def requeue(self, request: Request) -> None:
        """Returns a request with its output to the queue, once `Rows.release` has released its row."""
        request.tokens = self._known_tokens(request)
        request.drafts = self._rows.drafts_of(request)
        self._rows.drafts[request.row] = 0
        request.next_prompt_logprob = request.published_prompt_logprob
        request.pooled = None
        request.announced = False
        request.move_to(RequestState.RETRACTED)
        self._publisher.retracted(request)
        self._rows.leave(request, insert=False, requeue=True)

    def _known_tokens(self, request: Request) -> bytes:
        """Prompt and output so far, as int32 bytes."""
        if request.kv is None:
            return request.tokens
        return self._rows.token_bytes(request.row, 0, int(self._rows.num_tokens[request.row]))


def _retraction_key(request: Request) -> tuple[int, bool, int, int]:
    """The request with the largest key is retracted first."""
    turns = request.retractions // RETRACTIONS_IN_TURN
    return (-turns, request.background, -request.priority, request.sequence)
