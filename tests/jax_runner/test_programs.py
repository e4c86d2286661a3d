"""Compiled programs: state is changed in place, and a launch does not wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.plan_driver import DECODE, PlanDriver
from helpers.stand_in_jax import STAND_IN, stand_in_runner
from helpers.stand_in_model import HIDDEN, LAYERS, VOCAB, random_weights

from sglang_jax.jax_runner import programs as own_programs
from sglang_jax.jax_runner.buckets import Bucket, Buckets
from sglang_jax.jax_runner.builds import Builds, Executable
from sglang_jax.jax_runner.programs import Programs
from sglang_jax.jax_runner.sampling_state import SamplingState
from sglang_jax.jax_runner.step import DeviceState, ModelFunctions, Weights
from sglang_jax.layers.batch import ForwardBatch
from sglang_jax.runner.plan import PageDeltas
from sglang_jax.runner.row_updates import PACKED_ROW

ROWS = 4


def addresses(tree: object) -> list[int]:
    return [array.unsafe_buffer_pointer() for array in jax.tree.leaves(tree)]


def test_every_program_writes_its_state_in_place() -> None:
    weights = [jnp.array(array) for array in random_weights()]
    state = DeviceState(
        kv=[jnp.zeros((50, 4, 2, HIDDEN)) for _ in range(LAYERS)],
        page_table=jnp.zeros((ROWS + 1, 16), jnp.int32),
        last_tokens=jnp.zeros(ROWS + 1, jnp.int32),
        sampling=SamplingState.empty(ROWS + 1, VOCAB),
    )
    large = (state.kv, state.page_table, state.sampling.occurrences)
    before = addresses(large)
    buckets = Buckets.ladder(ROWS, 16, 4)
    programs = Programs(STAND_IN, weights, state, buckets, page_size=4)
    for bucket in (buckets.decode[0], buckets.mixed[0]):
        state, _ = programs.step(bucket, weights, state, np.zeros(programs.layouts[bucket].size, np.int32))
    sampling = programs.update_rows(state.sampling, np.full((1, PACKED_ROW), ROWS, np.int32))
    sampling = programs.set_occurrences(sampling, 2, np.arange(VOCAB, dtype=np.int32))
    nothing = np.zeros(0, np.int32)
    page_table = programs.apply_deltas(state.page_table, PageDeltas(nothing, nothing, nothing))
    state = replace(state, sampling=sampling, page_table=page_table)
    assert addresses((state.kv, state.page_table, state.sampling.occurrences)) == before
    assert state.sampling.occurrences[2].tolist() == list(range(VOCAB))


def test_warm_up_reports_each_program_and_builds_none_twice() -> None:
    runner = stand_in_runner(random_weights(), max_rows=2, token_budget=16)
    seen: list[tuple[int, int, str]] = []
    runner.warm_up(lambda done, total, what: seen.append((done, total, what)))
    assert {what for _, _, what in seen[1:]} == {
        "decode 2",
        "mixed 16 tokens, 2 rows",
        "update 1 rows",
        "update 2 rows",
        "set occurrences",
        "page deltas",
        "sample 2 rows",
        "scores 2 rows",
        "running decode 2",
        "running sample 2 rows",
        "running mixed 16 tokens, 2 rows",
    }
    assert [(done, total) for done, total, _ in seen] == [(done, 11) for done in range(12)]
    runner.warm_up(lambda done, total, what: None)
    assert runner.report().compiled_programs == 8
    assert runner.report().compiles_after_warm_up == 0
    runner.close()


def test_all_parts_of_steps_are_compiled_with_the_options_for_the_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, bool]] = []
    name = ""

    def options(platform: str, kind: str, decode_only: bool) -> dict[str, str]:
        asked.append((name, platform, decode_only))
        return {"xla_nobody_knows_this": "true"}

    monkeypatch.setattr(own_programs, "options_of_step", options)
    runner = stand_in_runner(random_weights(), max_rows=2, token_budget=16, max_samples=3, draft=random_weights())
    builders = runner._programs.builders()
    for name in ("decode 2", "mixed 16 tokens, 2 rows", "sample 2 rows", "draft 2 rows", "catch up 16 tokens"):
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_nobody_knows_this"):
            builders[name]()
    assert asked == [
        ("decode 2", "cpu", True),
        ("mixed 16 tokens, 2 rows", "cpu", False),
        ("sample 2 rows", "cpu", True),
        ("draft 2 rows", "cpu", True),
        ("catch up 16 tokens", "cpu", False),
    ]
    runner.close()


def test_only_builds_are_announced() -> None:
    """A waiting client allows more time meanwhile."""
    runner = stand_in_runner(random_weights(), max_rows=2, token_budget=16)
    during: list[int] = []

    @contextmanager
    def building() -> Iterator[None]:
        during.append(runner.report().compiled_programs)
        yield
        assert runner.report().compiled_programs == during[-1] + 1

    runner.announce_builds(building)
    driver = PlanDriver(runner)
    request = driver.admit([1, 2, 3])
    driver.generate(request, 2)
    built = len(during)
    assert built == runner.report().compiled_programs
    driver.generate(request, 2)
    assert len(during) == built
    runner.close()


@pytest.mark.alone
def test_launching_does_not_wait_for_the_device() -> None:
    def slow_logits(weights: Weights, hidden: jax.Array) -> jax.Array:
        work = jax.lax.fori_loop(0, 60, lambda _, x: jnp.tanh(x @ x), jnp.full((512, 512), hidden[0, 0]))
        return STAND_IN.logits(weights, hidden) + jnp.where(work[0, 0] > 2, 1.0, 0.0)

    runner = stand_in_runner(random_weights(), ModelFunctions(STAND_IN.forward, slow_logits), max_rows=2)
    driver = PlanDriver(runner)
    request = driver.admit([1, 2, 3])
    driver.generate(request, 2)
    start = time.perf_counter()
    flying = [driver.launch([(request, DECODE)]) for _ in range(2)]
    launched = time.perf_counter() - start
    for step in flying:
        step.finish()
    assert launched < 0.3 * (time.perf_counter() - start)
    runner.close()


def small_programs(model: ModelFunctions = STAND_IN) -> Programs:
    """Of shapes only."""
    weights = jax.eval_shape(lambda: [jnp.array(array) for array in random_weights()])
    state = DeviceState(
        kv=[jnp.zeros((50, 4, 2, HIDDEN)) for _ in range(LAYERS)],
        page_table=jnp.zeros((ROWS + 1, 16), jnp.int32),
        last_tokens=jnp.zeros(ROWS + 1, jnp.int32),
        sampling=SamplingState.empty(ROWS + 1, VOCAB),
    )
    shapes = jax.eval_shape(lambda: state)
    return Programs(model, weights, shapes, Buckets.ladder(ROWS, 16, 4), page_size=4)


def test_a_step_waits_for_a_program_that_is_being_built() -> None:
    traced = threading.Barrier(2)
    built: list[str] = []

    def forward(weights: Weights, batch: ForwardBatch, kv: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        built.append(threading.current_thread().name)
        traced.wait()
        return STAND_IN.forward(weights, batch, kv)

    programs = small_programs(ModelFunctions(forward, STAND_IN.logits))
    decode = programs.buckets.decode[0]
    programs.begin([str(decode)])
    traced.wait()
    weights = [jnp.array(array) for array in random_weights()]
    state = DeviceState(
        kv=[jnp.zeros((50, 4, 2, HIDDEN)) for _ in range(LAYERS)],
        page_table=jnp.zeros((ROWS + 1, 16), jnp.int32),
        last_tokens=jnp.zeros(ROWS + 1, jnp.int32),
        sampling=SamplingState.empty(ROWS + 1, VOCAB),
    )
    programs.step(decode, weights, state, np.zeros(programs.layouts[decode].size, np.int32))
    assert [name.startswith("build") for name in built] == [True]
    assert len(programs) == 1


def test_a_failed_build_raises_where_it_is_needed_and_is_tried_again() -> None:
    tries: list[int] = []

    def forward(weights: Weights, batch: ForwardBatch, kv: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        tries.append(1)
        raise RuntimeError("out of memory")

    programs = small_programs(ModelFunctions(forward, STAND_IN.logits))
    decode = programs.buckets.decode[0]
    programs.begin([str(decode)])
    with pytest.raises(RuntimeError, match="out of memory"):
        programs.build(programs.builders(), lambda done, total, what: None)
    while any(thread.name.startswith("build") for thread in threading.enumerate()):
        time.sleep(0.01)
    before = len(tries)
    with pytest.raises(RuntimeError, match="out of memory"):
        programs.step(decode, [], programs._state_shapes, np.zeros(programs.layouts[decode].size, np.int32))
    assert len(tries) == before + 1


class Held:
    """Steps of a stand-in with up to 8 rows, whose programs of `sizes` tokens are built only once `release` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *sizes: int, draft: bool = False) -> None:
        self.release = threading.Event()
        build = Programs._build_step

        def build_late(programs: Programs, bucket: Bucket) -> Executable:
            if bucket.tokens in sizes:
                self.release.wait()
            return build(programs, bucket)

        monkeypatch.setattr(Programs, "_build_step", build_late)
        drafts = {"draft": random_weights(), "max_samples": 3} if draft else {}
        self.runner = stand_in_runner(random_weights(), max_rows=8, token_budget=16, **drafts)
        self.ran: list[str] = []
        run = self.runner._programs.step

        def step(bucket: Bucket, *arguments: Any) -> Any:
            self.ran.append(str(bucket))
            return run(bucket, *arguments)

        monkeypatch.setattr(self.runner._programs, "step", step)

    def programs_of(self, rows: int) -> tuple[list[str], list[list[int]]]:
        """Programs that run for `rows` rows, in a step with a prompt each and in a step with a token each; and the
        outputs."""
        driver = PlanDriver(self.runner)
        requests = [driver.admit([1 + row, 2, 3]) for row in range(rows)]
        self.ran.clear()
        driver.step([(request, 3) for request in requests])
        driver.step([(request, DECODE) for request in requests])
        return list(self.ran), [request.output for request in requests]


def test_a_draft_model_runs_for_more_rows_until_programs_for_fewer_are_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = Held(monkeypatch, 4, draft=True)
    held.runner.warm_up(lambda done, total, what: None, first_only=True)
    programs = held.runner._programs
    assert programs.draft_size(1) == programs.draft_sizes[-1]
    held.release.set()
    wait_until(lambda: not held.runner.report().programs_left)
    assert programs.draft_size(1) == programs.draft_sizes[0] < programs.draft_sizes[-1]
    held.runner.close()


def test_larger_programs_run_until_others_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch, 4)
    seen: list[str] = []
    held.runner.warm_up(lambda done, total, what: seen.append(what), first_only=True)
    assert {"mixed 16 tokens, 8 rows", "decode 8", "decode 2"} <= set(seen)
    assert "decode 4" not in seen
    assert held.runner.report().programs_left > 0
    assert held.programs_of(2)[0][1] == "decode 2"
    ran, padded = held.programs_of(3)
    assert ran[1] == "decode 8"
    held.release.set()
    wait_until(lambda: not held.runner.report().programs_left)
    ran, tight = held.programs_of(3)
    assert (ran[1], tight) == ("decode 4", padded)
    assert held.programs_of(5)[0] == ["mixed 16 tokens, 8 rows", "decode 8"]
    report = held.runner.report()
    assert report.compiles_after_warm_up == 0
    assert report.compiled_programs == len(held.runner._programs.builders())
    held.runner.close()


def test_a_failed_background_build_is_logged_and_larger_programs_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build = Programs._build_step

    def build_some(programs: Programs, bucket: Bucket) -> Executable:
        if bucket.tokens == 4:
            raise RuntimeError("out of memory")
        return build(programs, bucket)

    monkeypatch.setattr(Programs, "_build_step", build_some)
    held = Held(monkeypatch)
    held.runner.warm_up(lambda done, total, what: None, first_only=True)
    wait_until(lambda: not held.runner.report().programs_left)
    assert [record.message for record in caplog.records if "could not be compiled" in record.message] == [
        "decode 4 could not be compiled: steps that it would fit run a larger program"
    ]
    assert held.programs_of(3)[0][1] == "decode 8"
    report = held.runner.report()
    assert (report.compiles_after_warm_up, report.details["failed_programs"]) == (0, "decode 4")
    held.runner.close()


def test_a_step_with_masks_runs_where_both_of_its_parts_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Builds, "complete", False)
    monkeypatch.setattr(Builds, "__contains__", lambda builds, name: name != "sample 2 rows")
    runner = stand_in_runner(random_weights(), max_rows=8, token_budget=16)
    masked: list[bool] = []
    pick = runner._programs.pick

    def note(*numbers: int, **options: bool) -> Bucket:
        masked.append(options["masked"])
        return pick(*numbers, **options)

    assert str(pick(2, 2, 2)) == "decode 2"
    assert str(pick(2, 2, 2, masked=True)) == "decode 4"
    monkeypatch.setattr(runner._programs, "pick", note)
    driver = PlanDriver(runner)
    request = driver.admit([1, 2])
    driver.step([(request, 2)])
    driver.launch([(request, DECODE)], masked=[request])
    assert masked == [False, True]
    runner.close()


def test_a_closed_runner_builds_no_more(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    held = Held(monkeypatch, 4)
    held.runner.warm_up(lambda done, total, what: None, first_only=True)
    held.runner.close()
    held.release.set()
    wait_until(lambda: all(thread.name != "background-build" for thread in threading.enumerate()))
    assert "sample 4 rows" not in held.runner._programs.builds
    assert "could not be compiled" not in caplog.text


def test_a_priority_that_cannot_be_set_stops_no_build(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: int) -> None:
        raise PermissionError("a priority that is refused")

    monkeypatch.setattr("os.setpriority", refuse)
    built: list[str] = []
    builds = Builds()
    builds.build_in_background({name: partial(built.append, name) for name in ("a", "b")}, nullcontext)
    wait_until(lambda: not builds.num_left)
    assert built == ["a", "b"]
    assert "a priority that is refused" in caplog.text


def test_builds_that_fail_at_once_raise_their_error() -> None:
    """Regression: it was `KeyError` where one had failed before all were requested."""

    def fail() -> Executable:
        raise RuntimeError("out of memory")

    for _ in range(50):
        with pytest.raises(RuntimeError, match="out of memory"):
            Builds().build({str(number): fail for number in range(16)}, lambda done, total, what: None)


def test_a_program_is_built_once_at_a_time() -> None:
    release, built = threading.Event(), []

    def build() -> Executable:
        built.append(1)
        release.wait()
        return print

    builds = Builds()
    builds.build_in_background({"a": build}, nullcontext)
    wait_until(lambda: bool(built))
    asker = threading.Thread(target=builds.get, args=("a", build))
    asker.start()
    builds.abandon()
    release.set()
    asker.join()
    wait_until(lambda: not builds.num_left)
    assert (len(built), builds.complete) == (1, True)


def wait_until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_abandoned_program_is_not_built() -> None:
    release = threading.Event()
    begun = threading.Event()

    def forward(weights: Weights, batch: ForwardBatch, kv: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        begun.set()
        release.wait()
        return STAND_IN.forward(weights, batch, kv)

    programs = small_programs(ModelFunctions(forward, STAND_IN.logits))
    programs.begin(programs.builders())
    begun.wait()
    programs.abandon()
    release.set()
    deadline = time.monotonic() + 60
    while any(thread.name.startswith("build") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert 0 < len(programs) < len(programs.builders())


def test_a_short_answer_needs_no_other_programs() -> None:
    """A single question waits for nothing else."""
    runner = stand_in_runner(random_weights(), max_rows=1, token_budget=256, max_context=128, num_pages=100)
    programs = runner._programs
    names = programs.of_short_answers()
    programs.begin(names)
    driver = PlanDriver(runner)
    request = driver.admit([1, 2, 3] * 20)
    driver.generate(request, 3)
    assert runner.report().compiled_programs == len(names)
    runner.close()
