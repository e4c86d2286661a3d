"""How much room is kept for tokens that running requests may still sample."""

from __future__ import annotations

INITIAL = 0.7
FLOOR = 0.1
DECAY_STEPS = 600
RAISE = 0.2
_DECAY = (INITIAL - FLOOR) / DECAY_STEPS
CLIP = 4096
"""Most tokens that one request is expected to sample still; few sample all that they may."""


class NewTokenReserve:
    """Share of the tokens still allowed that is kept free at admission.

    Starts high, decays while all goes well, is raised by each retraction: small enough to fill the pool, large enough
    that retractions stay rare. `conservativeness` scales the share, and leaves the times alone: a retraction is
    forgotten after as many steps at any of its values.
    """

    def __init__(self, conservativeness: float = 1.0) -> None:
        self._scale = conservativeness
        self._share = INITIAL

    @property
    def ratio(self) -> float:
        """The share, at most 1."""
        return min(1.0, self._share * self._scale)

    def decay(self) -> None:
        """A step went well."""
        share = self._share - _DECAY
        self._share = share if share > FLOOR else FLOOR

    def raise_ratio(self) -> None:
        """A request had to be retracted."""
        self._share = min(1.0, self._share + RAISE)
