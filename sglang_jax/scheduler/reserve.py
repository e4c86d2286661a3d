"""How much room is kept for tokens that running requests may still draw."""

from __future__ import annotations

INITIAL = 0.7
FLOOR = 0.1
DECAY_STEPS = 600
RAISE = 0.2
CLIP = 4096
"""Most tokens that one request is expected to draw still; few draw all that they may."""


class NewTokenReserve:
    """Share of the tokens still allowed that is kept free at admission.

    Starts high, decays while all goes well, is raised by each retraction: small enough to fill the pool, large enough
    that retractions stay rare.
    """

    def __init__(self, conservativeness: float = 1.0) -> None:
        self._ceiling = min(1.0, INITIAL * conservativeness)
        self._floor = min(FLOOR * conservativeness, self._ceiling)
        self.ratio = self._ceiling

    def decay(self) -> None:
        """A step went well."""
        self.ratio = max(self._floor, self.ratio - (self._ceiling - self._floor) / DECAY_STEPS)

    def raise_ratio(self) -> None:
        """A request had to be retracted."""
        self.ratio = min(1.0, self.ratio + RAISE)
