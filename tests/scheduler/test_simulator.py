"""Many generated schedules against the oracle."""

from __future__ import annotations

import pytest
from helpers.simulation import simulate


@pytest.mark.timeout(900)
def test_two_thousand_schedules() -> None:
    """They meet what they are about, and not once in a while."""
    met = simulate(2000)
    for event in ("several prompts under way", "retracted for lack of pages", "computed anew", "overtaken"):
        assert met[event] >= 100, met


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_soak() -> None:
    simulate(30_000, steps=60)
