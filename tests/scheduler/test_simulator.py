"""Many generated schedules against the oracle."""

from __future__ import annotations

import pytest
from helpers.simulation import simulate


@pytest.mark.timeout(900)
def test_two_thousand_schedules() -> None:
    simulate(2000)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_soak() -> None:
    simulate(30_000, steps=60)
