"""The simulator on every backend's runner: generated schedules against the dense model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from helpers import stand_in_jax, stand_in_torch
from helpers.fake_capture import FakeCapture
from helpers.scheduling import VOCAB
from helpers.simulated_grammars import GrammarSimulation
from helpers.simulation import simulate
from helpers.stand_in_subject import StandInSubject

from sglang_jax.runner.protocol import Runner

MIN_ACCEPTED = 21
"""Drafts that must be accepted in all schedules of a subject together: with fewer, they would prove nothing."""


def captured_torch_runner(weights: Sequence[np.ndarray], **sizes: Any) -> Runner:
    """Decode steps of up to four rows are replayed; those of five and six are launched one operation at a time."""
    return stand_in_torch.stand_in_runner(weights, capture=FakeCapture(), graph_buckets=(1, 2, 4), **sizes)


# For JAX each page size is a compilation of every program. The last is the window of the second group of layers.
SUBJECTS = {
    "jax, window": (stand_in_jax.stand_in_runner, (4,), 1, 7),
    "torch": (stand_in_torch.stand_in_runner, (1, 4, 16), 1, None),
    "torch captured, window": (captured_torch_runner, (1, 4, 16), 1, 7),
    "jax, drafts": (stand_in_jax.stand_in_runner, (4,), 4, None),
    "torch captured, drafts, window": (captured_torch_runner, (4,), 4, 7),
}


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest) -> Iterator[StandInSubject]:
    make_runner, page_sizes, max_samples, window = SUBJECTS[request.param]
    subject = StandInSubject(make_runner, VOCAB, page_sizes, max_samples, window)
    yield subject
    assert max_samples == 1 or subject.accepted >= MIN_ACCEPTED
    subject.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_generated_schedules(subject: StandInSubject) -> None:
    before = subject.compiles_after_warm_up()
    share = 1 if subject.max_samples == 1 else 2  # other subjects have covered what drafts do not change
    simulate(100 // share, subject=subject)
    simulate(16 // share, subject=subject, kind=GrammarSimulation)
    for _ in range(4):  # rarely, random schedules accept few
        if subject.max_samples == 1 or subject.accepted >= MIN_ACCEPTED:
            break
        simulate(50, subject=subject)
    assert subject.compiles_after_warm_up() == before


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_soak(subject: StandInSubject) -> None:
    simulate(3000, steps=60, subject=subject)
    simulate(1000, steps=60, subject=subject, kind=GrammarSimulation)
