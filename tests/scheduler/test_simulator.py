"""Many generated schedules against the oracle."""

from __future__ import annotations

import pytest
from helpers.simulated_conversations import ConversationSimulation
from helpers.simulated_doubt import DoubtSimulation, ShortenedSimulation
from helpers.simulated_grammars import GrammarSimulation
from helpers.simulated_sessions import SessionSimulation
from helpers.simulation import POOLINGS, PoolingSimulation, Simulation, Strategy, simulate
from hypothesis import strategies as st

from sglang_jax.config import SchedulePolicy

PREFIXES_STAY: dict[str, Strategy] = {
    "pages": st.integers(8, 24),
    "siblings": st.integers(8, 24),
    "reuse": st.just(True),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_schedules() -> None:
    """Each situation that the schedules are for occurs often enough. `make soak` runs many more."""
    schedules = 240
    met = simulate(schedules)
    for event in (
        "several prompts under way",
        "several tokens of a row in a step",
        "retracted for lack of pages",
        "an output to the context",
        "said not to fit",
        "computed anew",
        *(f"overtaken under {policy}" for policy in SchedulePolicy),
        "began with a copy of a state",
        "second slots",
        "guessed states",
    ):
        assert met[event] >= schedules // 20, met


def test_schedules_with_grammars() -> None:
    met = simulate(60, kind=GrammarSimulation)
    assert met["under a grammar"] >= 10, met


@pytest.mark.slow
def test_schedules_with_kv_in_doubt() -> None:
    """With room for prefixes, where KV stays unvalidated; `make soak` runs schedules of all sizes."""
    met = simulate(50, kind=DoubtSimulation, sizes=PREFIXES_STAY)
    assert met["computed anew"] >= 10, met


def test_schedules_with_vectors_and_scores() -> None:
    simulate(40, kind=PoolingSimulation, sizes=POOLINGS)
    met = simulate(30, kind=PoolingSimulation)
    assert met["scores of tokens"] >= 2, met


@pytest.mark.parametrize("kind", [ShortenedSimulation, ConversationSimulation])
def test_schedules_that_find_planted_faults_pass_without_them(kind: type[Simulation]) -> None:
    simulate(40, kind=kind)


EVERY_KIND = [
    Simulation,
    GrammarSimulation,
    DoubtSimulation,
    ShortenedSimulation,
    ConversationSimulation,
    SessionSimulation,
    PoolingSimulation,
]


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_soak(kind: type[Simulation]) -> None:
    simulate(30_000, steps=60, kind=kind, sizes=POOLINGS if kind is PoolingSimulation else {})
