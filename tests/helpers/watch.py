"""The guarantees of a scheduler to waiting requests, computed independently from its queue, its rows and its pages
around each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from helpers.caches import states_of
from helpers.scheduling import Bench

from sglang_jax.mem_cache.group import Group, WindowGroup
from sglang_jax.mem_cache.invariants import check_everything
from sglang_jax.mem_cache.kv_cache import KVCache
from sglang_jax.mem_cache.radix_tree import Bookmark
from sglang_jax.mem_cache.state_group import StateGroup
from sglang_jax.scheduler.admission import RETRY_STEPS
from sglang_jax.scheduler.request import Request, RequestState
from sglang_jax.scheduler.reserve import CLIP


@dataclass(slots=True)
class Wait:
    """One stay in the queue: stays of older requests that it overlaps; rows given meanwhile to younger requests, and
    `late`: those given while it was the oldest and had already let others overtake it for the maximum number of steps.
    """

    request: Request
    older: int = 0
    younger: int = 0
    late: int = 0


class Watch:
    """Steps a bench's scheduler, and checks at each step:

    - pages, as `check_everything` does, and that no page stays retired after its step has finished;
    - **no needless waiting**: a request that fits next to all running ones, and shares nothing that is being computed,
      has a row after the next step, or `RETRY_STEPS` later where nothing has changed since it was refused;
    - **bounded overtaking**: while a request waits, younger ones get at most `aged_turn - 1 + backfill_seats` rows for
      each stay of an older one that it overlaps, and for its own; and at most `aged_turn - 1` once `backfill_steps`
      have passed since it, then the oldest, was found not to fit.

    `met` counts events, so that a test can tell whether it covered its subject.
    """

    def __init__(self, bench: Bench) -> None:
        self._scheduler = scheduler = bench.scheduler
        self._policy = bench.config.schedule_policy
        self._chunk = min(bench.chunk, bench.budget) * bench.ranks
        self._budget = bench.budget * bench.ranks
        self._max_samples = bench.max_samples
        self._waits: dict[int, Wait] = {}
        self._seats = 0
        self._overdue = 0
        self._changed = True
        self.met: Counter[str] = Counter()
        admission, cache = scheduler._admission, scheduler.cache
        admission._seat = self._around(admission._seat, before=self._seated)
        admission.admit = self._around(admission.admit, after=self._looked)
        scheduler.queue.add = self._around(scheduler.queue.add, before=self._queued)
        cache.release_kv_cache = self._around(cache.release_kv_cache, after=self._note_change)
        cache.cache_prefix = self._around(cache.cache_prefix, after=self._note_change)

    def step(self) -> None:
        """Runs one step with all checks."""
        scheduler = self._scheduler
        owed, changed, seats = self._owes_a_row(), self._changed, self._seats
        retractions = scheduler.log.counts.retractions
        scheduler.step()
        check_everything(scheduler.cache)
        self._check_windows()
        self._check_bookmarks()
        groups = [group for one in scheduler.cache.ranks for group in one.groups]
        retired = (step for group in groups for step, _ in group._retired)
        late = [step for step in retired if step <= scheduler.cache.finished_step]
        assert not late, f"pages stay retired though steps {late} have finished"
        self._check_states()
        self._overdue = self._overdue + 1 if owed and self._seats == seats else 0
        most = 0 if changed else RETRY_STEPS
        assert self._overdue <= most, f"{scheduler.queue.requests()[:1]} fits, and has no row"
        self.met["several prompts under way"] += len(self._under_way()) > 1
        self.met["retracted for lack of pages"] += scheduler.log.counts.retractions - retractions
        self.met["several tokens of a row in a step"] += self._several_of_a_row()
        self.met["rows of several ranks in a step"] += self._ranks_in_flight() > 1
        self.met["computed anew"] += any(one.restarts for one in scheduler.requests.values())

    def _check_bookmarks(self) -> None:
        """The bookmarks of the next requests lead to the same match as a walk from the root."""
        for one, request in product(self._scheduler.cache.ranks, self._scheduler.queue.front(4)):
            place = request.tokens, request.match_limit, request.namespace
            bookmark = request.waiting.bookmark
            if len(self._scheduler.cache.ranks) > 1:
                bookmark = bookmark.of_ranks.get(one.rank, Bookmark())
            found, wanted = one.probe(*place, copy(bookmark)), one.probe(*place)
            assert replace(found, node=wanted.node) == wanted, f"{request.id} finds {found}, and {wanted} anew"
            assert found.node is wanted.node or found.node.parent is wanted.node.parent is None
            assert not bookmark.holds(request.match_limit) or bookmark.length == wanted.length

    def _check_windows(self) -> None:
        """No row holds more of a window than two steps of it need."""
        for cache, index in product(self._scheduler.cache.ranks, range(len(self._scheduler.cache.ranks[0].groups))):
            group = cache.groups[index]
            if isinstance(group, WindowGroup):
                bound = group.reach + group.slack + 2 * (cache.pages_for(max(self._chunk, self._max_samples)) + 1)
                for record in cache.open_rows.values():
                    held = cache.pages_for(record.kv_allocated_len) - group.held_from(record.row)
                    assert held <= bound, f"row {record.row} holds {held} pages of a window, and needs {bound} at most"

    def _check_states(self) -> None:
        """No state stays pinned for a finished step, or for a row that has started, and a row has at most two slots;
        with reuse switched off, one, and the tree none."""
        cache = self._scheduler.cache.ranks[0]
        if (states := states_of(cache)) is None:
            return
        late = [step for step, _ in states._starting if step <= cache.finished_step]
        assert not late, f"states stay pinned though steps {late} have finished"
        assert states._pending == np.count_nonzero(states._sources)
        slots = [len(states.owned(record, 0)) for record in cache.open_rows.values()]
        assert max(slots, default=0) <= 1 + cache.reuse, f"rows have {slots} slots"
        assert cache.reuse or states.pool.num_free == states.pool.total - len(slots)
        self.met["began with a copy of a state"] += bool(states._starting)
        self.met["second slots"] += max(slots, default=0) > 1
        self.met["guessed states"] += any(record.state_len in record.guesses for record in cache.open_rows.values())

    def _around(
        self, call: Callable[..., object], *, before: Callable[..., None] | None = None, after: object = None
    ) -> Callable[..., object]:
        def watched(*arguments: object, **named: object) -> object:
            if before is not None:
                before(*arguments)
            result = call(*arguments, **named)
            if callable(after):
                after(*arguments)
            return result

        return watched

    def _note_change(self, *arguments: object) -> None:
        self._changed = True

    def _looked(self, *arguments: object) -> None:
        self._changed = False

    def _queued(self, request: Request) -> None:
        waiting = {one.id for one in self._scheduler.queue.requests()}
        self._waits = {key: wait for key, wait in self._waits.items() if key in waiting}
        for wait in self._waits.values():
            wait.older += request.sequence < wait.request.sequence
        older = sum(wait.request.sequence < request.sequence for wait in self._waits.values())
        self._waits[request.id] = Wait(request, older)
        self._changed = True

    def _seated(self, request: Request, *arguments: object) -> None:
        self._seats += 1
        self._waits.pop(request.id, None)
        waiting = {one.id for one in self._scheduler.queue.requests()}
        self._waits = {key: wait for key, wait in self._waits.items() if key in waiting}
        admission = self._scheduler._admission
        turns, passing = admission.aged_turn - 1, admission.backfill_seats
        oldest = min((wait.request.sequence for wait in self._waits.values()), default=0)
        for wait in self._waits.values():
            if request.sequence < wait.request.sequence:
                continue
            wait.younger += 1
            wait.late += wait.request.sequence == oldest and self._was_overtaken_long_enough(wait.request)
            self.met[f"overtaken under {self._policy}"] += 1
            stays = wait.older + 1
            assert wait.younger <= (turns + passing) * stays, (
                f"{wait} was overtaken too often, {turns} + {passing} each"
            )
            assert wait.late <= turns * stays, f"{wait} was overtaken too late, {turns} each"

    def _was_overtaken_long_enough(self, request: Request) -> bool:
        """Whether it has let others overtake it for the maximum number of steps, so that room must be kept for it."""
        since, now = request.waiting.refused_at, self._scheduler.cache.launched_step + 1
        return since is not None and now - since >= self._scheduler._admission.backfill_steps

    def _several_of_a_row(self) -> bool:
        launched = self._scheduler._in_flight
        return launched is not None and launched.planned.decode.widths is not None

    def _ranks_in_flight(self) -> int:
        launched, cache = self._scheduler._in_flight, self._scheduler.cache
        rows = [] if launched is None else launched.planned.plan.rows.tolist()
        return len({cache.of_row(row).rank for row in rows})

    def _under_way(self) -> list[Request]:
        return [one for one in self._scheduler.rows.prefilling if one.state is RequestState.PREFILL]

    def _owes_a_row(self) -> bool:
        """Whether the first by policy, the oldest, and those that may be next in the fair order, would all fit into the
        memory available to the next step on some rank, on a cautious count, and none has a reason to wait."""
        scheduler = self._scheduler
        if not scheduler.queue or not scheduler.cache.num_free_rows or scheduler.rows.num_leaving:
            return False
        return any(one.num_free_rows and self._owes_one_of(one) for one in scheduler.cache.ranks)

    def _owes_one_of(self, cache: KVCache) -> bool:
        """The same for the rows of one rank."""
        scheduler, all_under_way = self._scheduler, self._under_way()
        under_way = [one for one in all_under_way if one.row in cache.open_rows]
        decode = scheduler.rows.decode_rows
        decode = decode[scheduler.rows.active[decode]]
        whole = len(decode)
        decode = decode[np.isin(decode, list(cache.open_rows))]
        crossing = int(np.count_nonzero(cache.lengths.kv_allocated[decode] % cache.page_size == 0))
        if self._max_samples > 1:
            crossing = len(decode) * (cache.pages_for(self._max_samples) + 1)
        starts = [cache.lengths.kv_allocated[one.row] for one in under_way]
        work = sum(int(one.prefill_len - cache.lengths.kv_allocated[one.row]) for one in all_under_way)
        if work >= min(self._chunk, self._budget - whole * self._max_samples):
            return False
        pages = sum(
            cache.pages_for(one.prefill_len) - cache.pages_for(int(start))
            for one, start in zip(under_way, starts, strict=True)
        )
        firsts = [next(scheduler.queue.first(1)), scheduler.queue.oldest(), scheduler.queue.next_turn()]
        if not scheduler.queue.policy.uses_fair_order:
            guest = scheduler.queue.guest({one.flow_key for one in scheduler.rows.requests if one is not None})
            firsts += [guest] if guest is not None else []
        return all(
            self._fits(cache, one, crossing, pages) and not any(self._shares(one, other) for other in all_under_way)
            for one in firsts
        )

    def _fits(self, cache: KVCache, request: Request, decode_pages: int, pages: int) -> bool:
        cached = cache.peek(request.tokens, request.match_limit, request.namespace) // cache.page_size
        paged = [group for group in cache.groups if not isinstance(group, StateGroup)]
        if any(group.pool.num_free < decode_pages + pages for group in paged):
            cached = 0  # pages taken first for running rows may be evicted from this very prefix
        return all(self._fits_into(cache, group, request, cached, decode_pages, pages) for group in cache.groups)

    def _fits_into(
        self, cache: KVCache, group: Group, request: Request, cached: int, decode_pages: int, pages: int
    ) -> bool:
        """For a group with a window: prompts in progress count as for a group without one; the request's own prompt
        counts at most a window and two steps' tokens; and an output at most the window and the page being written, less
        the pages of the row. `cached`: pages of the request's prefix."""
        if isinstance(group, StateGroup):
            return group.available >= 1
        scheduler = self._scheduler
        table = scheduler.rows
        window = group.spec.window
        reach = 0 if window is None else max(cache.pages_for(window - 1), 1)
        kept = cached if window is None else min(cached, reach)
        available = group.available - kept - decode_pages
        needed = cache.pages_for(request.prefill_len) - cached
        if window is not None:
            if min(cache.pages_for(request.prefill_len), 1 + reach) > group.pool.total:
                return False
            steps = 2 * (cache.pages_for(self._chunk) + 1)
            needed = min(needed, min(reach + steps, group.pool.total) - kept)
        rows = np.array(sorted(cache.open_rows), np.int64)
        if len(rows):
            known = np.maximum(table.num_tokens[rows], cache.lengths.kv_allocated[rows]).tolist()
            ends, most = table.total_len[rows].tolist(), None if window is None else (reach + 1) * cache.page_size
            every = [*zip(known, ends, strict=True), (request.prefill_len, request.total_len)]
            lefts = [(max(0, min(end - has, CLIP)), has) for has, end in every]
            output = sum(left if most is None else min(left, max(most - has, 0)) for left, has in lefts)
            needed += pages + cache.pages_for(int(output * scheduler.reserve.ratio))
        return needed <= available

    def _shares(self, request: Request, other: Request) -> bool:
        """Whether they share a prefix that is at least a page longer than the one cached where the `other` runs."""
        cache = self._scheduler.cache.of_row(other.row)
        cached = cache.peek(request.tokens, request.match_limit, request.namespace)
        more = (cached + cache.page_size) * 4
        return request.namespace == other.namespace and request.tokens[:more] == other.tokens[:more]
