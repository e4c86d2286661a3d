"""The CPU decode benchmark: its targets, its ratios, and workers that answer, end, or do not start."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

WORKER = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from decode_protocol import FirstTokens, answer_batches
left = int(sys.argv[1])
def run(prompts, output):
    global left
    left -= 1
    if left < 0:
        raise ValueError("no more batches")
    print("chatter of a library")
    clock = FirstTokens(len(prompts))
    for number, prompt in enumerate(prompts):
        assert len(prompt) == 3
        clock.saw(number)
    return clock.end()
answer_batches(lambda: run)
"""


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_each_backend_has_targets_and_the_machine_a_read_rate(load: Callable[[str], ModuleType]) -> None:
    module = load("decode_cpu")
    assert {name: set(by_batch) for name, by_batch in module.TARGETS.items()} == {
        name: {1, 8, 32} for name in ("jax", "torch")
    }
    assert 1e8 < module.read_bandwidth() < 1e13


def test_workers_that_end_or_do_not_start_are_left_out_with_the_reason(load: Callable[[str], ModuleType]) -> None:
    module, workers = load("decode_cpu"), load("decode_workers")

    def contender(name: str, *command: str) -> Any:
        return workers.Contender(name, command, {}, None)

    python = (sys.executable, "-c", WORKER)
    with ExitStack() as stack:
        started, failed = module.start(
            [
                contender("good", *python, "99"),
                contender("ends", *python, "2"),
                contender("broken", *python, "many"),
                contender("missing", "/nonexistent/python"),
            ],
            stack,
        )
        assert [worker.contender.name for worker in started] == ["good", "ends"]
        assert failed["broken"].startswith("status 1: ValueError: invalid literal")
        assert "/nonexistent/python" in failed["missing"]
        turns = module.Turns(started, turns=2, wait=0.0)
        found = turns.measure(2, 3, 1, quiet=False)
    assert {name: len(measured) for name, measured in found.items()} == {"good": 2}
    assert turns.failed == {"ends": "status 1: ValueError: no more batches"}
    assert all(0 < each.times.first <= each.times.whole for each in found["good"])


def test_ratios_are_of_the_same_turn(load: Callable[[str], ModuleType]) -> None:
    module, workers = load("decode_cpu"), load("decode_workers")

    def turns(*seconds: float) -> list[Any]:
        return [workers.Measured(workers.Times(each / 2, each), 1.0, 0.0, 0.5) for each in seconds]

    rows = module.compare(
        "batch",
        8,
        lambda measured: {"tok/s": 1 / measured.times.whole, "first": measured.times.first},
        {"ours": turns(1.0, 2.0, 4.0), "theirs": turns(3.0, 1.0, 2.0)},
    )
    assert [row["tok/s"] for row in rows] == [0.5, 0.5]
    assert (rows[0]["of theirs"], rows[1]["of ours"]) == (0.5, 2.0)
    assert rows[0]["other cores"] == 0.5


def test_processor_time_counts_a_session_and_what_is_not_idle(load: Callable[[str], ModuleType]) -> None:
    workers = load("decode_workers")
    rest = "0 0 0 0 0 0 0"
    stats = [
        f"11 (python) S 1 10 10 {rest} 300 50 {rest}",
        f"12 (a (odd) name) R 1 12 10 {rest} 100 0 {rest}",
        f"13 (another) R 1 13 13 {rest} 7000 0 {rest}",
    ]
    assert workers.session_seconds(stats, 10) == 450 / workers.TICK
    machine = "cpu  1000 200 30 99999 99999 4 5 6 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n"
    assert workers.machine_seconds(machine) == 1245 / workers.TICK
    before = workers.Usage(10.0, {1: 5.0, 2: 1.0}, 100.0)
    after = workers.Usage(20.0, {1: 15.0, 2: 2.0}, 116.0)
    assert after.since(before, 1) == (10.0, 0.1, 0.5)
