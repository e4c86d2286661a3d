"""The simulator: scheduler and runner under arbitrary arrivals, aborts, stops, retractions, flushes and sizes.

Every output equals that of an oracle that knows only the request's tokens; pages are conserved after every step, and no
request waits needlessly or is overtaken without bound (`Watch`); at idle nothing is left. With `FakeRunner`, pages are
destroyed as soon as they are free, steps run as late as a device may run them, and some fail by a fault of the device;
a backend's runner computes the stand-in model, whose oracle is dense.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
from helpers.scheduling import VOCAB, Bench, Sees
from helpers.stand_in_subject import StandInSubject, Undecided
from helpers.watch import Watch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from hypothesis.stateful import (
    RuleBasedStateMachine,
    get_state_machine_test,
    initialize,
    invariant,
    precondition,
    rule,
)

from sglang_jax.architectures import CacheKind
from sglang_jax.architectures.pooling import Pooling
from sglang_jax.config import EvictionPolicy, SchedulePolicy
from sglang_jax.mem_cache.group import WindowGroup
from sglang_jax.mem_cache.invariants import check_everything
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.sampling.wants import TokenScores
from sglang_jax.scheduler.non_finite_check import MAX_RESTARTS

FAMILIES = tuple(tuple(1 + (7 * k + position * position) % (VOCAB - 2) for position in range(48)) for k in range(3))
"""Prompts start with a prefix of one of these, so that the tree has shared prefixes."""


STATE = CacheKind.STATE
PAGED = (
    (None,),
    (None,),
    (None, None),
    (None, 7),
    (None, 18),
    (5,),
    (18,),
    (7, None),
    (3, 20),
    (20, 3),
    (7, 7),
    (None, 1, 9),
)
"""Windows of the groups of layers, in tokens, None for full attention: smaller and larger than a page."""

WITH_STATES = ((None, STATE), (STATE,), (STATE, None), (5, STATE), (17, STATE), (STATE, 5), (None, STATE, 5))
"""The same with a group that keeps states."""

GROUPS: tuple[tuple[Sees, ...], ...] = (*PAGED, *WITH_STATES)

Strategy = st.SearchStrategy[Any]

SIZES: dict[str, Strategy] = {
    "page_size": st.sampled_from([1, 4, 16]),
    "pages": st.integers(2, 24),
    "rows": st.integers(1, 6),
    "chunk": st.sampled_from([1, 3, 8, 64]),
    "lazy": st.booleans(),
    "context": st.sampled_from([24, 60]),
    "policy": st.sampled_from(SchedulePolicy),
    "eviction": st.sampled_from(EvictionPolicy),
    "reuse": st.booleans() | st.just(True),
    "conservativeness": st.sampled_from([0.01, 0.1, 1.0, 2.0]),
    "aged_turn": st.sampled_from([2, 3, 8]),
    "backfill": st.sampled_from([(0, 256), (2, 256), (32, 5), (32, 256)]),
    "drafts": st.sampled_from([0, 0, 1, 4]),
    "groups": st.sampled_from(GROUPS),
    "siblings": st.integers(2, 24),
    "slots": st.integers(1, 4) | st.integers(1, 16),
    "least_gain": st.sampled_from([1, 1, 8]),
    "gain_over_loss": st.sampled_from([0, 0, 1, 8]),
    "track": st.sampled_from([0, 1, 8]),
}
"""The choices of a schedule before it starts: arguments of `Simulation.start`."""

POOLINGS: dict[str, Strategy] = {"pooling": st.sampled_from(Pooling), "whole": st.booleans()}
"""Further choices of `PoolingSimulation`."""

RANKS: dict[str, Strategy] = {"ranks": st.integers(2, 4), "rows": st.integers(1, 4)}
"""Further choices of `RankSimulation`."""


class Simulation(RuleBasedStateMachine):
    """Rules are what clients and shortages may do; time passes only in `step`."""

    subject: ClassVar[StandInSubject | None] = None
    met: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.live: list[int] = []
        self.stopped: set[int] = set()
        self.doubtful: set[int] = set()
        self.checked_step = -1

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
        conservativeness: float,
        aged_turn: int,
        backfill: tuple[int, int],
        drafts: int,
        groups: tuple[Sees, ...],
        siblings: int,
        slots: int,
        least_gain: int,
        gain_over_loss: int,
        track: int,
        pooling: Pooling | None = None,
        whole: bool = False,
        ranks: int = 1,
    ) -> None:
        options = {
            "schedule_policy": policy,
            "radix_eviction_policy": eviction,
            "disable_radix_cache": not reuse,
            "schedule_conservativeness": conservativeness,
            "max_queued_requests": 12,
            "mamba_track_interval": track,
        }
        if self.subject is not None:
            page_size = min(self.subject.page_sizes, key=lambda known: abs(known - page_size))
            groups = self.subject.windows
            drafts, pooling = 0, None
        if pooling is not None:
            drafts = 0
        if whole := whole and pooling is not None:
            groups = (None,)
        if ranks > 1:
            drafts, groups = 0, tuple(sees for sees in groups if sees is not STATE) or (None,)
        budget = max(chunk, 2 * rows, context if whole else 0)
        numbers = [slots if sees is STATE else (siblings if place else pages) for place, sees in enumerate(groups)]
        sizes = (numbers[0], page_size, rows, chunk, budget, context, lazy)
        self.bench = Bench(
            *sizes,
            invalid_token=VOCAB - 1,
            options=options,
            subject=self.subject,
            window=groups[0],
            more=tuple(zip(groups[1:], numbers[1:], strict=True)),
            max_samples=1 + drafts,
            least_gain=least_gain,
            gain_over_loss=gain_over_loss,
            tails=(2, 9, 20) if track else None,
            pooling=pooling,
            whole=whole,
            ranks=ranks,
        )
        admission = self.bench.scheduler._admission
        admission.aged_turn = aged_turn
        admission.backfill_seats, admission.backfill_steps = backfill
        self.watch = Watch(self.bench)

    @rule(
        family=st.sampled_from(FAMILIES),
        shared=st.integers(0, 48),
        tail=st.lists(st.integers(1, VOCAB - 1), max_size=6),
        new_tokens=st.integers(1, 24) | st.sampled_from([0, 60, 60]),
        seed=st.integers(0, 3),
        stream=st.booleans(),
        namespace=st.sampled_from([None, None, None, "other"]),
        stop=st.sampled_from([(), (3, 5, 8), (5, VOCAB - 1)]),
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
                tenant=("", "a", "b")[seed % 3],
                flow=("", "x", "y")[new_tokens % 3],
                shared_len=shared if seed % 2 else 0,
            )
        except Undecided:
            return
        self.live.append(request_id)

    @precondition(lambda self: self.live)
    @rule(tail=st.integers(1, 3))
    def go_on(self, tail: int) -> None:
        """The next turn of a conversation: the prompt of the last one that ended, its output, and more."""
        for _ in range(12):
            if ended := self.ended():
                break
            self.watch.step()
        if not ended:
            return
        before = ended[-1]
        prompt = [*self.bench.prompts[before], *self.bench.channel.output(before), *[1 + tail] * tail]
        self.add((), 0, prompt, 4, 1, True, self.bench.requests[before].extra_key, (), True, -1, -1)

    def ended(self) -> list[int]:
        """Requests that ended by themselves, and that another can go on from."""
        most = self.bench.context - 6
        finished = self.bench.channel.finished
        return [
            one
            for one in self.live
            if one in finished
            and finished[one].kind in ("stop", "length")
            and len(self.bench.prompts[one]) + finished[one].num_tokens < most
        ]

    @rule(
        count=st.integers(2, 6),
        priority=st.integers(0, 2),
        new_tokens=st.sampled_from([1, 3, 12]),
        stop=st.sampled_from([(), tuple(range(2, 14))]),
    )
    def burst(self, count: int, priority: int, new_tokens: int, stop: tuple[int, ...]) -> None:
        """Short prompts, which fit where others do not; some end by a token long before their length."""
        for k in range(count):
            self._add_short(k, new_tokens, priority, stop)

    @rule(new_tokens=st.integers(12, 40))
    def one_long_output_and_one_more(self, new_tokens: int) -> None:
        """The second may fit beside the first only when some of its output is there, though nothing ends meanwhile."""
        self._add_short(1, 60, 1)
        self._add_short(2, new_tokens, 0)

    def _add_short(self, k: int, new_tokens: int, priority: int, stop: tuple[int, ...] = ()) -> None:
        sampling = SamplingParams(max_new_tokens=new_tokens, seed=k, stop_token_ids=stop, ignore_eos=True)
        if self.subject is not None:
            sampling = self.subject.style(sampling)
        try:
            self.live.append(self.bench.add([1 + k], sampling=sampling, priority=priority))
        except Undecided:
            return

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.watch.step()

    @rule(
        family=st.sampled_from(FAMILIES),
        length=st.integers(6, 40),
        shared=st.integers(1, 20),
        seed=st.integers(0, 3),
        namespace=st.sampled_from([None, None, "other"]),
    )
    def two_that_begin_alike(
        self, family: tuple[int, ...], length: int, shared: int, seed: int, namespace: str | None
    ) -> None:
        """The second waits for what both begin with, and for no more."""
        for prompt in (family[:length], (*family[: min(shared, length)], VOCAB - 2, 1 + seed)):
            self.add(family, 0, list(prompt), 8, seed, True, namespace, (), True, -1, -1)

    @precondition(lambda self: self.subject is None)
    @rule(family=st.sampled_from(FAMILIES), shared=st.integers(0, 20))
    def spoil(self, family: tuple[int, ...], shared: int) -> None:
        """A fault of the device: whoever has a part in this step may end with an error, and nobody else."""
        if shared:
            self.two_that_begin_alike(family, shared + 4, shared, 1, None)
        self._spoil_a_step()

    def _spoil_a_step(self) -> None:
        runner, scheduler = self.bench.runner, self.bench.scheduler
        runner.spoil_next = True
        self.watch.step()
        if not runner.spoil_next and scheduler._in_flight is not None:
            rows = scheduler._in_flight.planned.plan.rows.tolist()
            self.doubtful |= {scheduler.rows.at(row).id for row in rows}
        runner.spoil_next = False

    @rule(pages=st.integers(1, 8), index=st.integers(0, 3))
    def lose(self, pages: int, index: int) -> None:
        """Cached pages of one group go, as when others need them."""
        ranks = self.bench.scheduler.cache.ranks
        cache = ranks[index % len(ranks)]
        cache.tree.evict(cache.groups[index % len(cache.groups)].component, pages)

    @precondition(lambda self: self.subject is None)
    @rule(family=st.sampled_from(FAMILIES), length=st.integers(2, 40), short=st.integers(1, 24), whole=st.booleans())
    def spoil_what_is_computed_again(self, family: tuple[int, ...], length: int, short: int, whole: bool) -> None:
        """A prompt is proven, its head (or all of it) loses its windows, and a spoilt step computes them again for
        somebody who goes before it samples. A sample at the prompt's end proves nothing of the head, where one more
        starts."""
        scheduler = self.bench.scheduler
        prompt = [*family[:length]][: self.bench.context - 3]
        short = min(short, len(prompt))
        self._alone([*prompt, 7])
        for one in scheduler.cache.ranks:
            for group in one.groups:
                if isinstance(group, WindowGroup):
                    pages = group.component.evictable if whole else group.pages_for(short)
                    one.tree.evict(group.component, pages)
        self._add_one([*prompt[:short], 8])
        self._spoil_a_step()
        scheduler.abort(self.live[-1])
        self._alone([*prompt, 9])
        self._add_one([*prompt[:short], 10])

    def _add_one(self, prompt: list[int]) -> None:
        self.live.append(self.bench.add(prompt, max_new_tokens=1, seed=1))

    def _alone(self, prompt: list[int]) -> None:
        """A request when others are done, as far as they are in some steps."""
        for _ in range(12):
            if self.bench.scheduler.idle:
                break
            self.watch.step()
        self._add_one(prompt)
        for _ in range(4):
            self.watch.step()

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
        """After what is no step; `Watch` checks each step."""
        if self.bench.scheduler.cache.launched_step == self.checked_step:
            check_everything(self.bench.scheduler.cache)
        self.checked_step = self.bench.scheduler.cache.launched_step

    def teardown(self) -> None:
        bench, channel = self.bench, self.bench.channel
        for _ in range(4000):
            self.watch.step()
            self.doubtful |= {one.id for one in bench.scheduler.requests.values() if one.restarts == MAX_RESTARTS}
            if bench.scheduler.idle:
                break
        assert bench.scheduler.idle
        self._retry_what_a_fault_ended()
        bench.check_outputs()
        type(self).met.update(self.watch.met)
        assert set(self.live) == set(channel.finished) | self.stopped
        assert bench.scheduler.log.counts.memory_faults == 0
        cache = bench.scheduler.cache
        check_everything(cache)
        assert not cache.open_rows
        assert cache.retired_pages == 0
        groups = [group for one in cache.ranks for group in one.groups]
        assert not any(group.component.protected for group in groups)
        assert bench.scheduler.flush_cache()
        assert all(group.pool.num_free == group.pool.total for group in groups)
        assert not any(one.tree.num_nodes for one in cache.ranks)
        self._check_the_rest()

    def _retry_what_a_fault_ended(self) -> None:
        """On a device that is well again everybody gets what the oracle says."""
        bench = self.bench
        failed = [
            request
            for request, finished in bench.channel.finished.items()
            if finished.error is not None
            and finished.error.name == "NumericalError"
            and not self._has_bad_token(request)
        ]
        assert set(failed) <= self.doubtful, "a request failed that had no part in a spoilt step"
        for request in failed:
            message = bench.requests[request]
            again = bench.add(
                bench.prompts[request],
                sampling=message.sampling,
                extra_key=message.extra_key,
                priority=message.priority,
            )
            self.live.append(again)
            bench.run()
            assert bench.channel.finished[again].kind != "error" or self._is_short_of_pages(again), "still poisoned"

    def _has_bad_token(self, request: int) -> bool:
        """Whether the model itself gives this request logits that are not finite."""
        return self.subject is not None or VOCAB - 1 in [*self.bench.prompts[request], *self.bench.wanted[request]]

    def _is_short_of_pages(self, request: int) -> bool:
        error = self.bench.channel.finished[request].error
        return error is not None and error.name in ("CapacityError", "QueueFullError")

    def _check_capacity(self, request: int, message: str) -> None:
        """The figures of a request that is said not to fit."""
        bench, finished = self.bench, self.bench.channel.finished[request]
        tokens, pool = (int(number) for number in re.findall(r"\d+", message)[:2])
        assert tokens == len(bench.prompts[request]) + finished.num_tokens, message
        size = bench.page_size
        short = {
            pages * size
            for window, pages in ((bench.window, bench.pages), *bench.more)
            if window is not STATE and self._least(tokens + 1, window) > pages
        }
        assert pool in short, message

    def _least(self, tokens: int, window: int | None) -> int:
        """Pages of a group without which a request of so many tokens cannot run."""
        size = self.bench.page_size
        return min(-(-tokens // size), 1 + max(-(-(window - 1) // size), 1) if window is not None else tokens)

    def _check_the_rest(self) -> None:
        bench, channel = self.bench, self.bench.channel
        for request_id, finished in channel.finished.items():
            filled = finished.num_tokens > 0 and len(bench.prompts[request_id]) + finished.num_tokens == bench.context
            type(self).met["an output to the context"] += filled
            if finished.kind == "error":
                assert finished.error is not None
                assert finished.error.name in ("CapacityError", "NumericalError", "QueueFullError")
                if finished.error.name == "CapacityError":
                    self._check_capacity(request_id, finished.error.message)
                    type(self).met["said not to fit"] += 1
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


class PoolingSimulation(Simulation):
    """Engines whose requests all want vectors, with `POOLINGS`; without, some requests want scores of tokens."""

    @precondition(lambda self: self.bench.pooling is None)
    @rule(
        family=st.sampled_from(FAMILIES),
        shared=st.integers(1, 48),
        tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
        namespace=st.sampled_from([None, None, "other"]),
    )
    def score(self, family: tuple[int, ...], shared: int, tokens: list[int], namespace: str | None) -> None:
        """Scores of tokens after a prompt."""
        prompt = list(family[:shared])[: self.bench.context - 1]
        wants = TokenScores(tuple(tokens))
        self.live.append(self.bench.add(prompt, 0, extra_key=namespace, wants=wants))
        type(self).met["scores of tokens"] += 1


class RankSimulation(Simulation):
    """Rows that are divided among several ranks, with `RANKS`."""


@contextmanager
def _no_constants_of_the_code() -> Iterator[None]:
    """Hypothesis sometimes draws constants from the code that the process has imported. Schedules that should be the
    same in each run would then change with the tests before, and with every line of code. These names are private to
    Hypothesis: with a release that renames them schedules change again, and nothing else."""
    if not hasattr(providers, "_get_local_constants") or not hasattr(providers, "CONSTANTS_CACHE"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(providers, "_get_local_constants", type(providers._get_local_constants()))
        providers.CONSTANTS_CACHE.cache.clear()
        yield
    providers.CONSTANTS_CACHE.cache.clear()


def simulate(
    schedules: int,
    *,
    steps: int = 25,
    known_fault: bool = False,
    subject: StandInSubject | None = None,
    sizes: Mapping[str, Strategy] = MappingProxyType({}),
    kind: type[Simulation] = Simulation,
) -> Counter[str]:
    """Runs the machine on this many generated schedules, over `FakeRunner` or the runners of `subject`; returns how
    often each situation occurred.

    `kind`: the machine. `sizes`: choices of some sizes that replace those of `SIZES`. With `known_fault` the schedules
    are always the same and a failure is not shrunk: its cause is known.
    """
    options = {"derandomize": True, "database": None, "phases": (Phase.generate,)} if known_fault else {}
    start = initialize(**SIZES | dict(sizes))(kind.start)
    machine = type(kind.__name__, (kind,), {"subject": subject, "start": start, "met": Counter()})
    run = get_state_machine_test(
        machine,
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
    with _no_constants_of_the_code() if known_fault or settings().derandomize else nullcontext():
        run()
    met: Counter[str] = machine.met
    return met
