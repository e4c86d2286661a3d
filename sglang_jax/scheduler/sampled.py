"""What a finished step sampled: into the rows, to the clients, and who has ended by it."""

from __future__ import annotations

import numpy as np

from sglang_jax.mem_cache.kv_cache import KVCache
from sglang_jax.mem_cache.lengths import ONE, Index
from sglang_jax.runner.plan import INVALID_TOKEN, Int32, StepPlan, StepResult
from sglang_jax.scheduler.constraints import Constraints
from sglang_jax.scheduler.drafting import Drafting
from sglang_jax.scheduler.endings import Endings
from sglang_jax.scheduler.judge import Judge
from sglang_jax.scheduler.planner import Planned
from sglang_jax.scheduler.publisher import Publisher
from sglang_jax.scheduler.request import RequestState
from sglang_jax.scheduler.rows import Advance, Rows
from sglang_jax.scheduler.step_log import StepLog


class Sampled:
    """Takes in the results of steps, one after the other, once the cache has settled them."""

    def __init__(
        self,
        cache: KVCache,
        rows: Rows,
        drafting: Drafting,
        constraints: Constraints,
        publisher: Publisher,
        endings: Endings,
        log: StepLog,
    ) -> None:
        self._cache = cache
        self._rows = rows
        self._drafting = drafting
        self._constraints = constraints
        self._publisher = publisher
        self._endings = endings
        self._log = log
        self._judge = Judge(cache, rows)
        self._all_picks: Index = np.arange(len(rows.requests))

    def take_in(self, planned: Planned, result: StepResult) -> int:
        """All that a step gave; how many tokens were sampled."""
        widths, sampled = planned.decode.widths, 0
        if widths is not None:
            counts = result.counts[: len(widths)]
            self._cache.shorten(planned.decode.rows, widths, counts)
            self._note_drafts(planned.decode.rows, widths, counts)
            sampled = self._advance_before_trouble(planned, result)
        self._judge_step(planned, result)
        if planned.logprob_requests:
            self._publisher.prompt_logprobs(planned, result)
        if len(planned.sampling_rows):
            sampled += self._advance(planned.plan, result, planned.sampling_rows, planned.picks, result.counts)
        for chunk in planned.chunks:
            if chunk.last and not chunk.request.samples and chunk.request.state is RequestState.DECODE:
                self._endings.end(chunk.request, "length", insert=True)
        return sampled

    def _note_drafts(self, rows: Index, widths: Int32, counts: Int32) -> None:
        self._drafting.observe(rows, widths, counts)
        drafted = np.stack((widths > 1, widths - 1, counts - 1), axis=1).astype(np.int64)
        self._rows.drafts[rows] += drafted
        self._publisher.drafts(rows, drafted)
        self._log.drafted(drafted)

    def _judge_step(self, planned: Planned, result: StepResult) -> None:
        verdict = self._judge.judge(planned, result)
        for request in verdict.failed:
            self._endings.fail(request)
        for request in verdict.restarted:
            self._endings.restart(request)
        self._judge.prove(planned)

    def _advance_before_trouble(self, planned: Planned, result: StepResult) -> int:
        """Rows with drafts may have sampled something, and ended by it, before logits that are not finite."""
        counts = result.counts[: len(planned.decode.rows)]
        last = result.tokens[self._all_picks[: len(counts)], counts - 1]
        (picks,) = ((last <= INVALID_TOKEN) & (counts > 1)).nonzero()
        if not len(picks):
            return 0
        return self._advance(planned.plan, result, planned.decode.rows[picks], picks, result.counts - 1)

    def _advance(self, plan: StepPlan, result: StepResult, rows: Index, picks: Index | None, counts: Int32) -> int:
        """Records the first `counts` `[sequences]` tokens that `rows` `[rows]` sampled, tells the clients, ends what
        has ended; how many tokens there were. `picks`: indices of the rows in the plan, None where it has no others."""
        if self._rows.num_leaving and not (staying := self._rows.active[rows]).all():
            picks = self._all_picks[: len(rows)] if picks is None else picks
            rows, picks = rows[staying], picks[staying]
        tokens = result.tokens
        if picks is not None:
            tokens, counts = tokens[picks], counts[picks]
        advance = self._rows.advance(rows, tokens, counts)
        self._cache.lengths.kv_committed[rows] = advance.num_tokens - ONE
        if plan.top_logprobs >= 0:
            picks = self._all_picks[: len(rows)] if picks is None else picks
            self._publisher.logprobs(result, rows, picks, advance.kept)
        self._publisher.tokens(rows, tokens, advance.kept)
        if self._rows.num_masked:
            self._follow(rows, tokens, advance)
        over = advance.stopped | advance.full
        if np.count_nonzero(over):
            self._end_where(over & self._rows.active[rows], rows, advance)
        return len(rows) if tokens.shape[1] == 1 else int(advance.kept.sum())

    def _follow(self, rows: Index, tokens: Int32, advance: Advance) -> None:
        """Tells matchers what their rows sampled, one token each. A token that ends a request need not be followed."""
        picks = np.flatnonzero(self._rows.masked[rows] & ~advance.stopped)
        if len(picks):
            requests = [self._rows.at(row) for row in rows[picks].tolist()]
            self._endings.close(self._constraints.follow(requests, tokens[picks, 0].tolist()))

    def _end_where(self, over: np.ndarray, rows: Index, advance: Advance) -> None:
        """Ends the requests of those of `rows` `[rows]` that are `over` `[rows]`."""
        (ended,) = over.nonzero()
        last = self._rows.tokens[rows[ended], advance.num_tokens[ended] - 1].tolist()
        for row, by_token, token in zip(rows[ended].tolist(), advance.stopped[ended].tolist(), last, strict=True):
            if by_token:
                self._endings.end(self._rows.at(row), "stop", insert=True, matched_token=token)
            else:
                self._endings.end(self._rows.at(row), "length", insert=True)
