"""Which requests computed something that is not finite, and what becomes of who read it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_jax.mem_cache.kv_cache import KVCache
from sglang_jax.mem_cache.lengths import Index
from sglang_jax.mem_cache.row_kv import RowKV
from sglang_jax.runner.plan import INVALID_TOKEN, Int32, StepResult
from sglang_jax.scheduler.planner import Planned
from sglang_jax.scheduler.request import Request, RequestState
from sglang_jax.scheduler.rows import Rows

MAX_RESTARTS = 3
"""Bad steps, one after the other, that a request which merely reads what they wrote outlives. Where the weights
themselves give no finite logits, a prefix is computed so many times more before all who share it have failed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who failed, and who is to be computed anew from KV that is not in doubt."""

    failed: list[Request]
    restarted: list[Request]


_NOBODY = Verdict([], [])
_INVALID: Int32 = np.array(INVALID_TOKEN, np.int32)


class Judge:
    """Keeps KV that is not finite from whoever did not compute it.

    A prompt's KV is in the tree before anything was sampled from it. Once a sample, or a logprob of the prompt, turns
    out not to be finite, what the request computed, and what it read that nobody has sampled from yet, is cut off. The
    request fails, alone. One that read such KV of others is computed anew instead: it may be well without it. A finite
    sample proves what it read.
    """

    def __init__(
        self,
        cache: KVCache,
        rows: Rows,
    ) -> None:
        self._cache = cache
        self._rows = rows
        self._to_prove: list[tuple[Request, RowKV]] = []

    def judge(self, planned: Planned, result: StepResult) -> Verdict:
        """Looks at what a step gave, before anything of it is published. Once the verdict is carried out, `prove`."""
        last = _sampled_last(result, planned.picks)
        if not planned.logprob_requests and not np.count_nonzero(last <= _INVALID):
            return _NOBODY
        in_trouble = [request for request in self._in_trouble(planned, result, last) if self._rows.runs(request)]
        if not in_trouble:
            return _NOBODY
        for request in in_trouble:
            self._cache.trust.distrust(request.record)
        restarted = [request for request in in_trouble if self._may_restart(request)]
        failed = [request for request in in_trouble if request not in restarted]
        return Verdict(failed, restarted + self._readers(in_trouble))

    def _may_restart(self, request: Request) -> bool:
        return request.restarts < MAX_RESTARTS and self._cache.trust.borrowed_trouble(request.record)

    def _in_trouble(self, planned: Planned, result: StepResult, last: Int32) -> list[Request]:
        failed = [
            request
            for request, reported in zip(planned.logprob_requests, result.prompt_logprobs, strict=True)
            if np.isnan(reported.logprobs).any()
        ]
        found = (self._rows.requests[row] for row in planned.sampling_rows[last <= INVALID_TOKEN].tolist())
        return failed + [request for request in found if request is not None and request not in failed]

    def _readers(self, in_trouble: list[Request]) -> list[Request]:
        """Other prompts under way that read what was cut off, and from which nothing good was sampled: the rest of a
        long one would be computed for nothing."""
        return [
            one
            for one in self._rows.prefilling
            if one.state is RequestState.PREFILL
            and one not in in_trouble
            and not one.record.locked_node.proven
            and self._may_restart(one)
        ]

    def prove(self, planned: Planned) -> None:
        """What those read whose first sample this step brought, and those whose first one did not tell."""
        if not planned.chunks and not self._to_prove:
            return
        sampled = [chunk.request for chunk in planned.chunks if chunk.last and chunk.request.samples]
        waiting = self._to_prove + [(request, request.kv) for request in sampled if request.kv is not None]
        # Whoever lost its row meanwhile has sampled nothing from the one that it has now.
        self._to_prove = [
            (request, record)
            for request, record in waiting
            if request.kv is record
            and self._rows.runs(request)
            and not self._cache.trust.prove(record, planned.plan.step)
        ]


def _sampled_last(result: StepResult, picks: Index | None) -> Int32:
    """The last token that each sequence sampled, or each of `picks`: the one that may be `INVALID_TOKEN`."""
    if result.tokens.shape[1] == 1:
        last = result.tokens[:, 0]
        return last if picks is None else last[picks]
    chosen = np.arange(len(result.counts)) if picks is None else picks
    last = result.tokens[chosen, result.counts[chosen] - 1]
    return last
