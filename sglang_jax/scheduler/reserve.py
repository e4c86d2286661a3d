"""Room kept free for tokens that running requests may still sample."""

from __future__ import annotations

INITIAL = 0.7
FLOOR = 0.1
DECAY_STEPS = 600
RAISE = 0.2
_DECAY = (INITIAL - FLOOR) / DECAY_STEPS
CLIP = 4096
"""Maximum further tokens expected of one request, since few sample as many as they may."""


class NewTokenReserve:
    """The fraction of the running requests' possible output for which admission keeps room. It decays in steps without
    retractions and rises with each: small enough to fill the pool, large enough that retractions are rare.
    `conservativeness` scales the fraction, not the decay: a retraction is forgotten after the same number of steps."""

    def __init__(self, conservativeness: float = 1.0) -> None:
        self._scale = conservativeness
        self._share = INITIAL

    @property
    def ratio(self) -> float:
        return min(1.0, self._share * self._scale)

    def decay(self) -> None:
        share = self._share - _DECAY
        self._share = share if share > FLOOR else FLOOR

    def raise_ratio(self) -> None:
        self._share = min(1.0, self._share + RAISE)
