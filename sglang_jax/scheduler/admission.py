"""Admission: which waiting requests get a row, within the limits of rows, pages, the reserve and the step's tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_jax.mem_cache.data_parallel import AnyCache
from sglang_jax.mem_cache.group import Group
from sglang_jax.mem_cache.lengths import Index
from sglang_jax.mem_cache.radix_tree import Probe
from sglang_jax.scheduler.chunking import PRIORITY_TURN, PrefillWork, goes_by_priority
from sglang_jax.scheduler.prefixes_in_progress import PrefixesInProgress
from sglang_jax.scheduler.request import Request
from sglang_jax.scheduler.reserve import CLIP, NewTokenReserve
from sglang_jax.scheduler.rows import RECLAIMED_AT_ONCE, Rows
from sglang_jax.scheduler.waiting_queue import WaitingQueue

MAX_SHARERS_PASSED = 64
"""Maximum requests skipped in one step because their prefix is being computed."""

SHARER_LOOKS = 4
"""Maximum looks at the queue for which a request waits for a prefix that does not grow."""

RETRY_STEPS = 8
"""Steps after which the queue is looked at again even if nothing was released, because the reserve decays."""

AGED_TURN = 8
"""Every Nth row goes to the oldest waiting request."""

PASSED_TURN = 4
"""Every Nth of the rows that other tenants or higher priorities take goes to the request that is next in the fair
order."""

GUEST_INTERVAL = 2
"""Every Nth row goes to a client request without one, if the other rows go to client requests that have one."""

GUEST_ROWS = 32
"""One of this many rows is reserved for client requests that have no other row."""

BACKFILL_SEATS = 32
BACKFILL_STEPS = 256
"""A request that does not fit is passed by this many later requests, or for this many steps; then room is kept for
it."""

MAX_REFUSALS = 8
"""After this many requests that do not fit, a look continues with those with the least work."""

LEAST_WORK_LOOKS = 8
"""Requests with the least work considered in a step whose tokens are all claimed."""


HELD_PER_COMPUTED = 16
"""A token of a prompt to compute weighs as much as this many tokens of KV that a rank's rows have, when a request gets
a rank: a step waits for the rank that reads the most, but a prompt is computed once."""


@dataclass(frozen=True, slots=True)
class Decisions:
    """The requests that one look removed from the queue: `seated`, in this order, each with pages and in PREFILL; and
    `too_large`, which can never fit and are to be refused."""

    seated: list[Request]
    too_large: list[Request]


_NO_DECISIONS = Decisions([], [])


class Admission:
    """Takes requests from the queue in its order, while the step has unclaimed prompt tokens. After that, it takes only
    requests with less work than the running prompts, because their chunks go first.

    No request or tenant starves: see `AGED_TURN`, `BACKFILL_SEATS`, `PASSED_TURN`. A request is skipped while its next
    page is being computed for another: waiting a step is cheaper than computing the prefix twice.

    Under policies that ignore the fair order, one client request with a thousand prompts could take all rows, so client
    requests without a row, its *guests*, get every second row. Under all policies, one row in `GUEST_ROWS` is reserved
    for guests, because rows may be busy for minutes. While guests hold their reserved rows, the other rows follow the
    fair order; otherwise a tenant that sends one prompt at a time would get every row.

    `background`: whether it is the admission of the background, for whose requests all running prompts claim tokens;
    for others, only those of their own kind do. `short`: whether the last look found no row or pages for a request;
    `short_of_slots`: whether it found no slot of states for one.
    """

    aged_turn = AGED_TURN
    backfill_seats = BACKFILL_SEATS
    backfill_steps = BACKFILL_STEPS

    def __init__(
        self,
        cache: AnyCache,
        rows: Rows,
        queue: WaitingQueue,
        reserve: NewTokenReserve,
        *,
        background: bool = False,
    ) -> None:
        self.short = self.short_of_slots = False
        self._background = background
        self._cache = cache
        self._rows = rows
        self._queue = queue
        self._reserve = reserve
        self._guest_rows = len(rows.requests) // GUEST_ROWS
        self._younger_seats = 0
        self._seats_past_guests = 0
        self._seats_past_turn = 0
        self._seats_by_priority = 0

    @property
    def queue(self) -> WaitingQueue:
        return self._queue

    def admit(self, allowance: int, step: int, most: int = sys.maxsize) -> Decisions:
        """Decides which requests, at most `most`, start in step `step`, which may compute `allowance` prompt tokens."""
        if allowance <= 0:
            self.short = False
            return _NO_DECISIONS
        if not self._cache.num_free_rows:
            self.short = not self._rows.num_leaving
            return _NO_DECISIONS
        if not self._queue.worth_a_look():
            return _NO_DECISIONS
        self.short = self.short_of_slots = False
        by_priority = goes_by_priority(step) and self._seats_by_priority < PRIORITY_TURN - 1
        claiming = [one for one in self._rows.prefilling if self._background or not one.background]
        look = _Look(self._cache, self._rows, self._reserve, claiming, step, allowance, by_priority=by_priority)
        for request in self._candidates(look):
            if not self._cache.num_free_rows and not self._reclaim():
                self.short = True
                break
            guest = self._row_recipient(request, look)
            if guest is None:
                self.short = True
                break
            if not self._consider(guest, look) or len(look.seated) >= most:
                break
        if not look.seated:
            # The next look is in a step that ignores priorities.
            self._queue.pause((PRIORITY_TURN - 2 - step) % PRIORITY_TURN or RETRY_STEPS - 1)
        elif self._queue:
            look.in_progress.note_sharers(look.seated, self._queue.front(MAX_SHARERS_PASSED))
        return Decisions(look.seated, look.too_large)

    def _row_recipient(self, request: Request, look: _Look) -> Request | None:
        """The request that gets a row when `request` is next: `request` itself, unless only rows for guests are left
        and its client request has a row. Then it is the first guest; None if all were considered. Requests without a
        flow's name, as of a script's engine, do not compete with guests."""
        if request is look.aged or not request.flow_key[1] or request.flow_key not in look.flows:
            return request
        while (kept := self._guest_rows) >= (free := self._cache.num_free_rows):
            if kept - look.count_guests() < free:
                break
            if not self._reclaim():
                guest = self._queue.guest(look.flows)
                if guest is None or not look.try_once(guest):
                    return None
                look.guest = guest
                return guest
        return request

    def _reclaim(self) -> bool:
        return self._rows.release(RECLAIMED_AT_ONCE) > 0

    def _candidates(self, look: _Look) -> Iterator[Request]:
        """Waiting requests in the order in which to consider them, each once; the oldest whenever it is due. The
        queue's orders may still contain requests that this look has removed."""
        queue = self._queue
        reach = self._cache.num_free_rows + len(self._cache.open_rows) + MAX_SHARERS_PASSED
        for request in self._by_order(look, reach):
            for one in (self._passed(request), self._guest(request, look), request):
                while self._younger_seats >= self.aged_turn - 1 and queue and self._oldest_is_due(queue.oldest(), look):
                    look.aged = queue.oldest()
                    look.try_once(look.aged)
                    yield look.aged
                if one is not None and one.waiting.queued and look.try_once(one):
                    yield one

    def _passed(self, request: Request) -> Request | None:
        """The request that is next in the fair order, if `request` would overtake it and enough others have."""
        queue = self._queue
        if self._seats_past_turn < PASSED_TURN - 1 or not queue:
            return None
        next_turn = queue.next_turn()
        return next_turn if queue.passes(request, next_turn) else None

    def _guest(self, request: Request, look: _Look) -> Request | None:
        """The first guest in the fair order, if the client request of `request` has a row and a guest is due."""
        if (
            self._queue.policy.uses_fair_order
            or self._seats_past_guests < GUEST_INTERVAL - 1
            or request.flow_key not in look.flows
        ):
            return None
        return self._queue.guest(look.flows)

    @staticmethod
    def _oldest_is_due(oldest: Request, look: _Look) -> bool:
        """Whether this look has neither considered the oldest request as such nor found that it does not fit. It may
        have been skipped because of a prefix: when it is due, it does not wait for one."""
        return oldest is not look.aged and oldest not in look.refused

    def _by_order(self, look: _Look, reach: int) -> Iterator[Request]:
        """Requests in the order of the policy while the step has unclaimed tokens and few do not fit; then requests
        with less work than those that claimed the tokens."""
        if not look.fully_claimed:
            for request in self._queue.first(reach):
                yield request
                if look.fully_claimed or len(look.refused) >= MAX_REFUSALS:
                    break
            else:
                return
        for request in self._queue.front(LEAST_WORK_LOOKS // 2):
            self._queue.update_work(request)
        for by_priority in (True,) if look.by_priority else (False, True):
            for request in self._queue.least_work(LEAST_WORK_LOOKS, by_priority=by_priority):
                if look.work.ahead_of(request, request.waiting.work) >= look.allowance:
                    break
                yield request
        if self._younger_seats >= self.aged_turn - 1 and self._queue:
            yield self._queue.oldest()

    def _consider(self, request: Request, look: _Look) -> bool:
        """Seats, skips or refuses a request; False if the look at the queue ends."""
        if self._cache.too_small_for(request.prefill_len) is not None:
            self._queue.remove(request)
            look.too_large.append(request)
            return True
        probes = self._probes(request, look)
        if request is not look.aged and self._should_wait(request, probes[0], look):
            look.skipped += 1
            return look.skipped < MAX_SHARERS_PASSED
        while (probe := look.first_that_fits(request, probes)) is None:
            if not (self._reclaim() or self._release_a_session(request, probes, look)):
                return self._note_refusal(request, probes[0], look)
            probes = self._probes(request, look)
        self._seat(request, probe, look)
        for refused in look.refused:
            refused.waiting.overtaken_by += 1
        return not any(self._keeps_room(refused, look.step) for refused in look.refused)

    def _probes(self, request: Request, look: _Look) -> list[Probe]:
        """The prefixes from which the request may start, one of each rank with a free row; the best rank first, by the
        tokens to compute there, less those that another prompt is about to cache, and by its load."""
        bookmark = request.waiting.bookmark
        probes = self._cache.probes(request.tokens, request.match_limit, request.namespace, bookmark)
        if len(probes) == 1:
            return probes

        def cost(probe: Probe) -> tuple[int, int]:
            left = request.prefill_len - look.in_progress.length_of(request, probe)
            load = self._cache.load_of(probe.rank)
            return left + load // HELD_PER_COMPUTED, load

        return sorted(probes, key=cost)

    def _release_a_session(self, request: Request, probes: list[Probe], look: _Look) -> bool:
        own = None if request.turn is None else request.turn.session.pin
        for probe in probes:
            pins = self._cache.ranks[probe.rank].pins
            if pins.held and look.fits(request, probe, without_sessions=True):
                return pins.relieve(look.short(request, probe), own)
        return False

    def _seat(self, request: Request, probe: Probe, look: _Look) -> None:
        oldest, next_turn = self._queue.oldest(), self._queue.next_turn()
        if request is next_turn:
            self._seats_past_turn = 0
        elif self._queue.passes(request, next_turn):
            self._seats_past_turn += 1
        least_work = next(self._queue.least_work(1, by_priority=False))
        if not look.by_priority:
            self._seats_by_priority = 0
        elif look.fully_claimed and request.priority > least_work.priority:
            self._seats_by_priority += 1
        self._queue.seat(request)
        request.waiting.as_guest = request is look.guest
        self._younger_seats = 0 if request is oldest else self._younger_seats + 1
        self._seats_past_guests = self._seats_past_guests + 1 if request.flow_key in look.flows else 0
        self._rows.open(request, probe)
        look.add(request, probe)

    def _note_refusal(self, request: Request, probe: Probe, look: _Look) -> bool:
        if request.waiting.refused_at is None:
            request.waiting.refused_at = look.step
        self.short = True
        self.short_of_slots = self.short_of_slots or any(not group.grows for group in look.short(request, probe))
        look.refused.append(request)
        return not self._keeps_room(request, look.step)

    def _keeps_room(self, request: Request, step: int) -> bool:
        waiting = request.waiting
        if waiting.refused_at is None:
            return False
        return waiting.overtaken_by >= self.backfill_seats or step - waiting.refused_at >= self.backfill_steps

    def _should_wait(self, request: Request, probe: Probe, look: _Look) -> bool:
        """Whether more of this prompt is about to be computed for another request."""
        if not self._cache.reuse or not look.in_progress.will_serve(request, probe):
            return False
        waiting = request.waiting
        waiting.idle_looks = 0 if probe.length > waiting.seen else waiting.idle_looks + 1
        waiting.seen = probe.length
        return waiting.idle_looks <= SHARER_LOOKS


class _Look:
    def __init__(
        self,
        cache: AnyCache,
        rows: Rows,
        reserve: NewTokenReserve,
        claiming: list[Request],
        step: int,
        allowance: int,
        *,
        by_priority: bool,
    ) -> None:
        self._cache = cache
        self._rows = rows
        self._ratio = reserve.ratio
        self._prompts = tuple(rows.prefilling)
        self.in_progress = PrefixesInProgress(cache, rows.prefilling)
        self.step = step
        self.allowance = allowance
        self.by_priority = by_priority
        self.work = PrefillWork(claiming, by_priority=by_priority)
        self.seated: list[Request] = []
        self.too_large: list[Request] = []
        self.refused: list[Request] = []
        self.skipped = 0
        self.aged: Request | None = None
        self.guest: Request | None = None
        self.flows = {request.flow_key for request in rows.requests if request is not None}
        self._tried: set[int] = set()
        self._rooms = [[_Room(group) for group in one.groups] for one in cache.ranks]
        self._counted: set[int] = set()

    @property
    def fully_claimed(self) -> bool:
        """Whether running prompts claim all tokens of the step."""
        return self.work.total >= self.allowance

    def count_guests(self) -> int:
        """Requests in rows reserved for guests."""
        return sum([one.waiting.as_guest for one in (*self._rows.requests, *self.seated) if one is not None])

    def try_once(self, request: Request) -> bool:
        """Notes that a request is considered; False if it was before."""
        first = request.id not in self._tried
        self._tried.add(request.id)
        return first

    def fits(self, request: Request, probe: Probe, *, without_sessions: bool = False) -> bool:
        """Whether every group has room for a request, the running requests and the reserve for the output of all;
        `without_sessions`: by estimate, if sessions kept no pages."""
        rooms, ratio = self._rooms[probe.rank], self._ratio_now(probe.rank)
        return all(room.fits(request, probe, ratio, without_sessions=without_sessions) for room in rooms)

    def first_that_fits(self, request: Request, probes: list[Probe]) -> Probe | None:
        return next((probe for probe in probes if self.fits(request, probe)), None)

    def short(self, request: Request, probe: Probe) -> list[Group]:
        ratio = self._ratio_now(probe.rank)
        return [room.group for room in self._rooms[probe.rank] if not room.fits(request, probe, ratio)]

    def _ratio_now(self, rank: int) -> float:
        """The reserved fraction of the output of all requests of a rank, whose needs are counted on the first call; 0
        if none runs."""
        if not self._cache.ranks[rank].open_rows:
            return 0.0
        if rank not in self._counted:
            self._count(rank)
        return self._ratio

    def add(self, request: Request, probe: Probe) -> None:
        self.seated.append(request)
        self.flows.add(request.flow_key)
        self.work.add(request, request.prefill_len - probe.length)
        for room in self._rooms[probe.rank]:
            room.add(request)
        self.in_progress.add(request)

    def _count(self, rank: int) -> None:
        """Counts the further needs of a rank's requests that had rows before this look and have not ended."""
        every, cache = self._rows, self._cache
        rows, prompts = np.nonzero(every.active)[0], self._prompts
        if len(cache.ranks) > 1:
            rows = rows[rows // (len(every.active) // len(cache.ranks)) == rank]
            prompts = tuple([one for one in prompts if cache.of_row(one.row).rank == rank])
        known = np.maximum(every.num_tokens[rows], self._cache.lengths.kv_allocated[rows])
        left = np.minimum(every.total_len[rows] - known, CLIP).clip(0)
        for room in self._rooms[rank]:
            room.count(known, left, prompts)
        self._counted.add(rank)


class _Room:
    """The claims on one group's pages: pages of running prompts, and tokens of output that may be sampled."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._pages = 0
        self._output = 0

    def count(self, known: Index, left: Index, in_progress: Sequence[Request]) -> None:
        """Adds the rest of the prompts `in_progress`, and rows `[rows]` with `known` tokens that may sample `left`
        more."""
        self._output += self.group.output_need(known, left)
        self._pages += sum([self.group.rest_need(request.prefill_len, request.row) for request in in_progress])

    def add(self, request: Request) -> None:
        length = request.prefill_len
        self._pages += self.group.rest_need(length, request.row)
        self._output += self._output_of(request, length)

    def fits(self, request: Request, probe: Probe, ratio: float, *, without_sessions: bool = False) -> bool:
        """Whether one more request fits, with the fraction `ratio` of the possible output kept free (0 if none
        runs)."""
        group, length = self.group, request.prefill_len
        needed = group.prompt_need(length, probe.length) + self._pages
        if ratio:
            needed += group.pages_for(int((self._output + self._output_of(request, length)) * ratio))
        return needed <= (group.available_without_sessions if without_sessions else group.available_beside)(probe)

    def _output_of(self, request: Request, length: int) -> int:
        return self.group.output_need(length, min(request.total_len - length, CLIP))
