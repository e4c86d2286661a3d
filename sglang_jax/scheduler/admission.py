"""Gives rows to waiting requests, as far as rows, pages, the reserve and the step's tokens allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_jax.mem_cache.group import Group
from sglang_jax.mem_cache.kv_cache import KVCache
from sglang_jax.mem_cache.lengths import Index
from sglang_jax.mem_cache.radix_tree import Probe
from sglang_jax.scheduler.chunking import PRIORITY_TURN, PrefillWork, goes_by_priority
from sglang_jax.scheduler.request import Request
from sglang_jax.scheduler.reserve import CLIP, NewTokenReserve
from sglang_jax.scheduler.rows import RECLAIMED_AT_ONCE, Rows
from sglang_jax.scheduler.sharing import UnderWay
from sglang_jax.scheduler.waiting_queue import WaitingQueue

MAX_SHARERS_PASSED = 64
"""Requests that may be passed over in one step because a prefix of theirs is being computed."""

SHARER_LOOKS = 4
"""A request waits for a prefix that is being computed for this many looks in which it does not grow."""

RETRY_STEPS = 8
"""A refused request is tried again after this many steps even if nothing was released: the reserve decays."""

AGED_TURN = 8
"""Of so many rows given while the oldest request waits, the last goes to it."""

PASSED_TURN = 4
"""Of so many rows given past a request whose turn it is, to other tenants or to higher priorities, the last goes to
it."""

GUEST_TURN = 2
"""Of so many rows given while client requests wait that have none, the last goes to one of them, if the others would go
to such as have one."""

GUEST_ROWS = 32
"""Of so many rows one is kept for client requests that have none: others leave it free until one of these has it."""

BACKFILL_SEATS = 32
BACKFILL_STEPS = 256
"""So many requests, and for so many steps, may be given room past one that does not fit; then room is kept for it."""

MAX_REFUSALS = 8
"""Requests that do not fit, after which a look at the queue goes on with those that have the least work."""

LEAST_WORK_LOOKS = 8
"""Requests with the least work that are looked at in a step whose tokens are all spoken for."""


@dataclass(frozen=True, slots=True)
class Decisions:
    """What one look at the queue decided, and whom it took out of it: who starts, in this order, each with memory and
    in PREFILL; and who can never fit, and is to be told."""

    seated: list[Request]
    too_large: list[Request]


_NOBODY = Decisions([], [])


class Admission:
    """Takes requests from the queue in its order, while the step has tokens for them; once it has none, those that have
    less work than the prompts under way, as a chunk of theirs goes first.

    Nobody starves. While the oldest request waits, every `AGED_TURN`-th row is its own. One that does not fit lets
    others into room that it cannot use, for a bounded number of them and of steps; then room is kept for it.

    Nor does a tenant. Higher priorities, and prompts with less work, go before a request of another tenant whose turn
    it is, or of lower priority, for a bounded number of rows (`PASSED_TURN`).

    A request whose prompt goes on like one that is being computed is passed over until that prefix is in the tree:
    computing it once and waiting a step is cheaper than computing it twice.

    Under policies that do not mind turns, a client request of a thousand prompts could have all rows for as long as it
    likes: those that have no row are its *guests*, and are given every other one. And under all policies, a row in
    `GUEST_ROWS` is for guests alone, as those that a large client request has may be busy for minutes. While guests
    have theirs, all others are had by turns: else who comes with one prompt at a time would be given every row.
    """

    aged_turn = AGED_TURN
    backfill_seats = BACKFILL_SEATS
    backfill_steps = BACKFILL_STEPS

    def __init__(
        self,
        cache: KVCache,
        rows: Rows,
        queue: WaitingQueue,
        reserve: NewTokenReserve,
    ) -> None:
        self._cache = cache
        self._rows = rows
        self._queue = queue
        self._reserve = reserve
        self._guest_rows = len(rows.requests) // GUEST_ROWS
        self._younger_seats = 0
        self._seats_past_guests = 0
        self._seats_past_turn = 0
        self._seats_by_priority = 0

    def admit(self, allowance: int, step: int) -> Decisions:
        """Decides who starts. `allowance`: prompt tokens that the step may compute; `step`: its number."""
        if allowance <= 0 or not self._cache.num_free_rows or not self._queue.worth_a_look():
            return _NOBODY
        by_priority = goes_by_priority(step) and self._seats_by_priority < PRIORITY_TURN - 1
        look = _Look(self._cache, self._rows, self._reserve, step, allowance, by_priority=by_priority)
        for request in self._candidates(look):
            if not self._cache.num_free_rows and not self._reclaim():
                break
            guest = self._instead_of(request, look)
            if guest is None or not self._consider(guest, look):
                break
        if not look.seated:
            # The next look is in a step in which priorities do not count.
            self._queue.pause((PRIORITY_TURN - 2 - step) % PRIORITY_TURN or RETRY_STEPS - 1)
        elif self._queue:
            look.under_way.note_sharers(look.seated, self._queue.front(MAX_SHARERS_PASSED))
        return Decisions(look.seated, look.too_large)

    def _instead_of(self, request: Request, look: _Look) -> Request | None:
        """Who may have a row if `request` is next: itself, unless only those for guests are left and its client request
        has one; then the first guest, None if there is none that was not looked at. Requests without a client's name,
        as those of a script's engine, are nobody's rivals."""
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
        """Takes rows of requests that are over; False if there are none to be had."""
        return self._rows.release(RECLAIMED_AT_ONCE) > 0

    def _candidates(self, look: _Look) -> Iterator[Request]:
        """Waiting requests in the order in which to look at them, each once: an order may tell of such as this look has
        taken out of the queue since. The oldest comes whenever it is its turn."""
        queue = self._queue
        reach = self._cache.num_free_rows + len(self._cache.open_rows) + MAX_SHARERS_PASSED
        for request in self._by_order(look, reach):
            for one in (self._passed(request), self._guest(request, look), request):
                while self._younger_seats >= self.aged_turn - 1 and queue and self._has_its_turn(queue.oldest(), look):
                    look.aged = queue.oldest()
                    look.try_once(look.aged)
                    yield look.aged
                if one is not None and one.waiting.queued and look.try_once(one):
                    yield one

    def _passed(self, request: Request) -> Request | None:
        """Whose turn it is, if `request` would go before it and so many have done so."""
        queue = self._queue
        if self._seats_past_turn < PASSED_TURN - 1 or not queue:
            return None
        next_turn = queue.next_turn()
        return next_turn if queue.passes(request, next_turn) else None

    def _guest(self, request: Request, look: _Look) -> Request | None:
        """Who goes before `request`, as it has no row and the client request of this one has: the first by turns, for
        every so many."""
        if self._queue.minds_turns or self._seats_past_guests < GUEST_TURN - 1 or request.flow_key not in look.flows:
            return None
        return self._queue.guest(look.flows)

    @staticmethod
    def _has_its_turn(oldest: Request, look: _Look) -> bool:
        """False once this look gave the oldest its turn, or found that it does not fit. That it was passed over, for
        the sake of a prefix, does not count: the turn is given without waiting for one."""
        return oldest is not look.aged and oldest not in look.refused

    def _by_order(self, look: _Look, reach: int) -> Iterator[Request]:
        """By policy while the step has tokens that nobody has claimed, and not too many do not fit; then those with
        less work than who has claimed them."""
        if not look.spoken_for:
            for request in self._queue.first(reach):
                yield request
                if look.spoken_for or len(look.refused) >= MAX_REFUSALS:
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
        """Seats a request, passes it over or refuses it; False where the look at the queue is over."""
        if self._cache.too_small_for(request.prefill_len) is not None:
            self._queue.remove(request)
            look.too_large.append(request)
            return True
        probe = self._probe(request)
        if request is not look.aged and self._should_wait(request, probe, look):
            look.passed += 1
            return look.passed < MAX_SHARERS_PASSED
        while not look.fits(request, probe):
            if not (self._reclaim() or self._let_a_session_go(request, probe, look)):
                return self._note_refusal(request, look)
            probe = self._probe(request)
        self._seat(request, probe, look)
        for refused in look.refused:
            refused.waiting.passed += 1
        return not any(self._keeps_room(refused, look.step) for refused in look.refused)

    def _probe(self, request: Request) -> Probe:
        bookmark = request.waiting.bookmark
        return self._cache.probe(request.tokens, request.match_limit, request.namespace, bookmark)

    def _let_a_session_go(self, request: Request, probe: Probe, look: _Look) -> bool:
        """Takes back what the oldest idle session keeps; False if a request would not fit even without any."""
        pins = self._cache.pins
        if not pins.held or not look.fits(request, probe, without_sessions=True):
            return False
        own = None if request.turn is None else request.turn.session.pin
        return pins.relieve(look.short(request, probe), own)

    def _seat(self, request: Request, probe: Probe, look: _Look) -> None:
        oldest, next_turn = self._queue.oldest(), self._queue.next_turn()
        if request is next_turn:
            self._seats_past_turn = 0
        elif self._queue.passes(request, next_turn):
            self._seats_past_turn += 1
        least_work = next(self._queue.least_work(1, by_priority=False))
        if not look.by_priority:
            self._seats_by_priority = 0
        elif look.spoken_for and request.priority > least_work.priority:
            self._seats_by_priority += 1
        self._queue.seat(request)
        request.waiting.as_guest = request is look.guest
        self._younger_seats = 0 if request is oldest else self._younger_seats + 1
        self._seats_past_guests = self._seats_past_guests + 1 if request.flow_key in look.flows else 0
        self._rows.open(request, probe)
        look.add(request, probe)

    def _note_refusal(self, request: Request, look: _Look) -> bool:
        if request.waiting.refused_at is None:
            request.waiting.refused_at = look.step
        look.refused.append(request)
        return not self._keeps_room(request, look.step)

    def _keeps_room(self, request: Request, step: int) -> bool:
        """True for a request that has let others pass for long enough."""
        waiting = request.waiting
        if waiting.refused_at is None:
            return False
        return waiting.passed >= self.backfill_seats or step - waiting.refused_at >= self.backfill_steps

    def _should_wait(self, request: Request, probe: Probe, look: _Look) -> bool:
        """True where more of this prompt is about to be computed for somebody else."""
        if not self._cache.reuse or not look.under_way.will_serve(request, probe):
            return False
        waiting = request.waiting
        waiting.idle_looks = 0 if probe.length > waiting.seen else waiting.idle_looks + 1
        waiting.seen = probe.length
        return waiting.idle_looks <= SHARER_LOOKS


class _Look:
    """What one look at the queue adds up: pages spoken for, tokens of the step, whom it met."""

    def __init__(
        self,
        cache: KVCache,
        rows: Rows,
        reserve: NewTokenReserve,
        step: int,
        allowance: int,
        *,
        by_priority: bool,
    ) -> None:
        self._cache = cache
        self._rows = rows
        self._ratio = reserve.ratio
        self._prompts = tuple(rows.prefilling)
        self.under_way = UnderWay(cache, rows.prefilling)
        self.step = step
        self.allowance = allowance
        self.by_priority = by_priority
        self.work = PrefillWork(rows.prefilling, by_priority=by_priority)
        self.seated: list[Request] = []
        self.too_large: list[Request] = []
        self.refused: list[Request] = []
        self.passed = 0
        self.aged: Request | None = None
        self.guest: Request | None = None
        self.flows = {request.flow_key for request in rows.requests if request is not None}
        self._tried: set[int] = set()
        self._rooms = [_Room(group) for group in cache.groups]
        self._counted = False

    @property
    def spoken_for(self) -> bool:
        """Whether prompts under way can use all tokens of the step."""
        return self.work.total >= self.allowance

    def count_guests(self) -> int:
        """Requests that have a row which is for guests."""
        return sum([one.waiting.as_guest for one in (*self._rows.requests, *self.seated) if one is not None])

    def try_once(self, request: Request) -> bool:
        """Notes that a request is looked at; False if it was before."""
        first = request.id not in self._tried
        self._tried.add(request.id)
        return first

    def fits(self, request: Request, probe: Probe, *, without_sessions: bool = False) -> bool:
        """Whether every group has room for a request, beside what runs and the share kept for the output of all; or
        would have, as far as can be told, if sessions kept nothing."""
        ratio = self._ratio_now()
        return all(room.fits(request, probe, ratio, without_sessions=without_sessions) for room in self._rooms)

    def short(self, request: Request, probe: Probe) -> list[Group]:
        """The groups that have no room for it."""
        ratio = self._ratio_now()
        return [room.group for room in self._rooms if not room.fits(request, probe, ratio)]

    def _ratio_now(self) -> float:
        """The share kept for the output of all, with what they take counted; 0 where nobody runs."""
        if not self._cache.open_rows:
            return 0.0
        if not self._counted:
            self._count()
        return self._ratio

    def add(self, request: Request, probe: Probe) -> None:
        """A request was given a row."""
        self.seated.append(request)
        self.flows.add(request.flow_key)
        self.work.add(request, request.prefill_len - probe.length)
        for room in self._rooms:
            room.add(request)
        self.under_way.add(request)

    def _count(self) -> None:
        """What those take still that had rows before this look, and are not over."""
        every = self._rows
        rows = np.nonzero(every.active)[0]
        known = np.maximum(every.num_tokens[rows], self._cache.lengths.kv_allocated[rows])
        left = np.minimum(every.total_len[rows] - known, CLIP).clip(0)
        for room in self._rooms:
            room.count(known, left, self._prompts)
        self._counted = True


class _Room:
    """What is spoken for of one group's pages: `pages` by prompts under way, `output` in tokens that may be sampled."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._pages = 0
        self._output = 0

    def count(self, known: Index, left: Index, under_way: Sequence[Request]) -> None:
        """Adds rows with `known` tokens that may sample `left` more, `[rows]` each, and the rest of prompts."""
        self._output += self.group.output_need(known, left)
        self._pages += sum([self.group.rest_need(request.prefill_len, request.row) for request in under_way])

    def add(self, request: Request) -> None:
        """Adds a request that was given a row."""
        length = request.prefill_len
        self._pages += self.group.rest_need(length, request.row)
        self._output += self._output_of(request, length)

    def fits(self, request: Request, probe: Probe, ratio: float, *, without_sessions: bool = False) -> bool:
        """Whether there is room for one more, where `ratio` of what may be sampled is kept free; 0 where nobody
        runs. `without_sessions`: as though nothing were kept for them."""
        group, length = self.group, request.prefill_len
        needed = group.prompt_need(length, probe.length) + self._pages
        if ratio:
            needed += group.pages_for(int((self._output + self._output_of(request, length)) * ratio))
        return needed <= (group.available_without_sessions if without_sessions else group.available_beside)(probe)

    def _output_of(self, request: Request, length: int) -> int:
        return self.group.output_need(length, min(request.total_len - length, CLIP))
