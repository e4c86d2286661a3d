"""Guesses where later prompts will diverge from one that shares little with earlier ones."""

from __future__ import annotations

from collections import deque

STEP_COST = 128
"""What a guess costs, in prompt tokens: it ends a chunk, so a prompt that runs by itself takes one step more."""

_FIRST_TAILS = (64, 256, 1024)
_MAX_TAILS = 8
_MAX_LENGTHS = 4
_MAX_WRONG = 32
"""Wrong guesses in a row after which there are no more."""


class Guesses:
    """Chooses lengths at which the state of a new prompt is worth keeping, although no other prompt has asked for it.

    - The prompts of one workload share an instruction, examples or a document, and end in a private *tail*; most tails
      are about as long. So a guess is as far from a prompt's end as recent prompts diverged from others before theirs;
      before any did, at a few distances (`tails`).
    - Guesses may cost what they have saved, or would have saved where there were none. So prompts that share nothing
      soon have no guesses, until one that could have used one brings them back.
    """

    def __init__(self, page_size: int, *, step_cost: int = STEP_COST, tails: tuple[int, ...] = _FIRST_TAILS) -> None:
        self.step_cost = step_cost
        self._page_size = page_size
        self._first_tails = tails
        self._tails: deque[int] = deque(maxlen=_MAX_TAILS)
        self._most = _MAX_WRONG * step_cost
        self._left = self._most

    @property
    def affordable(self) -> bool:
        return self._left > 0

    def of(self, total: int, known: int) -> tuple[int, ...]:
        """Lengths for a prompt of `total` tokens whose first `known` need no guess: ascending, whole pages, each with
        `step_cost` tokens or more between it and what is before it. None if `known` is half of the prompt: others will
        probably diverge there."""
        lengths: list[int] = []
        before, last_tail = known, 2 * total
        for tail in sorted(self._tails or self._first_tails, reverse=True) if total > 2 * known else ():
            length = (total - tail) // self._page_size * self._page_size
            if 2 * tail <= last_tail and length - before >= self.step_cost and len(lengths) < _MAX_LENGTHS:
                lengths.append(length)
                before, last_tail = length, tail
        return tuple(lengths)

    def pay(self) -> None:
        """A chunk has ended at a guess."""
        self._left -= self.step_cost

    def learn(self, tail: int, saved: int) -> None:
        """A prompt diverged from another one, `tail` tokens before its end. A guess has saved, or could have saved,
        `saved` tokens."""
        if tail > self._page_size:  # otherwise the state at the prompt's end serves
            self._tails.append(tail)
        self._left = min(self._left + saved, self._most)
