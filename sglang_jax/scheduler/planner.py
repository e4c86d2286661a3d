"""Plans the next step: all decode rows, then chunks of prompts, within one budget of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec
import numpy as np

from sglang_jax.architectures.pooling import Pooling
from sglang_jax.mem_cache.data_parallel import AnyCache
from sglang_jax.mem_cache.kv_cache import KVCache
from sglang_jax.mem_cache.lengths import ONE, Index
from sglang_jax.runner.plan import (
    DRAFT,
    LAST_TOKEN,
    LOGPROB_BUCKETS,
    NO_LOGPROBS,
    NO_UPDATES,
    Bool,
    Int32,
    PooledPart,
    PromptLogprobs,
    RowUpdates,
    RunnerSpec,
    SamplingUpdate,
    StepPlan,
    TextUpdate,
)
from sglang_jax.sampling.wants import PooledVector, TokenScores
from sglang_jax.scheduler.chunking import ChunkBudget, ChunkSharing, goes_by_priority, whole_prompts
from sglang_jax.scheduler.drafting import Drafting, FixedDrafts
from sglang_jax.scheduler.recent_outputs import RecentOutputs
from sglang_jax.scheduler.request import Request
from sglang_jax.scheduler.rows import Rows


class Chunk(msgspec.Struct, frozen=True):
    """Tokens `[start, start + length)` of a request, computed in one step; `last`: whether they reach the prompt's
    end."""

    request: Request
    start: int
    length: int
    last: bool


class OutOfPages(Exception):
    """Pages of the cache's `short_rank` are short: no step can be planned. Nothing has changed."""


class DecodePart(msgspec.Struct, frozen=True):
    """The decode rows of a step, those with one query first. `kv_lens`: lengths after it; `widths`: queries, None if
    all have one; `[rows]` each."""

    rows: Index
    kv_lens: Int32
    widths: Int32 | None

    @property
    def num_tokens(self) -> int:
        return len(self.rows) if self.widths is None else int(self.widths.sum())


class PlannedStep(msgspec.Struct, frozen=True):
    """A plan, and what the scheduler needs to handle its results.

    - `sampling_rows`: `[samples]`, the decode rows first; `picks`: their indices in `plan.rows`, None if all sample.
    - `masked`: requests that sample under a mask, in order.
    - `newcomers`: requests with their first chunk in their row; `logprob_requests`: of `plan.prompt_logprobs`, in
      order; `pooled_chunks`: of `plan.pooled`, in order.
    """

    plan: StepPlan
    sampling_rows: Index
    picks: Index | None
    decode: DecodePart
    masked: tuple[Request, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    newcomers: tuple[Request, ...] = ()
    logprob_requests: tuple[Request, ...] = ()
    pooled_chunks: tuple[Chunk, ...] = ()


class Planner:
    """Builds plans, whose arrays never change afterwards."""

    def __init__(
        self,
        spec: RunnerSpec,
        budget: ChunkBudget,
        cache: AnyCache,
        rows: Rows,
        drafting: Drafting | None = None,
        recent: RecentOutputs | None = None,
    ) -> None:
        self._recent = recent
        self._token_budget = spec.token_budget
        self._max_samples = spec.max_samples
        self._max_drafts = spec.max_drafts
        self._pooling = spec.pooling
        self._whole_prompts = spec.whole_prompts
        if spec.whole_prompts and spec.token_budget < spec.max_context:
            raise ValueError(
                f"prompts of up to {spec.max_context} tokens are computed whole, in steps of {spec.token_budget} tokens"
            )
        self._drafting = drafting or FixedDrafts()
        self._most_queries = None if spec.drafts_with_prompts else spec.max_rows
        self._budget = budget
        self._cache = cache
        self._rows = rows
        self._sharing = [ChunkSharing() for _ in cache.ranks]
        self._rank_tokens = spec.rank_tokens
        self._rows_of_rank = spec.rows_of_rank
        self.starved: int | None = None
        """A rank whose prompts could compute nothing in the last step, for lack of pages, though it had no decode
        rows."""
        self._known_rows: Index = np.zeros(0, np.intp)
        self._known_numbers: Int32 = np.zeros(0, np.int32)
        self._ones: Int32 = np.ones(spec.max_rows, np.int32)
        self._all_true: Bool = np.ones(spec.max_rows, np.bool_)
        self._last_tokens: Int32 = np.full(spec.max_rows, LAST_TOKEN, np.int32)
        for shared in (self._ones, self._all_true, self._last_tokens):
            shared.setflags(write=False)

    def extend_decode(self, prompts_wait: bool) -> DecodePart:
        """Extends every decode row by the token that it sampled last, and by drafts, which get only tokens and pages
        that neither prompts (running, or waiting if `prompts_wait`) nor the cache needs. Raises `OutOfPages`, with
        nothing changed."""
        self._rows.sweep()
        rows = self._rows.decode_rows
        left = self._rows.total_len[rows] - self._cache.lengths.kv_planned[rows]
        open_ended = left > ONE  # the last sampled token is not computed yet
        if np.count_nonzero(open_ended) < len(rows):
            # The other rows are at their limit, or may be after the step in flight.
            rows, left = rows[open_ended], left[open_ended]
        rows, left = self._up_to_boundaries(rows, left)
        if self._max_samples > 1 and len(rows):
            part = self._extend_with_drafts(rows, left, prompts_wait)
            if part is not None:
                return part
        widths = None if self._max_samples == 1 else self._ones[: len(rows)]
        kv_lens = self._cache.extend_decode(rows, widths, prompts_wait=prompts_wait)
        if kv_lens is None:
            raise OutOfPages
        return DecodePart(rows, kv_lens.astype(np.int32), None)

    def _up_to_boundaries(self, rows: Index, left: Index) -> tuple[Index, Index]:
        """The `rows` that may be in the next step, and the tokens `left` that each may advance: `[n]` both. A row whose
        states are saved at boundaries advances at most to the next one."""
        most = self._cache.most_queries(rows)
        if most is None:
            return rows, left
        left = np.minimum(left, most + ONE)  # the sample of the last query is not computed yet
        here = most > 0
        return (rows, left) if here.all() else (rows[here], left[here])

    def _room(self, prompts: bool) -> int:
        """Maximum queries of decode rows in a step; `prompts`: whether it may have chunks, too."""
        if self._most_queries is None:
            return self._token_budget - (self._budget.size if prompts else 0)
        return 0 if prompts else min(self._most_queries, self._token_budget)

    def _extend_with_drafts(self, rows: Index, left: Index, prompts_wait: bool) -> DecodePart | None:
        """Extends rows by drafts that are likely to pay, within the step's tokens and free pages; None without
        drafts."""
        room = self._room(prompts_wait or bool(self._rows.prefilling))
        most = np.minimum(left - 1, self._max_samples).astype(np.int32)
        most[self._rows.one_by_one[rows]] = 1
        if self._recent is not None and room > len(rows):
            hinted = self._recent.look(rows[most > 1])
            if len(hinted):
                self._drafting.reset_rows(hinted)  # its earlier results were without the hint
        if self._max_drafts is not None:
            room = min(room, len(rows) + self._max_drafts)
        widths = self._drafting.choose(rows, most, room)
        drafting = widths > 1
        if not drafting.any():
            return None
        order = np.argsort(drafting, kind="stable")
        rows, widths = rows[order], widths[order]
        kv_lens = self._cache.extend_decode(rows, widths, evict=False, prompts_wait=prompts_wait)
        return None if kv_lens is None else DecodePart(rows, kv_lens.astype(np.int32), widths)

    def plan(self, step: int, decode: DecodePart) -> PlannedStep | None:
        """The step with these decode rows and with chunks of running prompts; None if there is nothing to compute.
        Raises `OutOfPages` if there is, but pages are short."""
        chunks = self._choose_chunks(step, decode)
        self.starved = self._starved_rank(decode, chunks)
        if chunks:
            return self._mixed(step, decode, chunks)
        if len(decode.rows):
            return self._decode_only(step, decode)
        if self._rows.prefilling:
            self._cache.note_short(self._rows.prefilling[0].row)
            raise OutOfPages
        return None

    def _starved_rank(self, decode: DecodePart, chunks: list[Chunk]) -> int | None:
        """See `starved`. None if all ranks are, or if there is one rank: then there is no step."""
        if len(self._cache.ranks) == 1 or not (chunks or len(decode.rows)):
            return None
        size = self._rows_of_rank
        waiting = {request.row // size for request in self._rows.prefilling}
        waiting -= {chunk.request.row // size for chunk in chunks}
        return min(waiting.difference((decode.rows // size).tolist()), default=None) if waiting else None

    def _decode_only(self, step: int, decode: DecodePart) -> PlannedStep:
        rows, count = decode.rows, len(decode.rows)
        num_decode, query_lens, tokens = self._queries(decode)
        masked, under_masks = self._masked(rows, self._all_true[:count])
        plan = StepPlan(
            step=step,
            rows=self._numbers(rows),
            num_decode=num_decode,
            query_lens=query_lens,
            kv_lens=decode.kv_lens,
            tokens=tokens,
            samples=self._all_true[:count],
            page_deltas=self._cache.take_deltas(),
            copies=self._cache.take_copies(rows, step),
            length_on_device=self._lengths_on_device(rows),
            masked=masked,
            row_updates=self._row_updates(()),
            top_logprobs=self._top_logprobs(rows),
        )
        self._rows.last_step[rows] = step
        return PlannedStep(plan, rows, None, decode, under_masks)

    def _numbers(self, rows: Index) -> Int32:
        """Decode rows as int32: the same array while the rows are the same."""
        if rows is not self._known_rows:
            self._known_rows, self._known_numbers = rows, rows.astype(np.int32)
        return self._known_numbers

    def _masked(self, rows: Index, samples: Bool) -> tuple[Bool | None, tuple[Request, ...]]:
        """Which of a step's `rows` sample under a mask, bool `[sequences]`, None if none do; and their requests."""
        if not self._rows.num_masked:
            return None, ()
        masked: Bool = self._rows.masked[rows] & samples
        if not masked.any():
            return None, ()
        return masked, tuple([self._rows.at(row) for row in rows[masked].tolist()])

    def _queries(self, decode: DecodePart) -> tuple[int, Int32, Int32]:
        """The number of rows with one query, the queries of each row `[rows]`, and the source of each token
        `[queries]`."""
        count, widths = len(decode.rows), decode.widths
        if widths is None:
            return count, self._ones[:count], self._last_tokens[:count]
        tokens = np.full(decode.num_tokens, DRAFT, np.int32)
        tokens[np.cumsum(widths) - widths] = LAST_TOKEN
        return int(np.count_nonzero(widths == 1)), widths, tokens

    def _lengths_on_device(self, rows: Index) -> Bool | None:
        """Which rows start where a step in flight ends, bool `[rows]`; None if none do."""
        if self._max_samples == 1:
            return None
        length_on_device: Bool = self._rows.last_step[rows] > self._cache.finished_step
        return length_on_device if length_on_device.any() else None

    def _work(self) -> list[int]:
        prompts = self._rows.prefilling
        if not prompts:
            return []
        starts = self._cache.lengths.kv_planned[[request.row for request in prompts]].tolist()
        return [request.prefill_len - start for request, start in zip(prompts, starts, strict=True)]

    def allowance(self, step: int, decode: DecodePart) -> int:
        return self._allowance(step, decode, self._work())

    def _allowance(self, step: int, decode: DecodePart, work: list[int]) -> int:
        tokens, prompts = decode.num_tokens, self._rows.prefilling
        most, by_priority = self._token_budget - tokens, goes_by_priority(step)
        return self._budget.allowance(tokens, decode.kv_lens, prompts, work, most, by_priority=by_priority)

    def _choose_chunks(self, step: int, decode: DecodePart) -> list[Chunk]:
        prompts = self._rows.prefilling
        if not prompts:
            return []
        cache, work = self._cache, self._work()
        if (allowance := self._allowance(step, decode, work)) <= 0:
            return []
        longest, by_priority = self._longest_chunks(work), goes_by_priority(step)
        if self._whole_prompts:
            most = self._token_budget - decode.num_tokens
            parts = whole_prompts(prompts, work, allowance, most, by_priority=by_priority)
        else:
            parts = self._share(decode, work, allowance, longest, by_priority)
        cache.let_go(np.array([request.row for request in prompts]), tight=True)
        size, left_of = cache.page_size, {one.rank: one.available_pages for one in self._ranks_of(prompts)}
        chunks: list[Chunk] = []
        rows: list[int] = []
        ends: list[int] = []
        for request, left, length in zip(prompts, work, parts, strict=True):
            total, record = request.prefill_len, request.record
            start = total - left
            slack = -start % size
            rank = record.row // self._rows_of_rank
            pages = left_of[rank]
            end = cache.chunk_end(record, start, start + min(length, slack + pages * size), total)
            length = end - start
            if self._whole_prompts and end < total:
                continue
            if length > 0:
                left_of[rank] -= cache.pages_for(length - slack) if length > slack else 0
                chunks.append(Chunk(request, start, length, end == total))
                rows.append(record.row)
                ends.append(end)
        if chunks:
            granted = cache.extend_rows(np.array(rows), np.array(ends))
            assert granted, "chunks were cut to the pages that there are"
        return chunks

    def _ranks_of(self, prompts: list[Request]) -> Iterable[KVCache]:
        ranks = self._cache.ranks
        return ranks if len(ranks) == 1 else {one.row: self._cache.of_row(one.row) for one in prompts}.values()

    def _share(
        self, decode: DecodePart, work: list[int], allowance: int, longest: list[int], by_priority: bool
    ) -> list[int]:
        """The tokens that each running prompt computes. A step lasts as long as that of the rank with the most tokens,
        so each rank has an equal part of the `allowance`, whatever the others leave of theirs."""
        prompts, ranks = self._rows.prefilling, len(self._sharing)
        if ranks == 1:
            return self._sharing[0].share(prompts, work, allowance, longest, by_priority=by_priority)
        decoding = np.bincount(decode.rows // self._rows_of_rank, minlength=ranks).tolist()
        of_rank: dict[int, list[int]] = {}
        for index, request in enumerate(prompts):
            of_rank.setdefault(request.row // self._rows_of_rank, []).append(index)
        parts = [0] * len(prompts)
        for rank, mine in of_rank.items():
            most = min(-(-allowance // ranks), self._rank_tokens - decoding[rank])
            works, limits = [work[index] for index in mine], [longest[index] for index in mine]
            sharing = self._sharing[rank]
            found = sharing.share([prompts[index] for index in mine], works, most, limits, by_priority=by_priority)
            for index, part in zip(mine, found, strict=True):
                parts[index] = part
        return parts

    def _longest_chunks(self, work: list[int]) -> list[int]:
        if not self._cache.least_gain:
            return work
        most = []
        for request, left in zip(self._rows.prefilling, work, strict=True):
            total = request.prefill_len
            most.append(self._cache.chunk_end(request.record, total - left, total, total) - total + left)
        return most

    def _mixed(self, step: int, decode: DecodePart, chunks: list[Chunk]) -> PlannedStep:
        newcomers = tuple(chunk.request for chunk in chunks if not chunk.request.announced)
        for request in newcomers:
            request.announced = True
        count = len(decode.rows)
        num_decode, query_lens, sources = self._queries(decode)
        prefill_rows = np.array([chunk.request.row for chunk in chunks])
        rows = np.concatenate((decode.rows, prefill_rows))
        samples = np.array([chunk.last and chunk.request.samples for chunk in chunks], np.bool_)
        samples = np.concatenate((self._all_true[:count], samples))
        (picks,) = samples.nonzero()
        masked, under_masks = self._masked(rows, samples)
        wanted = self._prompt_logprobs(chunks, count)
        pooled = self._pooled(chunks, count)
        tokens = [chunk.request.token_slice(chunk.start, chunk.start + chunk.length) for chunk in chunks]
        lengths = np.array([chunk.length for chunk in chunks], np.int32)
        starts = np.array([chunk.start for chunk in chunks], np.int32)
        plan = StepPlan(
            step=step,
            rows=rows.astype(np.int32),
            num_decode=num_decode,
            query_lens=np.concatenate((query_lens, lengths)),
            kv_lens=np.concatenate((decode.kv_lens, starts + lengths)),
            tokens=np.concatenate((sources, *tokens)),
            samples=samples,
            page_deltas=self._cache.take_deltas(),
            copies=self._cache.take_copies(rows, step),
            length_on_device=self._lengths_on_device_mixed(decode.rows, len(chunks)),
            masked=masked,
            row_updates=self._row_updates(newcomers),
            top_logprobs=self._top_logprobs(rows[picks]),
            prompt_logprobs=tuple(entry for _, entry in wanted),
            prompt_top_logprobs=_bucket(max((request.top_logprobs for request, _ in wanted), default=0)),
            pooled=tuple([part for _, part in pooled]),
        )
        requests = tuple(request for request, _ in wanted)
        self._rows.last_step[rows] = step
        pooled_chunks = tuple([chunk for chunk, _ in pooled])
        return PlannedStep(
            plan, rows[picks], picks, decode, under_masks, tuple(chunks), newcomers, requests, pooled_chunks
        )

    def _row_updates(self, newcomers: tuple[Request, ...]) -> RowUpdates:
        hints = () if self._recent is None else self._recent.take()
        if not newcomers and not hints:
            return NO_UPDATES
        sampling = tuple([_sampling_update(request) for request in newcomers])
        if self._max_samples == 1:
            return RowUpdates(sampling)
        texts = [TextUpdate(one.row, one.token_slice(0, one.prefill_len)) for one in newcomers if one.samples]
        return RowUpdates(sampling, tuple(texts), hints)

    def _lengths_on_device_mixed(self, decode_rows: Index, chunks: int) -> Bool | None:
        length_on_device = self._lengths_on_device(decode_rows)
        return None if length_on_device is None else np.concatenate((length_on_device, np.zeros(chunks, np.bool_)))

    def _top_logprobs(self, rows: Index) -> int:
        if not self._rows.num_with_logprobs or not len(rows):
            return NO_LOGPROBS
        most = int(self._rows.top_logprobs[rows].max())
        return NO_LOGPROBS if most < 0 else _bucket(most)

    def _prompt_logprobs(self, chunks: list[Chunk], first_sequence: int) -> list[tuple[Request, PromptLogprobs]]:
        wanted = []
        for index, chunk in enumerate(chunks, first_sequence):
            request = chunk.request
            if request.next_prompt_logprob >= request.prompt_len:
                continue
            target = max(request.next_prompt_logprob, 1)
            end = min(chunk.start + chunk.length + 1, request.prompt_len)
            if target < end:
                targets = request.token_slice(target, end)
                wanted.append((request, PromptLogprobs(index, target - 1 - chunk.start, targets)))
                request.next_prompt_logprob = end
        return wanted

    def _pooled(self, chunks: list[Chunk], first_sequence: int) -> list[tuple[Chunk, PooledPart]]:
        found = []
        for index, chunk in enumerate(chunks, first_sequence):
            wants = chunk.request.wants
            if isinstance(wants, TokenScores) and chunk.last:
                found.append((chunk, PooledPart(index, np.array(wants.token_ids, np.int32))))
            if isinstance(wants, PooledVector) and self._has_part(chunk):
                found.append((chunk, PooledPart(index)))
        return found

    def _has_part(self, chunk: Chunk) -> bool:
        """Whether a chunk has a part of its prompt's vector."""
        match self._pooling:
            case Pooling.MEAN:
                return True
            case Pooling.CLS:
                return chunk.start == 0
            case _:
                return chunk.last


def _bucket(count: int) -> int:
    return next(bucket for bucket in LOGPROB_BUCKETS if bucket >= count)


def _sampling_update(request: Request) -> SamplingUpdate:
    sampling = request.sampling
    if sampling.grammar is not None:  # its masks decide when the output may end
        sampling = replace(sampling, grammar=None, min_new_tokens=0)
    return SamplingUpdate(
        row=request.row,
        sampling=sampling,
        seed=request.seed,
        prompt_len=request.prompt_len,
        stop_ids=request.stop_ids,
        history=request.token_slice(0, request.prefill_len) if request.sampling.counts_tokens else None,
    )
