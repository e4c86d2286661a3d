"""Handles the results of finished steps: updates rows, publishes tokens, and ends requests."""

from __future__ import annotations

import numpy as np

from sglang_jax.architectures.pooling import Pooling
from sglang_jax.mem_cache.data_parallel import AnyCache
from sglang_jax.mem_cache.lengths import ONE, Index
from sglang_jax.runner.plan import INVALID_TOKEN, Int32, StepPlan, StepResult
from sglang_jax.scheduler.constraints import Constraints
from sglang_jax.scheduler.drafting import Drafting
from sglang_jax.scheduler.finisher import Finisher
from sglang_jax.scheduler.non_finite_check import NonFiniteCheck
from sglang_jax.scheduler.planner import PlannedStep
from sglang_jax.scheduler.publisher import Publisher
from sglang_jax.scheduler.request import Request, RequestState
from sglang_jax.scheduler.rows import Advance, Rows
from sglang_jax.scheduler.step_log import StepLog


class ResultProcessor:
    def __init__(
        self,
        cache: AnyCache,
        rows: Rows,
        drafting: Drafting,
        constraints: Constraints,
        publisher: Publisher,
        finisher: Finisher,
        log: StepLog,
        pooling: Pooling | None = None,
    ) -> None:
        self._cache = cache
        self._rows = rows
        self._drafting = drafting
        self._constraints = constraints
        self._publisher = publisher
        self._finisher = finisher
        self._log = log
        self._pooling = pooling
        self._finite_check = NonFiniteCheck(cache, rows)
        self._all_picks: Index = np.arange(len(rows.requests))

    def process(self, planned: PlannedStep, result: StepResult) -> int:
        """Handles one step, which the cache has settled. Returns the number of sampled tokens."""
        widths, sampled = planned.decode.widths, 0
        if widths is not None:
            counts = result.counts[: len(widths)]
            self._cache.shorten(planned.decode.rows, widths, counts)
            self._note_drafts(planned.decode.rows, widths, counts)
            sampled = self._advance_valid_tokens(planned, result)
        self._judge_step(planned, result)
        if planned.logprob_requests:
            self._publisher.prompt_logprobs(planned, result)
        if len(planned.sampling_rows):
            sampled += self._advance(planned.plan, result, planned.sampling_rows, planned.picks, result.counts)
        if planned.pooled_chunks:
            self._add_pooled(planned, result)
        for chunk in planned.chunks:
            if chunk.last and not chunk.request.samples and chunk.request.state is RequestState.DECODE:
                self._end_prompt(chunk.request)
        return sampled

    def _add_pooled(self, planned: PlannedStep, result: StepResult) -> None:
        """Adds parts of vectors to those of earlier chunks."""
        for chunk, part in zip(planned.pooled_chunks, result.pooled, strict=True):
            request = chunk.request
            if not self._rows.runs(request):
                continue
            request.pooled = part if request.pooled is None else request.pooled + part

    def _end_prompt(self, request: Request) -> None:
        """Ends a request that samples nothing, after its last chunk."""
        if request.pooled is not None:
            parts = request.prompt_len if self._pooling is Pooling.MEAN else 1
            self._publisher.pooled(request, request.pooled / parts)
        self._finisher.end(request, "length", insert=True)

    def _note_drafts(self, rows: Index, widths: Int32, counts: Int32) -> None:
        self._drafting.observe(rows, widths, counts)
        drafted = np.stack((widths > 1, widths - 1, counts - 1), axis=1).astype(np.int64)
        self._rows.drafts[rows] += drafted
        self._publisher.drafts(rows, drafted)
        self._log.drafted(drafted)

    def _judge_step(self, planned: PlannedStep, result: StepResult) -> None:
        verdict = self._finite_check.judge(planned, result)
        for request in verdict.failed:
            self._finisher.fail(request)
        for request in verdict.restarted:
            self._finisher.restart(request)
        self._finite_check.prove(planned)

    def _advance_valid_tokens(self, planned: PlannedStep, result: StepResult) -> int:
        """Handles the valid tokens of rows with drafts whose last logits are not finite; a valid token may end such a
        row."""
        counts = result.counts[: len(planned.decode.rows)]
        last = result.tokens[self._all_picks[: len(counts)], counts - 1]
        (picks,) = ((last <= INVALID_TOKEN) & (counts > 1)).nonzero()
        if not len(picks):
            return 0
        return self._advance(planned.plan, result, planned.decode.rows[picks], picks, result.counts - 1)

    def _advance(self, plan: StepPlan, result: StepResult, rows: Index, picks: Index | None, counts: Int32) -> int:
        """Records and publishes the first `counts` `[sequences]` tokens of `rows` `[rows]`, ends requests, and returns
        the number of tokens. `picks`: indices of the rows in the plan, None if these are all of its rows."""
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
        """Feeds matchers the token of each of their rows, except a token that ends the request."""
        picks = np.flatnonzero(self._rows.masked[rows] & ~advance.stopped)
        if len(picks):
            requests = [self._rows.at(row) for row in rows[picks].tolist()]
            self._finisher.close(self._constraints.follow(requests, tokens[picks, 0].tolist()))

    def _end_where(self, over: np.ndarray, rows: Index, advance: Advance) -> None:
        (ended,) = over.nonzero()
        last = self._rows.tokens[rows[ended], advance.num_tokens[ended] - 1].tolist()
        for row, by_token, token in zip(rows[ended].tolist(), advance.stopped[ended].tolist(), last, strict=True):
            if by_token:
                self._finisher.end(self._rows.at(row), "stop", insert=True, matched_token=token)
            else:
                self._finisher.end(self._rows.at(row), "length", insert=True)
