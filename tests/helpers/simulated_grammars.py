"""The simulator with requests under grammars.

A separate machine: hypothesis seeds a machine's schedules by its source, and those that find the faults planted
elsewhere must not change.
"""

from __future__ import annotations

from helpers import fake_grammars
from helpers.scheduling import VOCAB
from helpers.simulation import FAMILIES, Simulation
from helpers.stand_in_subject import Undecided
from hypothesis import strategies as st
from hypothesis.stateful import rule

from sglang_jax.sampling.params import SamplingParams

GRAMMARS = (1, 2, 3, 4, 6, 10, fake_grammars.FAILING, fake_grammars.REFUSED)


class GrammarSimulation(Simulation):
    """See `Simulation`."""

    @rule(
        family=st.sampled_from(FAMILIES),
        shared=st.integers(0, 48),
        tail=st.lists(st.integers(1, VOCAB - 1), max_size=6),
        new_tokens=st.integers(1, 24),
        seed=st.integers(0, 3),
        stop=st.sampled_from([(), (3, 5, 8), (5, VOCAB - 1)]),
        ignore_eos=st.booleans(),
        logprobs=st.sampled_from([-1, -1, 0, 3]),
        grammars=st.lists(st.sampled_from(GRAMMARS), min_size=1, max_size=3),
        least=st.sampled_from([0, 0, 5]),
    )
    def add_under_grammars(
        self,
        family: tuple[int, ...],
        shared: int,
        tail: list[int],
        new_tokens: int,
        seed: int,
        stop: tuple[int, ...],
        ignore_eos: bool,
        logprobs: int,
        grammars: list[int],
        least: int,
    ) -> None:
        """Adds one prompt, once under each of some grammars."""
        for key in grammars:
            sampling = SamplingParams(
                max_new_tokens=new_tokens,
                min_new_tokens=min(least, new_tokens),
                seed=seed,
                stop_token_ids=stop,
                ignore_eos=ignore_eos,
                grammar=fake_grammars.grammar(key),
            )
            if self.subject is not None:
                sampling = self.subject.style(sampling)
            prompt = [*family[:shared], *tail][: self.bench.context - 1] or [1]
            try:
                request_id = self.bench.add(prompt, sampling=sampling, top_logprobs=logprobs, priority=seed)
            except Undecided:
                continue
            self.live.append(request_id)
            self.met["under a grammar"] += 1

    def _is_short_of_pages(self, request: int) -> bool:
        return super()._is_short_of_pages(request) or self._ended_by_its_grammar(request)

    def _ended_by_its_grammar(self, request: int) -> bool:
        error = self.bench.channel.finished[request].error
        return error is not None and error.name == "GrammarError"

    def _check_the_rest(self) -> None:
        """A request that is refused, or that ends as its grammar fails, does so where the oracle does; the others end
        as usual."""
        channel = self.bench.channel
        for request in [one for one in channel.finished if self._ended_by_its_grammar(one)]:
            assert channel.output(request) == self.bench.wanted[request]
            del channel.finished[request]
            self.met["ended by its grammar"] += 1
        super()._check_the_rest()
