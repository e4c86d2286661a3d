"""The step: plan, launch, finish the one before, publish.

Step N + 1 is launched before step N's tokens reach the host. Pages and rows that a launched step may touch are given
back only once it has finished.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_jax.config import EngineConfig
from sglang_jax.errors import CapacityError, NumericalError, RequestError
from sglang_jax.mem_cache.invariants import check_conservation
from sglang_jax.mem_cache.kv_cache import KVCache
from sglang_jax.runner.plan import Int32
from sglang_jax.runner.protocol import Runner, StepHandle
from sglang_jax.scheduler.admission import Admission
from sglang_jax.scheduler.arrivals import Arrivals
from sglang_jax.scheduler.channel import Channel
from sglang_jax.scheduler.messages import NewRequest
from sglang_jax.scheduler.planner import OutOfPages, Planned, Planner, RunningSet
from sglang_jax.scheduler.publisher import Publisher
from sglang_jax.scheduler.request import Request, RequestState
from sglang_jax.scheduler.request_table import RequestTable
from sglang_jax.scheduler.reserve import NewTokenReserve
from sglang_jax.scheduler.step_log import StepLog
from sglang_jax.scheduler.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the runner has, and what to do with its result."""

    planned: Planned
    handle: StepHandle


class Scheduler:
    """Requests in, tokens out, one step at a time. The loop around it decides when to step.

    **Arguments:** `eos_ids`: the model's end-of-sequence tokens; `channel`: where outputs are published.
    """

    def __init__(self, runner: Runner, eos_ids: tuple[int, ...], config: EngineConfig, channel: Channel) -> None:
        spec = runner.spec
        self._runner = runner
        self._check = config.debug_memory
        self.cache = KVCache(
            spec.pools[0],
            spec.max_rows,
            spec.max_context,
            reuse=not config.disable_radix_cache,
            eviction=config.radix_eviction_policy,
            debug=config.debug_memory,
        )
        self.table = RequestTable(spec.max_rows, spec.max_context)
        self.requests: dict[int, Request] = {}
        self.reserve = NewTokenReserve(config.schedule_conservativeness)
        self._arrivals = Arrivals(spec, eos_ids, config.random_seed, config.max_queued_requests)
        self._running = RunningSet()
        self.queue = WaitingQueue(config.schedule_policy, lambda request: self._admission.cached_prefix(request))
        self._admission = Admission(
            self.cache, self.table, self.queue, self._running.prefilling, self.reserve, self._refuse_too_large
        )
        chunk_size = min(config.chunked_prefill_size, spec.token_budget)
        self._planner = Planner(spec, chunk_size, self.cache, self.table, self._running, self._admission)
        self._publisher = Publisher(channel, self.table)
        self.log = StepLog(self, config.decode_log_interval)
        self._next_step = 0
        self._finished_step = -1
        self._all_picks: Int32 = np.arange(spec.max_rows, dtype=np.int32)
        self._in_flight: Launched | None = None
        self._leaving: dict[int, tuple[Request, bool]] = {}

    @property
    def idle(self) -> bool:
        """Nothing runs, waits, or is in flight."""
        return not self.requests and self._in_flight is None

    @property
    def num_running(self) -> int:
        """Requests that have a row and are not over."""
        return len(self.cache.open_rows) - len(self._leaving)

    @property
    def max_total_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.cache.pool.total * self.cache.page_size

    @property
    def num_used_tokens(self) -> int:
        """Tokens of pages that are neither free nor evictable."""
        return self.max_total_tokens - self.cache.available_pages * self.cache.page_size

    @property
    def token_usage(self) -> float:
        """Used share of the pool."""
        return self.num_used_tokens / self.max_total_tokens

    def add(self, message: NewRequest) -> None:
        """Queues a request, or publishes why not."""
        try:
            request = self._arrivals.accept(message, len(self.queue))
        except RequestError as error:
            self._publisher.refused(message.id, error)
            return
        self.requests[request.id] = request
        self.queue.add(request)
        if message.logprob_start == 0:
            self._publisher.first_prompt_token(request)
        self._admission.retry()

    def abort(self, request_id: int) -> None:
        """Ends a request wherever it is; its KV is dropped. Unknown ids are ignored: it may just have finished."""
        request = self.requests.get(request_id)
        if request is not None:
            self.log.counts.aborted += 1
            self._end(request, "abort", insert=False)

    def stop(self, request_id: int) -> None:
        """The client saw enough: ends a request without a word and keeps its KV."""
        request = self.requests.get(request_id)
        if request is not None:
            self._end(request, None, insert=True)

    def flush_cache(self) -> bool:
        """Empties the prefix cache; refused (False) while any request runs or waits."""
        if self.requests:
            return False
        self._finish_in_flight()
        self.cache.flush()
        return True

    def step(self) -> None:
        """Launches the next step, finishes the one before it, publishes."""
        launched = self._launch_next()
        self._finish_in_flight()
        self._in_flight = launched
        self._publisher.flush()
        if self._check:
            check_conservation(self.cache)

    def retract_newest(self) -> bool:
        """Takes the row of the least urgent, newest request; False if none runs. No step may be in flight.

        The oldest keeps running, so that something always ends.
        """
        running = [request for request in self.table.requests if request is not None]
        if not running:
            return False
        self._retract(max(running, key=lambda request: (-request.priority, request.sequence)))
        return True

    def drain_in_flight(self) -> None:
        """Waits for the step in flight, if there is one."""
        self._finish_in_flight()

    def _launch_next(self) -> Launched | None:
        while True:
            try:
                planned = self._planner.plan(self._next_step)
            except OutOfPages:
                self._make_room()
                continue
            if planned is None:
                return None
            self._next_step += 1
            self._announce(planned)
            handle = self._runner.launch(planned.plan)
            self._note_chunks(planned)
            self.log.launched(planned)
            return Launched(planned, handle)

    def _make_room(self) -> None:
        """Pages are short: first learn what the step in flight has finished, then retract the newest request."""
        if self._in_flight is not None:
            self._finish_in_flight()
        elif self.num_running > 1:
            self.retract_newest()
        else:
            (request,) = (request for request in self.table.requests if request is not None)
            error = CapacityError(
                f"the request needs more than {int(self.table.num_tokens[request.row])} tokens of KV and runs alone, "
                f"but the pool holds {self.max_total_tokens}; raise max_total_tokens"
            )
            self._end(request, "error", insert=False, error=error)

    def _announce(self, planned: Planned) -> None:
        """Tells who starts, before the step that may be the engine's last: what it ran can be told from what waited."""
        first_time = [request for request in planned.newcomers if request.cached_tokens is None]
        for request in first_time:
            request.cached_tokens = request.record.kv_committed_len
            self._publisher.started(request)
            self.log.started(request)
        if first_time:
            self._publisher.flush()

    def _note_chunks(self, planned: Planned) -> None:
        """A launched chunk's KV is as good as written: share it, and let whole prompts draw from the next step on."""
        joining = []
        for chunk in planned.chunks:
            request, end = chunk.request, chunk.start + chunk.length
            self.cache.lengths.kv_committed[request.row] = end
            self.cache.cache_prefix(request.record, request.tokens[: end * 4], planned.plan.step)
            if chunk.last:
                request.move_to(RequestState.DECODE)
                self._running.prefilling.remove(request)
                joining.append(request.row)
        if planned.chunks:
            self._admission.retry()
        if joining:
            rows = np.array(joining, np.int32)
            self._running.decode_rows = np.concatenate((self._running.decode_rows, rows))

    def _finish_in_flight(self) -> None:
        launched, self._in_flight = self._in_flight, None
        if launched is None:
            return
        planned = launched.planned
        result = launched.handle.result()
        self._finished_step = planned.plan.step
        self.cache.settle(planned.plan.step)
        if planned.logprob_requests:
            self._publisher.prompt_logprobs(planned, result)
        rows, tokens, picks = planned.draws, result.tokens, planned.picks
        if self._leaving:
            picks = self._all_picks[: len(rows)] if picks is None else picks
            staying = np.array([row not in self._leaving for row in rows.tolist()], np.bool_)
            rows, picks = rows[staying], picks[staying]
        if picks is not None:
            tokens = tokens[picks]
        if planned.plan.top_logprobs >= 0:
            self._publisher.logprobs(result, rows, self._all_picks[: len(rows)] if picks is None else picks)
        if len(rows):
            self._advance(rows, tokens)
        self.log.finished(len(rows))
        self.reserve.decay()
        if self._leaving:
            self._release_leaving()

    def _advance(self, rows: Int32, tokens: Int32) -> None:
        """`rows` `[rows]` drew `tokens`: record them, tell the clients, end what has ended."""
        if tokens.min() < 0:
            good = tokens >= 0
            for row in rows[~good].tolist():
                error = NumericalError("the model's logits for this request are not finite")
                self._end(self.table.at(row), "error", insert=False, error=error)
            rows, tokens = rows[good], tokens[good]
        self.cache.lengths.kv_committed[rows] = self.table.num_tokens[rows]
        advance = self.table.advance(rows, tokens)
        self._publisher.tokens(rows, tokens)
        over = advance.stopped | advance.full
        if over.any():
            for index in np.nonzero(over)[0].tolist():
                request = self.table.at(int(rows[index]))
                if advance.stopped[index]:
                    self._end(request, "stop", insert=True, matched_token=int(tokens[index]))
                else:
                    self._end(request, "length", insert=True)

    def _end(
        self,
        request: Request,
        kind: str | None,
        *,
        insert: bool,
        matched_token: int | None = None,
        error: RequestError | None = None,
    ) -> None:
        """Ends a request in any state. Its row is given back now, or once the step in flight that has it is done."""
        if request.kv is None:
            self.queue.remove(request)
        else:
            self._running.drop(request)
        if kind is not None:
            self._publisher.finished(request, kind, matched_token=matched_token, error=error)
        request.move_to(RequestState.FINISHED)
        del self.requests[request.id]
        self.log.counts.finished += 1
        if request.kv is None:
            self._admission.retry()
        elif self.table.last_step[request.row] > self._finished_step:
            self._leaving[request.row] = (request, insert)
        else:
            self._release(request, insert)

    def _release_leaving(self) -> None:
        done = [row for row in self._leaving if self.table.last_step[row] <= self._finished_step]
        for row in done:
            self._release(*self._leaving.pop(row))

    def _release(self, request: Request, insert: bool) -> None:
        record = request.record
        tokens = self.table.token_bytes(record.row, 0, record.kv_committed_len) if insert else b""
        self.table.vacate(request)
        self.cache.release_kv_cache(record, tokens, insert=insert)
        request.kv = None
        self._admission.retry()

    def _retract(self, request: Request) -> None:
        """Takes a request's row and puts it, with its output, back at the head of the queue."""
        self._running.drop(request)
        request.tokens = self.table.token_bytes(request.row, 0, int(self.table.num_tokens[request.row]))
        request.announced = False
        request.move_to(RequestState.RETRACTED)
        self._release(request, insert=False)
        self.queue.add(request)
        self.reserve.raise_ratio()
        self.log.counts.retractions += 1

    def _refuse_too_large(self, request: Request) -> None:
        """Admission found that a request does not fit even alone."""
        message = (
            f"{request.prefill_len} tokens do not fit the KV pool of {self.max_total_tokens}; raise max_total_tokens"
        )
        self._end(request, "error", insert=False, error=CapacityError(message))
