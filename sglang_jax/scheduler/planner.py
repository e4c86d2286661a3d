"""Chooses what the next step computes: every decode row, then prefill chunks, within one budget of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sglang_jax.mem_cache.kv_cache import KVCache
from sglang_jax.runner.plan import (
    LOGPROB_BUCKETS,
    NO_LOGPROBS,
    Bool,
    Int32,
    PromptLogprobs,
    RowUpdate,
    RunnerSpec,
    StepPlan,
)
from sglang_jax.scheduler.admission import Admission
from sglang_jax.scheduler.chunking import ChunkBudget, ChunkSharing
from sglang_jax.scheduler.request import Request, RequestState
from sglang_jax.scheduler.request_table import RequestTable

_NO_TOKENS: Int32 = np.zeros(0, np.int32)


@dataclass(slots=True)
class RunningSet:
    """Who has a row: rows that draw a token each step (`[rows]`, replaced and never written to), and requests whose
    tokens are still being computed, in order of admission. Who has ended stays until the next `sweep`."""

    decode_rows: Int32 = field(default_factory=lambda: _NO_TOKENS)
    prefilling: list[Request] = field(default_factory=list)
    stale: bool = False

    def sweep(self, active: Bool) -> None:
        """Drops what takes no part in further steps, all at once: `active` `[rows]` of the request table."""
        if self.stale:
            self.decode_rows = self.decode_rows[active[self.decode_rows]]
            self.prefilling[:] = [request for request in self.prefilling if request.state is RequestState.PREFILL]
            self.stale = False


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `[start, start + length)` of a request, computed in one step; the last chunk draws a token."""

    request: Request
    start: int
    length: int

    @property
    def last(self) -> bool:
        return self.start + self.length == self.request.prefill_len


class OutOfPages(Exception):
    """No step can be planned because pages are short. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what the scheduler must remember of it until it has run.

    - `draws`: rows that draw a token `[draws]`; `picks`: their indices in `plan.rows`, None where all do.
    - `chunks`: the prefill part; `newcomers`: requests whose first chunk in their row this is; `logprob_requests`:
      whom `plan.prompt_logprobs` are for, in order.
    """

    plan: StepPlan
    draws: Int32
    picks: Int32 | None
    chunks: tuple[Chunk, ...] = ()
    newcomers: tuple[Request, ...] = ()
    logprob_requests: tuple[Request, ...] = ()


class Planner:
    """Builds plans. A plan's arrays are never written to after it was built."""

    def __init__(
        self,
        spec: RunnerSpec,
        budget: ChunkBudget,
        cache: KVCache,
        table: RequestTable,
        running: RunningSet,
        admission: Admission,
    ) -> None:
        self._token_budget = spec.token_budget
        self._budget = budget
        self._cache = cache
        self._table = table
        self._running = running
        self._admission = admission
        self._sharing = ChunkSharing()
        self._ones: Int32 = np.ones(spec.max_rows, np.int32)
        self._yes: Bool = np.ones(spec.max_rows, np.bool_)

    def plan(self, step: int) -> Planned | None:
        """The next step, or None if there is nothing to do.

        **Raises:** `OutOfPages` if there is something to do but pages are short.
        """
        self._running.sweep(self._table.active)
        rows = self._rows_to_decode()
        kv_lens = self._cache.extend_decode(rows)
        if kv_lens is None:
            raise OutOfPages
        self._admission.admit(self._allowance(kv_lens), step)
        chunks = self._choose_chunks(kv_lens)
        if chunks:
            return self._mixed(step, rows, kv_lens, chunks)
        if len(rows):
            return self._decode_only(step, rows, kv_lens)
        if self._running.prefilling:
            raise OutOfPages
        return None

    def _rows_to_decode(self) -> Int32:
        """Rows that may draw a token whose predecessor is known or in flight; those at their limit drop out."""
        rows = self._running.decode_rows
        open_ended = self._cache.lengths.kv_allocated[rows] < self._table.total_len[rows] - 1
        if not open_ended.all():
            rows = self._running.decode_rows = rows[open_ended]
        return rows

    def _decode_only(self, step: int, rows: Int32, kv_lens: Int32) -> Planned:
        count = len(rows)
        self._table.last_step[rows] = step
        plan = StepPlan(
            step=step,
            rows=rows,
            num_decode=count,
            query_lens=self._ones[:count],
            kv_lens=kv_lens,
            prefill_tokens=_NO_TOKENS,
            samples=self._yes[:count],
            page_deltas=self._cache.take_deltas(),
            top_logprobs=self._top_logprobs(rows),
        )
        return Planned(plan, rows, None)

    def _work(self) -> list[int]:
        """Tokens that each of the prompts under way has left."""
        prompts = self._running.prefilling
        if not prompts:
            return []
        starts = self._cache.lengths.kv_allocated[[request.row for request in prompts]].tolist()
        return [request.prefill_len - start for request, start in zip(prompts, starts, strict=True)]

    def _allowance(self, kv_lens: Int32) -> int:
        """Tokens of prompts that a step beside decode rows of these lengths `[rows]` has."""
        most = self._token_budget - len(kv_lens)
        return self._budget.allowance(kv_lens, self._running.prefilling, self._work(), most)

    def _choose_chunks(self, kv_lens: Int32) -> list[Chunk]:
        """Gives prompts under way their parts of what the step has for them, as far as pages go."""
        prompts = self._running.prefilling
        if not prompts or (allowance := self._allowance(kv_lens)) <= 0:
            return []
        cache, work = self._cache, self._work()
        starts = [request.prefill_len - left for request, left in zip(prompts, work, strict=True)]
        parts = self._sharing.share(prompts, work, allowance)
        cache.let_go(np.array([request.row for request in prompts], np.int32), tight=True)
        pages = cache.available_pages
        chunks: list[Chunk] = []
        for request, start, length in zip(prompts, starts, parts, strict=True):
            slack = -start % cache.page_size
            length = min(length, slack + pages * cache.page_size)
            if length > 0:
                pages -= cache.pages_for(length - slack) if length > slack else 0
                chunks.append(Chunk(request, start, length))
        if chunks:
            rows = np.array([chunk.request.row for chunk in chunks], np.int32)
            ends = np.array([chunk.start + chunk.length for chunk in chunks], np.int32)
            granted = cache.extend_rows(rows, ends)
            assert granted, "chunks were cut to the pages that there are"
        return chunks

    def _mixed(self, step: int, decode_rows: Int32, decode_lens: Int32, chunks: list[Chunk]) -> Planned:
        newcomers = tuple(chunk.request for chunk in chunks if not chunk.request.announced)
        for request in newcomers:
            request.announced = True
        count = len(decode_rows)
        prefill_rows = np.array([chunk.request.row for chunk in chunks], np.int32)
        rows = np.concatenate((decode_rows, prefill_rows))
        self._table.last_step[rows] = step
        draws = np.array([chunk.last and chunk.request.draws for chunk in chunks], np.bool_)
        samples = np.concatenate((self._yes[:count], draws))
        picks = np.nonzero(samples)[0].astype(np.int32)
        wanted = self._prompt_logprobs(chunks, count)
        tokens = b"".join(
            [chunk.request.tokens[chunk.start * 4 : (chunk.start + chunk.length) * 4] for chunk in chunks]
        )
        lengths = np.array([chunk.length for chunk in chunks], np.int32)
        starts = np.array([chunk.start for chunk in chunks], np.int32)
        plan = StepPlan(
            step=step,
            rows=rows,
            num_decode=count,
            query_lens=np.concatenate((self._ones[:count], lengths)),
            kv_lens=np.concatenate((decode_lens, starts + lengths)),
            prefill_tokens=np.frombuffer(tokens, np.int32),
            samples=samples,
            page_deltas=self._cache.take_deltas(),
            row_updates=tuple([_row_update(request) for request in newcomers]),
            top_logprobs=self._top_logprobs(rows[picks]),
            prompt_logprobs=tuple(entry for _, entry in wanted),
            prompt_top_logprobs=_bucket(max((request.top_logprobs for request, _ in wanted), default=0)),
        )
        requests = tuple(request for request, _ in wanted)
        return Planned(plan, rows[picks], picks, tuple(chunks), newcomers, requests)

    def _top_logprobs(self, rows: Int32) -> int:
        if not self._table.num_with_logprobs or not len(rows):
            return NO_LOGPROBS
        most = int(self._table.top_logprobs[rows].max())
        return NO_LOGPROBS if most < 0 else _bucket(most)

    def _prompt_logprobs(self, chunks: list[Chunk], first_sequence: int) -> list[tuple[Request, PromptLogprobs]]:
        """What the chunks are to tell of their prompts; each request's `next_prompt_logprob` moves on."""
        wanted = []
        for index, chunk in enumerate(chunks, first_sequence):
            request = chunk.request
            target = max(request.next_prompt_logprob, 1)
            end = min(chunk.start + chunk.length + 1, request.prompt_len)
            if target < end:
                targets = request.token_slice(target, end)
                wanted.append((request, PromptLogprobs(index, target - 1 - chunk.start, targets)))
                request.next_prompt_logprob = end
        return wanted


def _bucket(count: int) -> int:
    return next(bucket for bucket in LOGPROB_BUCKETS if bucket >= count)


def _row_update(request: Request) -> RowUpdate:
    return RowUpdate(
        row=request.row,
        sampling=request.sampling,
        seed=request.seed,
        prompt_len=request.prompt_len,
        stop_ids=request.stop_ids,
        history=request.token_slice(0, request.prefill_len) if request.sampling.counts_tokens else None,
    )
