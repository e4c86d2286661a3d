"""Several prompts in one step: how the step's tokens are divided among them, and how many tokens a step has."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.scheduling import Bench
from hypothesis import given
from hypothesis import strategies as st

from sglang_jax.runner.plan import LAST_TOKEN, StepPlan
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.chunking import MIN_CHUNK, ChunkSharing, FixedChunk, TimedChunk
from sglang_jax.scheduler.scheduler import Scheduler
from sglang_jax.scheduler.step_time import OUTLIER, Padding, StepShape, StepTimes

NOBODY = np.zeros(0, np.int32)


def endless(tokens: int = 4) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, seed=5, ignore_eos=True)


def prompt(length: int, first: int) -> list[int]:
    """Prompts with different first tokens share nothing."""
    return [first, *((3 * i + first) % 37 + 1 for i in range(length - 1))]


def chunks(plan: StepPlan) -> list[int]:
    return plan.query_lens[plan.num_decode :].tolist()


def waiting(sequence: int, priority: int = 0) -> SimpleNamespace:
    return SimpleNamespace(sequence=sequence, priority=priority, background=False, kv=None)


class TestSharing:
    @given(
        work=st.lists(st.integers(1, 200), min_size=1, max_size=8),
        allowance=st.integers(1, 256),
        priorities=st.lists(st.integers(0, 2), min_size=8, max_size=8),
        order=st.permutations(range(8)),
    )
    def test_nothing_is_lost_and_order_is_kept(
        self, work: list[int], allowance: int, priorities: list[int], order: list[int]
    ) -> None:
        """All tokens of the step are used. Apart from the oldest, a prompt with more remaining work gets tokens only
        once all with less have everything."""
        prompts = [waiting(sequence, priority) for sequence, priority in zip(order, priorities, strict=True)]
        prompts = prompts[: len(work)]
        parts = ChunkSharing().share(prompts, work, allowance)
        assert sum(parts) == min(sum(work), allowance)
        assert all(0 <= part <= left for part, left in zip(parts, work, strict=True))
        oldest = min(range(len(work)), key=lambda index: prompts[index].sequence)
        assert parts[oldest] >= min(work[oldest], allowance // 4)
        ranks = sorted(
            range(len(work)), key=lambda index: (-prompts[index].priority, work[index], prompts[index].sequence)
        )
        ranks.remove(oldest)
        for earlier, later in itertools.pairwise(ranks):
            assert not parts[later] or parts[earlier] == work[earlier]

    def test_the_oldest_has_its_share_of_steps_of_one_token(self) -> None:
        sharing = ChunkSharing()
        prompts = [waiting(1), waiting(2)]
        given = [sharing.share(prompts, [100, 50], 1) for _ in range(40)]
        assert sum(first for first, _ in given) == 10
        assert sum(second for _, second in given) == 30


class TestInTheScheduler:
    def test_a_short_prompt_never_waits_behind_a_long_one(self) -> None:
        """Regression: 20 tokens waited 61 steps behind a prompt of 16k that took every chunk whole."""
        bench = Bench(pages=512, chunk=16, budget=32, context=1200)
        bench.runner.keep_plans = True
        long = bench.add(prompt(1000, 1), sampling=endless())
        for _ in range(3):
            bench.scheduler.step()
        short = bench.add(prompt(10, 2), sampling=endless())
        bench.scheduler.step()
        bench.scheduler.step()
        assert chunks(bench.runner.plans[3]) == [6, 10]
        assert short in bench.channel.streams
        assert long not in bench.channel.streams
        bench.run()
        bench.check_outputs()

    def test_a_short_prompt_does_not_wait_behind_long_ones_in_the_queue(self) -> None:
        bench = Bench(pages=600, chunk=16, budget=32, rows=8, context=1200)
        long = [bench.add(prompt(500, 1 + k), sampling=endless()) for k in range(4)]
        for _ in range(3):
            bench.scheduler.step()
        short = bench.add(prompt(10, 9), sampling=endless())
        for _ in range(2):
            bench.scheduler.step()
        assert short in bench.channel.streams
        bench.run()
        assert list(bench.channel.finished) == [short, *long]
        bench.check_outputs()

    def test_a_long_prompt_ends_whatever_arrives(self) -> None:
        """At least a quarter of each step goes to the oldest prompt."""
        bench = Bench(pages=600, chunk=16, budget=32, rows=8, context=600)
        long = bench.add(prompt(320, 1), sampling=endless(1))
        for step in range(320 // 4 + 4):
            bench.add(prompt(16, 2 + step % 30), sampling=endless(1))
            bench.scheduler.step()
        assert long in bench.channel.finished
        bench.run()
        bench.check_outputs()

    def test_higher_priority_comes_first(self) -> None:
        bench = Bench(pages=256, chunk=16, budget=32, context=600, options={"schedule_policy": "priority"})
        bench.runner.keep_plans = True
        bench.add(prompt(40, 1), sampling=endless())
        bench.scheduler.step()
        bench.add(prompt(8, 2), sampling=endless())
        bench.add(prompt(100, 3), sampling=endless(), priority=3)
        bench.scheduler.step()
        assert chunks(bench.runner.plans[1])[0] == 4, "the oldest prompt's share"
        assert bench.runner.plans[1].tokens.tolist()[4:] == prompt(100, 3)[:12]
        bench.run()
        bench.check_outputs()

    def test_a_prompt_of_which_most_is_cached_counts_as_short(self) -> None:
        bench = Bench(pages=512, chunk=16, budget=32, context=600)
        history = prompt(300, 5)
        bench.add(history, sampling=endless(1))
        bench.run()
        bench.add(prompt(500, 1), sampling=endless())
        for _ in range(2):
            bench.scheduler.step()
        turn = bench.add([*history, 7, 8, 9], sampling=endless())
        for _ in range(2):
            bench.scheduler.step()
        assert bench.channel.cached[turn] == 300
        assert turn in bench.channel.streams
        bench.run()
        bench.check_outputs()


class TestStepTimes:
    def test_it_learns_the_cost_of_a_step(self) -> None:
        times, random = StepTimes(), np.random.default_rng(0)

        def seconds(shape: StepShape) -> float:
            return 8e-3 + 3e-5 * shape.decode_rows + 2e-5 * shape.chunk_tokens + 1e-9 * shape.reads

        def shape() -> StepShape:
            rows, tokens = int(random.integers(1, 64)), int(random.integers(0, 2048))
            return StepShape(rows, rows * 1000, tokens, tokens * int(random.integers(1, 30_000)))

        for _ in range(200):
            some = shape()
            times.observe(some, seconds(some))
        for _ in range(50):
            some = shape()
            assert times.expect(some) == pytest.approx(seconds(some), rel=0.02)
        assert times.error < 0.02

    def test_it_adapts_to_a_machine_that_becomes_slower(self) -> None:
        times = StepTimes()
        for factor in (1.0, 2.0):
            for k in range(400):
                times.observe(StepShape(8, 8000, k % 7 * 64, 0), factor * (0.01 + 1e-5 * (k % 7 * 64)))
        assert times.expect(StepShape(8, 8000, 256, 0)) == pytest.approx(2 * (0.01 + 256e-5), rel=0.05)

    def test_a_step_that_compiled_a_program_has_no_extra_weight(self) -> None:
        times = StepTimes()
        for _ in range(100):
            times.observe(StepShape(8, 8000, 64, 0), 0.01)
        times.observe(StepShape(8, 8000, 64, 0), 30.0)
        assert times.expect(StepShape(8, 8000, 64, 0)) < 0.01 * OUTLIER / 2

    def test_an_hour_of_decoding_neither_forgets_chunks_nor_stops_the_learning(self) -> None:
        times = StepTimes()
        for per_token in (1e-4, 3e-4):
            for k in range(200):
                times.observe(StepShape(8, 8000, 64 * (1 + k % 4), 0), 0.01 + 64 * (1 + k % 4) * per_token)
            for _ in range(5000):
                times.observe(StepShape(8, 8000, 0, 0), 0.01)
            assert times.expect(StepShape(8, 8000, 128, 0)) == pytest.approx(0.01 + 128 * per_token, rel=0.1)

    @pytest.mark.parametrize("kind", [0, 64])
    def test_the_first_step_may_take_a_thousand_times_as_long(self, kind: int) -> None:
        """A program compiled in the first step left chunks at 16 tokens for 740 steps."""
        times = StepTimes()
        times.observe(StepShape(8, 8000, kind, 0), 20.0)
        for k in range(20):
            times.observe(StepShape(8, 8000, 64 * (k % 3), 0), 0.01 + 64 * (k % 3) * 1e-4)
        assert times.expect(StepShape(8, 8000, 128, 0)) == pytest.approx(0.01 + 128e-4, rel=0.1)

    def test_a_memory_bound_device_is_estimated_well(self) -> None:
        """Small steps all take the same time. A fit with a negative constant, clamped to zero afterwards, was wrong for
        all of them."""
        times, random = StepTimes(), np.random.default_rng(0)
        for _ in range(300):
            tokens = int(random.integers(0, 2500))
            times.observe(StepShape(32, 32_000, tokens, 0), max(16e-3, 25e-6 * tokens))
        for tokens in (0, 200, 1500, 2500):
            assert times.expect(StepShape(32, 32_000, tokens, 0)) == pytest.approx(max(16e-3, 25e-6 * tokens), rel=0.35)
        assert times.error < 0.25

    def test_no_component_of_a_step_has_a_negative_cost(self) -> None:
        times = StepTimes()
        for k in range(200):
            tokens = 500 + 100 * (k % 20)
            times.observe(StepShape(32, 32_000, tokens, 0), 1e-8 * tokens**2)
        assert times.expect(StepShape(0, 0, 0, 0)) >= 0.0
        assert times.expect(StepShape(32, 32_000, 100, 0)) > 0.0

    def test_padding_counts(self) -> None:
        padding = Padding(((16, 8), (64, 32), (256, 64)))
        assert [padding.tokens(*step) for step in ((3, 2), (16, 8), (16, 9), (65, 3), (300, 3))] == [
            16,
            16,
            64,
            256,
            300,
        ]
        assert Padding(()).tokens(77, 3) == 77


def plan(rows: int, chunk: int) -> SimpleNamespace:
    """Decode rows of 100 tokens each, and the first chunk of a prompt."""
    chunks = [chunk] if chunk else []
    lens = np.array([1] * rows + chunks, np.int32)
    tokens = np.array([LAST_TOKEN] * rows + [1] * chunk, np.int32)
    return SimpleNamespace(tokens=tokens, query_lens=lens, kv_lens=np.array([100] * rows + chunks, np.int32))


class TestTimedChunk:
    @staticmethod
    def learnt(target: float, per_token: float = 1e-4, padding: Padding | None = None) -> TimedChunk:
        budget = TimedChunk(target, 512, padding or Padding(()))
        for k in range(80):
            tokens = 8 << k % 7
            budget.observe(plan(4, tokens), 0.01 + tokens * per_token)
        return budget

    def test_a_step_with_decode_rows_meets_the_target(self) -> None:
        lens = np.full(4, 100, np.int32)
        prompts, work = [waiting(1)], [100_000]
        prompts[0].prefill_len = 100_000
        found = self.learnt(0.03).allowance(len(lens), lens, prompts, work, 1000)
        assert 150 < found <= 200
        assert self.learnt(10.0).allowance(len(lens), lens, prompts, work, 1000) == 512
        assert self.learnt(0.001).allowance(len(lens), lens, prompts, work, 1000) < 100
        assert self.learnt(0.03).allowance(len(lens), lens, prompts, work, 7) == 7

    def test_a_step_without_decode_rows_meets_the_target_too(self) -> None:
        """A request that arrives meanwhile waits for the step."""
        assert 150 < self.learnt(0.03).allowance(0, NOBODY, [], [], 1000) <= 200

    def test_prompts_get_half_the_target_where_decoding_takes_all_of_it(self) -> None:
        """Regression: for a target out of reach, chunks of 16 tokens kept a prompt of 7,000 waiting for six minutes."""
        budget = self.learnt(0.001)
        for _ in range(200):
            budget.observe(plan(4, 0), 0.02)
        found = budget.allowance(4, np.full(4, 100, np.int32), [], [], 1000)
        alone = budget.times.expect(StepShape(4, 400, 0, 0))
        expected = budget.times.expect(StepShape(4, 400, found, found * found // 2))
        assert 1.4 * alone < expected <= 1.5 * alone
        assert found > MIN_CHUNK

    def test_a_single_prompt_gets_large_chunks_where_every_step_misses_the_target(self) -> None:
        """Regression: on a busy machine every step took 0.4 s, and a prompt of 7,000 tokens three minutes without any
        other request."""
        budget = TimedChunk(0.1, 512, Padding(()))
        prompts, left, steps = [waiting(1)], 7000, 0
        prompts[0].prefill_len = left
        while left:
            tokens = budget.allowance(0, NOBODY, prompts, [left], min(left, 1000))
            budget.observe(plan(0, tokens), 0.4 + tokens * 1e-4)
            left, steps = left - tokens, steps + 1
        assert steps < 30

    def test_noise_takes_a_quarter_of_the_time_at_most(self) -> None:
        random = np.random.default_rng(0)
        budget = TimedChunk(0.05, 512, Padding(()))
        for k in range(400):
            tokens = 8 << k % 7
            budget.observe(plan(4, tokens), (0.01 + tokens * 1e-4) * float(random.choice([0.3, 1.0, 1.7])))
        assert budget.times.error > 0.25
        assert budget.allowance(4, np.full(4, 100, np.int32), [], [], 1000) > 200

    def test_the_first_chunk_with_decode_rows_is_small(self) -> None:
        """The cost of a step that never ran is not extrapolated."""
        budget = TimedChunk(10.0, 8192, Padding(()))
        lens, found = np.full(4, 100, np.int32), []
        for _ in range(10):
            found.append(budget.allowance(len(lens), lens, [], [], 8192))
            budget.observe(plan(4, found[-1]), 0.01 + found[-1] * 1e-6)
        assert found == [min(32 << k, 8192) for k in range(10)]

    def test_a_padded_step_is_filled(self) -> None:
        """A step of 100 tokens costs as much as one of 256, so it may take 256, or stay with 64."""
        budget = TimedChunk(0.02, 512, Padding(((16, 8), (64, 32), (256, 64), (1024, 64))))
        lens = np.full(4, 100, np.int32)
        for k in range(60):
            tokens = (8, 50, 200)[k % 3]
            budget.observe(plan(4, tokens), 0.01 + (16, 64, 256)[k % 3] * 1e-4)
        assert budget.allowance(len(lens), lens, [], [], 1000) == 60
        hopeless = TimedChunk(0.001, 512, Padding(((16, 8), (64, 32), (256, 64))))
        for _ in range(30):
            hopeless.observe(plan(4, 10), 0.1)
        assert hopeless.allowance(len(lens), lens, [], [], 1000) == 60, "what is paid for is used"

    def test_a_fixed_chunk_is_used_as_given(self) -> None:
        assert FixedChunk(64).allowance(0, NOBODY, [], [], 1000) == 64
        assert FixedChunk(64).allowance(0, NOBODY, [], [], 10) == 10


def test_a_step_is_timed_from_its_launch_on_the_device() -> None:
    """An idle hour before a step does not count as part of it."""
    now = [0.0]
    bench = Bench(options={"target_itl_ms": 50.0})
    scheduler = Scheduler(bench.runner, (0,), bench.config, bench.channel, clock=lambda: now[0])
    bench.runner.namespace_of = lambda row: scheduler.rows.at(row).namespace
    seen: list[float] = []
    scheduler.budget.observe = lambda plan, seconds: seen.append(seconds)
    launch = bench.runner.launch

    def slow(plan: StepPlan) -> object:
        handle = launch(plan)
        result = handle.result

        def wait() -> object:
            now[0] += 0.02
            return result()

        handle.result = wait
        return handle

    bench.runner.launch = slow
    bench.scheduler = scheduler
    for _ in range(3):
        bench.add([5, 6, 7], sampling=endless())
        bench.run()
        now[0] += 3600.0
    assert seen == pytest.approx([0.02] * len(seen))
    assert len(seen) == 12


def test_targets_are_met_in_simulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """`benchmarks/fair_prefill.py`, shorter: 64k prompts with short ones and 32 decode rows."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    module = importlib.import_module("fair_prefill")
    found = module.run(8192, 50.0, 30.0, plain=False)
    assert found["ITL p99"] <= 1.2 * 50.0
    assert found["steps max"] <= 3
    fixed = module.run(512, None, 20.0, plain=False)
    assert fixed["steps max"] <= 3
    assert int(str(fixed["long done"]).split("/")[0]) >= 1
