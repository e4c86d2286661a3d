"""The simulator: scheduler and runner under arbitrary arrivals, aborts, stops, retractions, flushes and sizes.

What every request gets equals an oracle that knows only its tokens; pages are conserved after every step; at idle
nothing is left. With `FakeRunner`, pages are destroyed the moment they are free, and steps run as late as a device may
run them; a backend's runner computes the stand-in model, whose oracle is dense.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
from helpers.scheduling import VOCAB, Bench
from helpers.stand_in_subject import StandInSubject, Undecided
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sglang_jax.config import EvictionPolicy, SchedulePolicy
from sglang_jax.mem_cache.invariants import check_everything
from sglang_jax.sampling.params import SamplingParams

FAMILIES = tuple(tuple(1 + (7 * k + position * position) % (VOCAB - 2) for position in range(48)) for k in range(3))
"""Prompts start with a prefix of one of these, so that the tree has something to share."""


class Simulation(RuleBasedStateMachine):
    """Rules are what clients and shortages may do; time passes only in `step`."""

    subject: ClassVar[StandInSubject | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.live: list[int] = []
        self.stopped: set[int] = set()

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        pages=st.integers(2, 24),
        rows=st.integers(1, 6),
        chunk=st.sampled_from([1, 3, 8, 64]),
        lazy=st.booleans(),
        context=st.sampled_from([24, 60]),
        policy=st.sampled_from(SchedulePolicy),
        eviction=st.sampled_from(EvictionPolicy),
        reuse=st.booleans() | st.just(True),
    )
    def start(
        self,
        page_size: int,
        pages: int,
        rows: int,
        chunk: int,
        lazy: bool,
        context: int,
        policy: SchedulePolicy,
        eviction: EvictionPolicy,
        reuse: bool,
    ) -> None:
        options = {
            "schedule_policy": policy,
            "radix_eviction_policy": eviction,
            "disable_radix_cache": not reuse,
            "max_queued_requests": 12,
        }
        if self.subject is not None:
            page_size = min(self.subject.page_sizes, key=lambda known: abs(known - page_size))
        budget = max(chunk, 2 * rows)
        sizes = (pages, page_size, rows, chunk, budget, context, lazy)
        self.bench = Bench(*sizes, invalid_token=VOCAB - 1, options=options, subject=self.subject)

    @rule(
        family=st.sampled_from(FAMILIES),
        shared=st.integers(0, 48),
        tail=st.lists(st.integers(1, VOCAB - 1), max_size=6),
        new_tokens=st.integers(1, 24),
        seed=st.integers(0, 3),
        stream=st.booleans(),
        namespace=st.sampled_from([None, None, None, "other"]),
        stop=st.sampled_from([(), (3, 5, 8)]),
        ignore_eos=st.booleans(),
        logprobs=st.sampled_from([-1, -1, 0, 3]),
        logprob_start=st.sampled_from([-1, -1, -1, 0, 1, 9]),
    )
    def add(
        self,
        family: tuple[int, ...],
        shared: int,
        tail: list[int],
        new_tokens: int,
        seed: int,
        stream: bool,
        namespace: str | None,
        stop: tuple[int, ...],
        ignore_eos: bool,
        logprobs: int,
        logprob_start: int,
    ) -> None:
        prompt = [*family[:shared], *tail][: self.bench.context - 1] or [1]
        sampling = SamplingParams(max_new_tokens=new_tokens, seed=seed, stop_token_ids=stop, ignore_eos=ignore_eos)
        if self.subject is not None:
            sampling = self.subject.style(sampling)
        try:
            request_id = self.bench.add(
                prompt,
                sampling=sampling,
                stream=stream,
                extra_key=namespace,
                top_logprobs=logprobs,
                logprob_start=logprob_start,
                priority=seed,
            )
        except Undecided:
            return
        self.live.append(request_id)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.bench.scheduler.step()
            check_everything(self.bench.scheduler.cache)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.bench.scheduler.abort(data.draw(st.sampled_from(self.live)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.live))
        if request_id in self.bench.scheduler.requests:
            self.stopped.add(request_id)
        self.bench.scheduler.stop(request_id)

    @rule()
    def retract(self) -> None:
        self.bench.scheduler.drain_in_flight()
        self.bench.scheduler.retract_newest()

    @rule()
    def flush(self) -> None:
        flushed = self.bench.scheduler.flush_cache()
        assert flushed == (not self.bench.scheduler.requests)

    @invariant()
    def conserved(self) -> None:
        check_everything(self.bench.scheduler.cache)

    def teardown(self) -> None:
        bench, channel = self.bench, self.bench.channel
        bench.run()
        bench.check_outputs()
        assert set(self.live) == set(channel.finished) | self.stopped
        cache = bench.scheduler.cache
        check_everything(cache)
        assert not cache.open_rows
        assert cache.retired_pages == 0
        assert cache.full.protected == 0
        assert bench.scheduler.flush_cache()
        assert cache.pool.num_free == cache.pool.total
        self._check_the_rest()

    def _check_the_rest(self) -> None:
        bench, channel = self.bench, self.bench.channel
        for request_id, finished in channel.finished.items():
            if finished.kind == "error":
                assert finished.error is not None
                assert finished.error.name in ("CapacityError", "NumericalError", "QueueFullError")
            elif finished.kind == "abort":
                streamed = channel.streams.get(request_id, [])
                assert streamed == bench.wanted[request_id][: len(streamed)]
            for token, entry in zip(channel.output(request_id), channel.logprobs.get(request_id, ()), strict=False):
                assert entry[0] == token
        for request_id in self.stopped - set(channel.finished):
            streamed = channel.streams.get(request_id, [])
            assert streamed == bench.wanted[request_id][: len(streamed)]
        if self.subject is not None:
            self._check_logprobs(self.subject)

    def _check_logprobs(self, subject: StandInSubject) -> None:
        """Those of outputs, and of prompts from where each was asked for: all there are by the end or an abort."""
        bench, channel = self.bench, self.bench.channel
        for request_id, prompt in bench.prompts.items():
            tokens = [*prompt, *bench.wanted[request_id]]
            logprobs = [None, *subject.logprobs(tokens).tolist()]
            start = max(0, bench.logprob_starts[request_id])
            for first, found in (
                (start, channel.prompt_logprobs.get(request_id, [])),
                (len(prompt), channel.logprobs.get(request_id, [])),
            ):
                for place, (token, logprob) in enumerate(found, first):
                    assert token == tokens[place]
                    assert logprob == pytest.approx(logprobs[place], abs=1e-3, nan_ok=True)


def simulate(
    schedules: int, *, steps: int = 25, known_fault: bool = False, subject: StandInSubject | None = None
) -> None:
    """Runs the machine on this many generated schedules, over `FakeRunner` or the runners of `subject`.

    With `known_fault` the schedules are always the same and a failure is not shrunk: its cause is known.
    """
    options = {"derandomize": True, "database": None, "phases": (Phase.generate,)} if known_fault else {}
    run_state_machine_as_test(
        type("Simulation", (Simulation,), {"subject": subject}),
        settings=settings(
            max_examples=schedules,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
            report_multiple_bugs=False,
            **options,
        ),
    )
