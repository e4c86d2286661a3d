"""The simulator with conversations that resume where a state was kept.

A separate machine: hypothesis seeds a machine's schedules by its source, and those that find the faults planted
elsewhere must not change.
"""

from __future__ import annotations

from helpers.simulation import FAMILIES, Simulation
from hypothesis import strategies as st
from hypothesis.stateful import rule

MAX_STEPS = 24
"""Maximum number of steps to wait for an answer."""


class ConversationSimulation(Simulation):
    """See `Simulation`. A second turn comes as soon as the first has ended, before its cached tokens are evicted."""

    @rule(
        family=st.sampled_from(FAMILIES),
        length=st.integers(1, 12),
        new_tokens=st.integers(2, 16),
        stop=st.sampled_from([(), tuple(range(2, 8))]),
    )
    def converse(self, family: tuple[int, ...], length: int, new_tokens: int, stop: tuple[int, ...]) -> None:
        prompt = list(family[:length])
        self.add((), 0, prompt, new_tokens, 1, True, None, stop, not stop, -1, -1)
        before = self.live[-1]
        for _ in range(MAX_STEPS):
            if before in self.bench.channel.finished:
                break
            self.watch.step()
        if before in self.ended():
            prompt += [*self.bench.channel.output(before), 1 + length]
            self.add((), 0, prompt, 4, 1, True, None, (), True, -1, -1)
