"""Finds requests whose logits are not finite, and requests that read their KV."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_jax.mem_cache.data_parallel import AnyCache
from sglang_jax.mem_cache.lengths import Index
from sglang_jax.mem_cache.row_kv import RowKV
from sglang_jax.runner.plan import INVALID_TOKEN, Int32, StepResult
from sglang_jax.scheduler.planner import PlannedStep
from sglang_jax.scheduler.request import Request, RequestState
from sglang_jax.scheduler.rows import Rows

MAX_RESTARTS = 3
"""Maximum restarts of a request that only read bad KV of others. If the weights themselves give such logits, a prefix
is computed this many more times before all requests that share it have failed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The requests that failed, and those to recompute from valid KV."""

    failed: list[Request]
    restarted: list[Request]


_ALL_FINITE = Verdict([], [])
_INVALID: Int32 = np.array(INVALID_TOKEN, np.int32)


class NonFiniteCheck:
    """Keeps KV that is not finite from other requests.

    A prompt's KV is in the tree before anything was sampled from it. If a sample, a logprob or a vector is not finite,
    the KV that the request computed is cut from the tree, and so is the KV that it read, if no request has sampled a
    finite token from that. Only this request fails; one that read such KV of others is recomputed instead.
    """

    def __init__(
        self,
        cache: AnyCache,
        rows: Rows,
    ) -> None:
        self._cache = cache
        self._rows = rows
        self._to_prove: list[tuple[Request, RowKV]] = []

    def judge(self, planned: PlannedStep, result: StepResult) -> Verdict:
        """Checks the results of a step, before any are published. Call `prove` once the verdict is carried out."""
        last = _sampled_last(result, planned.picks)
        if not planned.logprob_requests and not planned.pooled_chunks and not np.count_nonzero(last <= _INVALID):
            return _ALL_FINITE
        not_finite = [request for request in self._find_not_finite(planned, result, last) if self._rows.runs(request)]
        if not not_finite:
            return _ALL_FINITE
        for request in not_finite:
            self._cache.trust.distrust(request.record)
        restarted = [request for request in not_finite if self._may_restart(request)]
        failed = [request for request in not_finite if request not in restarted]
        return Verdict(failed, restarted + self._readers(not_finite))

    def _may_restart(self, request: Request) -> bool:
        return request.restarts < MAX_RESTARTS and self._cache.trust.read_bad_kv(request.record)

    def _find_not_finite(self, planned: PlannedStep, result: StepResult, last: Int32) -> list[Request]:
        failed = [
            request
            for request, reported in zip(planned.logprob_requests, result.prompt_logprobs, strict=True)
            if np.isnan(reported.logprobs).any()
        ]
        failed += [
            chunk.request
            for chunk, part in zip(planned.pooled_chunks, result.pooled, strict=True)
            if not np.isfinite(part).all()
        ]
        found = (self._rows.requests[row] for row in planned.sampling_rows[last <= INVALID_TOKEN].tolist())
        return failed + [request for request in found if request is not None and request not in failed]

    def _readers(self, not_finite: list[Request]) -> list[Request]:
        """Other running prompts that read the KV that was cut off: computing the rest of them would be wasted."""
        return [
            one
            for one in self._rows.prefilling
            if one.state is RequestState.PREFILL
            and one not in not_finite
            and not one.record.locked_node.proven
            and self._may_restart(one)
        ]

    def prove(self, planned: PlannedStep) -> None:
        """Proves the KV read by requests that first sampled in this step, or whose proof is still open."""
        if not planned.chunks and not self._to_prove:
            return
        finite = (chunk.request for chunk in planned.chunks if chunk.last)
        sampled = [request for request in finite if request.samples or request.is_pooled]
        waiting = self._to_prove + [(request, request.kv) for request in sampled if request.kv is not None]
        # A request that lost its row has sampled nothing from its present row.
        self._to_prove = [
            (request, record)
            for request, record in waiting
            if request.kv is record
            and self._rows.runs(request)
            and not self._cache.trust.prove(record, planned.plan.step)
        ]


def _sampled_last(result: StepResult, picks: Index | None) -> Int32:
    """The last token of each sequence, or of each of `picks`: only the last may be `INVALID_TOKEN`."""
    if result.tokens.shape[1] == 1:
        last = result.tokens[:, 0]
        return last if picks is None else last[picks]
    chosen = np.arange(len(result.counts)) if picks is None else picks
    last = result.tokens[chosen, result.counts[chosen] - 1]
    return last
