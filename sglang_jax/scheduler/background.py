"""Requests in the background, such as lines of batches: they get rows that no other request waits for, and give them
back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sglang_jax.scheduler.admission import Admission, Decisions
from sglang_jax.scheduler.finisher import Finisher
from sglang_jax.scheduler.request import Request
from sglang_jax.scheduler.rows import Rows

BACKGROUND_TURN = 64
"""Every Nth row goes to a request in the background, if one waits, but to one at a time."""

TURN_STEPS = 256
"""Steps for which a request whose turn it is lets others use the room in which it does not fit. Then room is kept."""


class Background:
    """Divides rows and pages between requests whose clients wait and those in the background.

    The background gets rows only in a step in which no other request is queued. If one is queued later and finds no row
    or pages, requests in the background are retracted, the newest first: one in the first step, then twice as many in
    each. They keep their output.

    So that they end, whatever others ask for: after `turn` - 1 rows that others got while the background waited, it
    gets one. The request with that row is not retracted for others to be admitted.

    `others`, `own`: the admission of each kind.
    """

    turn = BACKGROUND_TURN
    turn_steps = TURN_STEPS

    def __init__(self, others: Admission, own: Admission, rows: Rows, finisher: Finisher) -> None:
        self._others = others
        self._own = own
        self._rows = rows
        self._finisher = finisher
        self._rows_of_others = 0
        self._due_since: int | None = None
        self._to_retract = 1

    def decisions(self, step: int, allowance: Callable[[], int]) -> Iterator[Decisions]:
        """Yields what to admit in a step, each decision after the one before was carried out. `allowance`: the prompt
        tokens of the step."""
        if self._has_turn(step):
            decisions = self._own.admit(allowance(), step, most=1)
            for request in decisions.seated:
                request.waiting.in_turn = True
                self._rows_of_others, self._due_since = 0, None
            yield decisions
            if self._due_since is not None and step - self._due_since >= self.turn_steps:
                return  # room is kept
        if self._others.queue:
            decisions = self._others.admit(allowance(), step)
            if self._own.queue:
                self._rows_of_others += len(decisions.seated)
            yield decisions
        if self._own.queue and not self._others.queue:
            yield self._own.admit(allowance(), step)

    def _has_turn(self, step: int) -> bool:
        if self._rows_of_others < self.turn - 1 or not self._own.queue or not self._others.queue:
            self._due_since = None
            return False
        if self._due_since is None:
            self._due_since = step
        return not any(request.waiting.in_turn for request in self._running())

    @property
    def short_of_slots(self) -> bool:
        """Whether a waiting request found no slot of states in the last look."""
        return any(one.short_of_slots for one in (self._others, self._own) if one.queue)

    def must_give_back(self) -> bool:
        """Whether another request found no room in the last look, and there are requests to retract."""
        if self._others.short and self._others.queue and any(self._retractable()):
            return True
        self._to_retract = 1
        return False

    def give_back(self) -> None:
        """Retracts some requests. No step may be in flight."""
        newest = sorted(self._retractable(), key=lambda request: request.sequence, reverse=True)
        for request in newest[: self._to_retract]:
            self._finisher.take_row(request)
        self._to_retract *= 2

    def _running(self) -> Iterator[Request]:
        for request in self._rows.requests:
            if request is not None and request.background and self._rows.runs(request):
                yield request

    def _retractable(self) -> Iterator[Request]:
        return (request for request in self._running() if not request.waiting.in_turn)
