"""The simulator with KV that stays unvalidated: a bad step writes it, and the request that wrote it ends before it
samples.

A separate machine: hypothesis seeds a machine's schedules by its source, and those that find the faults planted
elsewhere must not change.
"""

from __future__ import annotations

from helpers.simulation import FAMILIES, Simulation
from hypothesis import strategies as st
from hypothesis.stateful import rule

from sglang_jax.mem_cache.group import FullGroup, WindowGroup


class DoubtSimulation(Simulation):
    """See `Simulation`. Requests for all logprobs of their prompt recompute it, whatever is cached, and do not wait for
    a prefix."""

    @rule(family=st.sampled_from(FAMILIES), length=st.integers(2, 40), more=st.integers(1, 3))
    def score_what_is_in_doubt(self, family: tuple[int, ...], length: int, more: int) -> None:
        """A request that is switched to the unvalidated copy at the launch of its last chunk has read its own copy: its
        first sample validates nothing."""
        prompt = [*family[:length]][: self.bench.context - 6]
        self._leave_in_doubt(prompt)
        self._score([*prompt, *[7] * more])
        for _ in range(3):
            self.watch.step()
        self._add_one([*prompt, 8])

    @rule(family=st.sampled_from(FAMILIES), length=st.integers(2, 40), short=st.integers(1, 24))
    def begin_within_what_is_in_doubt(self, family: tuple[int, ...], length: int, short: int) -> None:
        """A node is validated, loses the head of its windows, and gets a new one from a bad step. It is validated again
        at its end, and then split where another request starts, within the unvalidated part."""
        prompt = [*family[:length]][: self.bench.context - 3]
        self._leave_the_head_in_doubt(prompt, min(short, len(prompt)))
        self._add_one([*prompt[:short], 10])

    def _leave_the_head_in_doubt(self, prompt: list[int], short: int) -> None:
        scheduler = self.bench.scheduler
        self._alone([*prompt, 7])
        for one in scheduler.cache.ranks:
            for group in one.groups:
                if isinstance(group, WindowGroup):
                    one.tree.evict(group.component, group.pages_for(short))
        self._score([*prompt, 8])
        self._spoil_a_step()
        scheduler.abort(self.live[-1])
        self._alone([*prompt, 9])

    def _leave_in_doubt(self, prompt: list[int]) -> None:
        self._add_one(prompt)
        self._spoil_a_step()
        self.bench.scheduler.abort(self.live[-1])

    def _score(self, prompt: list[int]) -> None:
        self.live.append(self.bench.add(prompt, max_new_tokens=3, seed=1, logprob_start=0))


class ShortenedSimulation(DoubtSimulation):
    """See `DoubtSimulation`. The unvalidated part may become the end of a leaf."""

    @rule(family=st.sampled_from(FAMILIES), length=st.integers(12, 40), short=st.integers(4, 24))
    def begin_where_a_leaf_was_shortened(self, family: tuple[int, ...], length: int, short: int) -> None:
        """The node whose head is unvalidated loses its validated end, as when others need its pages."""
        scheduler, prompt = self.bench.scheduler, [*family[:length]][: self.bench.context - 3]
        for _ in range(24):
            if scheduler.idle:
                break
            self.watch.step()
        scheduler.flush_cache()
        self._leave_the_head_in_doubt(prompt, min(short, len(prompt)))
        for one in scheduler.cache.ranks:
            for group in one.groups:
                if isinstance(group, FullGroup):
                    one.tree.evict(group.component, group.component.evictable - group.pages_for(short))
        self._add_one([*prompt[:short], 10])
