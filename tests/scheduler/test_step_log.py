"""The exact log lines for operators."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace

import pytest
from helpers.scheduling import Bench

from sglang_jax.architectures import CacheKind
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler import step_log
from sglang_jax.scheduler.scheduler import Scheduler

PREFIX = [1 + (7 * i) % 37 for i in range(30)]


def endless(tokens: int, seed: int = 5) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, seed=seed, ignore_eos=True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time as the log sees it, set by the test."""
    clock = SimpleNamespace(now=50.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(step_log, "time", clock)
    return clock


def test_prefill_lines(caplog: pytest.LogCaptureFixture) -> None:
    """Each line describes its own step, also when a handler formats it later."""
    caplog.set_level(logging.INFO)
    bench = Bench(rows=2, chunk=16, budget=32)
    bench.add(PREFIX[:20], sampling=endless(30))
    bench.add([*PREFIX[:16], 39, 39], sampling=endless(30))
    bench.add([38, 38], sampling=endless(2))
    for _ in range(4):
        bench.scheduler.step()
    assert caplog.messages == [
        "Prefill batch, #new-seq: 2, #new-token: 16, #cached-token: 0, token usage: 0.08, "
        "#running-req: 2, #queue-req: 1",
        "Prefill batch, #new-seq: 0, #new-token: 6, #cached-token: 0, token usage: 0.09, "
        "#running-req: 2, #queue-req: 1",
        "Prefill batch, #new-seq: 1, #new-token: 2, #cached-token: 16, token usage: 0.11, "
        "#running-req: 2, #queue-req: 0",
    ]


def test_decode_lines_come_every_few_steps(caplog: pytest.LogCaptureFixture, clock: SimpleNamespace) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench(rows=2, options={"decode_log_interval": 10})
    bench.add(PREFIX[:4], sampling=endless(40))
    bench.add(PREFIX[1:6], sampling=endless(40))
    bench.add([38, 38], sampling=endless(2))
    clock.now += 100.0
    for _ in range(21):
        clock.now += 0.1
        bench.scheduler.step()
        bench.scheduler.log.stats(0)
    assert caplog.messages[1:] == [
        "Decode batch, #running-req: 2, #token: 32, token usage: 0.12, cuda graph: False, "
        "gen throughput (token/s): 20.00, #queue-req: 1",
        "Decode batch, #running-req: 2, #token: 52, token usage: 0.20, cuda graph: False, "
        "gen throughput (token/s): 20.00, #queue-req: 1",
    ]
    bench.run()
    clock.now += 100.0
    caplog.clear()
    bench.add(PREFIX[:4], sampling=endless(20))
    for _ in range(12):
        clock.now += 0.2
        bench.scheduler.step()
    (line,) = [message for message in caplog.messages if message.startswith("Decode")]
    assert "gen throughput (token/s): 5.00, #queue-req: 0" in line, "the pause does not count"


def test_throughput_is_averaged_over_a_while_not_over_a_moment(clock: SimpleNamespace) -> None:
    """Regression: when asked twice within a millisecond, the second answer was zero or a million."""
    bench = Bench()
    bench.add(PREFIX[:4], sampling=endless(40))
    for _ in range(11):
        clock.now += 0.1
        bench.scheduler.step()
    first = bench.scheduler.log.stats(0).gen_throughput
    assert first == pytest.approx(10 / 1.1)
    clock.now += 0.001
    assert bench.scheduler.log.stats(0).gen_throughput == first
    clock.now += 10.0
    assert bench.scheduler.log.stats(0).gen_throughput == 0.0


def test_no_figures_are_gathered_for_a_line_that_is_not_written(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(Scheduler, "token_usage", property(lambda self: pytest.fail("gathered")))
    bench = Bench(options={"decode_log_interval": 1})
    bench.add(PREFIX[:4], sampling=endless(4))
    bench.run()
    assert not caplog.messages


def test_counters_count_each_request_once() -> None:
    bench = Bench(chunk=8)
    bench.add(PREFIX[:20], sampling=endless(6))
    bench.run()
    aborted = bench.add([38, 38], sampling=endless(50))
    bench.add([*PREFIX[:20], 39], sampling=endless(6))
    for _ in range(4):
        bench.scheduler.step()
    bench.scheduler.drain_in_flight()
    bench.scheduler.retract_newest()
    bench.scheduler.step()
    bench.scheduler.abort(aborted)
    bench.run()
    stats = bench.scheduler.log.stats(3)
    assert (stats.prompt_tokens, stats.cached_tokens) == (20 + 2 + 21, 20)
    assert stats.cache_hit_rate == 20 / 43
    assert (stats.num_finished, stats.num_aborted, stats.num_retractions) == (3, 1, 1)
    assert stats.generation_tokens == sum(finished.num_tokens for finished in bench.channel.finished.values())
    assert (stats.num_running, stats.num_waiting, stats.num_used_tokens, stats.token_usage) == (0, 0, 0, 0.0)
    assert (stats.max_total_tokens, stats.compiles_after_warm_up) == (256, 3)


def test_each_pool_of_several_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench(pages=20, more=((8, 10),), rows=2, chunk=16, budget=32)
    bench.add(PREFIX[:20], sampling=endless(3))
    bench.scheduler.step()
    bench.scheduler.step()
    assert caplog.messages == [
        "Prefill batch, #new-seq: 1, #new-token: 16, #cached-token: 0, full token usage: 0.20, swa token usage: 0.40, "
        "#running-req: 1, #queue-req: 0",
        "Prefill batch, #new-seq: 0, #new-token: 4, #cached-token: 0, full token usage: 0.25, swa token usage: 0.50, "
        "#running-req: 1, #queue-req: 0",
    ]
    stats = bench.scheduler.log.stats(0)
    assert [(group.name, group.used_tokens, group.max_tokens) for group in stats.groups] == [
        ("full", 20, 80),
        ("swa", 20, 40),
    ]
    assert stats.token_usage == 0.5


def test_the_one_pool_of_layers_that_all_have_windows_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench(pages=10, window=8, rows=2, chunk=16, budget=32)
    bench.add(PREFIX[:16], sampling=endless(3))
    bench.scheduler.step()
    (line,) = caplog.messages
    assert ", swa token usage: 0.40, " in line
    (group,) = bench.scheduler.log.stats(0).groups
    assert (group.name, group.used_tokens, group.max_tokens) == ("swa", 16, 40)


def test_states_are_counted_in_slots(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench(pages=20, more=((CacheKind.STATE, 8),), rows=2, chunk=16, budget=32)
    bench.add(PREFIX[:20], sampling=endless(3))
    bench.scheduler.step()
    bench.scheduler.step()
    assert caplog.messages == [
        "Prefill batch, #new-seq: 1, #new-token: 16, #cached-token: 0, full token usage: 0.20, "
        "mamba num: 2, mamba usage: 0.25, #running-req: 1, #queue-req: 0",
        "Prefill batch, #new-seq: 0, #new-token: 4, #cached-token: 0, full token usage: 0.25, "
        "mamba num: 3, mamba usage: 0.38, #running-req: 1, #queue-req: 0",
    ]
    full, mamba = bench.scheduler.log.stats(0).groups
    assert (full.unit, mamba.unit, mamba.used_tokens, mamba.max_tokens) == ("token", "slot", 3, 8)
    alone = Bench(window=CacheKind.STATE, pages=4, context=100)
    assert [group.name for group in alone.scheduler.log.stats(0).groups] == ["mamba"]
    assert (alone.scheduler.num_used_tokens, alone.scheduler.max_total_tokens) == (0, 400)


NARROW = {"schedule_conservativeness": 0.01}
"""Admits with almost no room kept for output, so that pages run out."""


@pytest.mark.parametrize(
    ("bench", "running", "waiting", "level", "line"),
    [
        (
            Bench(pages=8, rows=2, options=NARROW),
            [(8, 16), (8, 16)],
            [],
            "WARNING",
            "KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_token_ratio: 0.0069 -> 0.0089",
        ),
        (
            Bench(pages=9, rows=6, chunk=32, options=NARROW),
            [(4, 9)] * 6,
            [],
            "WARNING",
            "KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_token_ratio: 0.0070 -> 0.0100",
        ),
        (
            Bench(pages=4, rows=2),
            [(8, 30)],
            [],
            "WARNING",
            "KV cache pool is full. Retract requests. #retracted_reqs: 0, #aborted_retracted_reqs: 1, "
            "#new_token_ratio: 0.6910 -> 0.6910",
        ),
        (
            Bench(options={"test_retract": 4}),
            [(8, 6)],
            [],
            "INFO",
            "Testing retraction. #retracted_reqs: 1, #new_token_ratio: 0.6960 -> 0.8960",
        ),
        (
            Bench(rows=2),
            [(4, 20)],
            [(4, 4), (4, 4)],
            "INFO",
            "Other requests wait. Retract requests of the background. #retracted_reqs: 1, "
            "#new_token_ratio: 0.6960 -> 0.6960",
        ),
        (
            Bench(pages=40, more=((CacheKind.STATE, 3),), rows=6),
            [(5, 6)] * 8,
            [],
            "WARNING",
            "State slots are short. Requests wait. full token usage: 0.00, mamba num: 3, mamba usage: 1.00, "
            "#running-req: 3, #queue-req: 5",
        ),
    ],
    ids=["one", "two-in-a-step", "the-only-one", "test", "background", "slots"],
)
def test_each_shortage_has_one_line(
    bench: Bench,
    running: list[tuple[int, int]],
    waiting: list[tuple[int, int]],
    level: str,
    line: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`running`, `waiting`: prompts and outputs in tokens; those that wait come later, from clients."""
    caplog.set_level(logging.INFO)
    for number, (length, output) in enumerate(running):
        bench.add([number + 1, *PREFIX[: length - 1]], sampling=endless(output), background=bool(waiting))
    for _ in range(3 if waiting else 0):
        bench.scheduler.step()
    for number, (length, output) in enumerate(waiting, 20):
        bench.add([number, *PREFIX[: length - 1]], sampling=endless(output))
    bench.run()
    lines = [(record.levelname, record.message) for record in caplog.records if " batch, " not in record.message]
    assert lines[0] == (level, line)
    told = sum(int(re.findall(r"#retracted_reqs: (\d+)", message)[0]) for _, message in lines if "#retr" in message)
    assert told == bench.scheduler.log.counts.retractions
    if "slots" in line:
        assert len(lines) == 1, "one line while the shortage lasts"
        for shortages in (2, 3):
            for number in range(6):
                bench.add([number + 30, *PREFIX[:4]], sampling=endless(6))
            bench.scheduler.step()
            assert sum("slots" in message for message in caplog.messages) == shortages, "and one for the next"
            for request in list(bench.scheduler.queue.requests()):
                bench.scheduler.abort(request.id)  # nothing waits, and the queue is not looked at
            bench.run()


def test_windows_of_several_sizes_are_distinguished() -> None:
    bench = Bench(more=((8, 10), (20, 16)))
    assert [group.name for group in bench.scheduler.cache.groups] == ["full", "swa 8", "swa 20"]


def test_groups_that_differ_only_in_the_shape_of_their_pages_are_numbered() -> None:
    bench = Bench(more=((None, 10), (8, 10), (8, 16)))
    names = [group.name for group in bench.scheduler.cache.groups]
    assert names == ["full", "full 2", "swa 8", "swa 8 2"]
    assert [group.name for group in bench.scheduler.log.stats(0).groups] == names
