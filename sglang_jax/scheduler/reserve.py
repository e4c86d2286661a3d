"""The reserve: room kept free for tokens that running requests may still sample."""

from __future__ import annotations

INITIAL = 0.7
FLOOR = 0.1
DECAY_STEPS = 600
RAISE = 0.2
_DECAY = (INITIAL - FLOOR) / DECAY_STEPS
CLIP = 4096
"""Maximum further tokens expected of one request, since few sample as many as they may."""


class NewTokenReserve:
    """The fraction of the tokens that running requests may still sample that admission keeps free.

    It starts high, decays in steps without retractions, and rises with each retraction: small enough to fill the pool,
    large enough that retractions are rare. `conservativeness` scales the fraction but not the decay: a retraction is
    forgotten after the same number of steps at any value.
    """

    def __init__(self, conservativeness: float = 1.0) -> None:
        self._scale = conservativeness
        self._share = INITIAL

    @property
    def ratio(self) -> float:
        """The fraction, at most 1."""
        return min(1.0, self._share * self._scale)

    def decay(self) -> None:
        """A step ended."""
        share = self._share - _DECAY
        self._share = share if share > FLOOR else FLOOR

    def raise_ratio(self) -> None:
        """A request was retracted."""
        self._share = min(1.0, self._share + RAISE)
