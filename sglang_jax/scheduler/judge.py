"""Which requests computed something that is not finite, and what becomes of who read it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sglang_jax.mem_cache.kv_cache import KVCache, RowKV
from sglang_jax.runner.plan import INVALID_TOKEN, Int32, StepResult
from sglang_jax.scheduler.planner import Planned, RunningSet
from sglang_jax.scheduler.request import Request, RequestState
from sglang_jax.scheduler.request_table import RequestTable

MAX_RESTARTS = 3
"""Bad steps, one after the other, that a request which merely reads what they wrote outlives. Where the weights
themselves give no finite logits, a prefix is computed so many times more before all who share it have failed."""


class Judge:
    """Keeps KV that is not finite from whoever did not compute it.

    A prompt's KV is in the tree before anything was drawn from it. Once a draw, or a logprob of the prompt, turns out
    not to be finite, what the request computed, and what it read that nobody has drawn from yet, is cut off. The
    request fails, alone. One that read such KV of others is computed anew instead: it may be well without it. A finite
    draw proves what it read.

    **Arguments:** `fail` ends a request with an error; `restart` has it computed anew.
    """

    def __init__(
        self,
        cache: KVCache,
        table: RequestTable,
        running: RunningSet,
        fail: Callable[[Request], None],
        restart: Callable[[Request], None],
    ) -> None:
        self._cache = cache
        self._table = table
        self._running = running
        self._fail = fail
        self._restart = restart
        self._to_prove: list[tuple[Request, RowKV]] = []

    def judge(self, planned: Planned, result: StepResult) -> None:
        """Looks at what a step gave, before anything of it is published."""
        drawn = result.tokens if planned.picks is None else result.tokens[planned.picks]
        if planned.logprob_requests or (len(drawn) and drawn.min() <= INVALID_TOKEN):
            failed = [request for request in self._failed(planned, result, drawn) if self._runs(request)]
            if failed:
                self._end_or_restart(failed)
        if planned.chunks or self._to_prove:
            self._prove(planned)

    def _end_or_restart(self, failed: list[Request]) -> None:
        for request in failed:
            self._cache.distrust(request.record)
        for request in failed:
            if request.restarts < MAX_RESTARTS and self._cache.borrowed_trouble(request.record):
                self._restart(request)
            else:
                self._fail(request)
        self._restart_readers()

    def _runs(self, request: Request) -> bool:
        return request.kv is not None and bool(self._table.active[request.row])

    def _failed(self, planned: Planned, result: StepResult, drawn: Int32) -> list[Request]:
        failed = [
            request
            for request, reported in zip(planned.logprob_requests, result.prompt_logprobs, strict=True)
            if np.isnan(reported.logprobs).any()
        ]
        found = (self._table.requests[row] for row in planned.draws[drawn <= INVALID_TOKEN].tolist())
        return failed + [request for request in found if request is not None and request not in failed]

    def _restart_readers(self) -> None:
        """Prompts under way that read what was cut off, and from which nothing good was drawn: the rest of a long one
        would be computed for nothing."""
        for request in [one for one in self._running.prefilling if one.state is RequestState.PREFILL]:
            record = request.record
            if request.restarts < MAX_RESTARTS and not record.receipt.proven and self._cache.borrowed_trouble(record):
                self._restart(request)

    def _prove(self, planned: Planned) -> None:
        """Those whose first draw this step brought, and those whose first one did not tell."""
        drew = [chunk.request for chunk in planned.chunks if chunk.last and chunk.request.draws]
        waiting = self._to_prove + [(request, request.kv) for request in drew if request.kv is not None]
        # Whoever lost its row meanwhile has drawn nothing from the one that it has now.
        self._to_prove = [
            (request, record)
            for request, record in waiting
            if request.kv is record and self._runs(request) and not self._cache.prove(record, planned.plan.step)
        ]
