"""Pauses: no steps while paused, and all outputs as without a pause."""

from __future__ import annotations

import random

import pytest
from helpers.scheduling import Bench, RecordingChannel

from sglang_jax.sampling.grammar import Grammar, GrammarKind
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.commands import PauseMode

ABORT, RETRACT, IN_PLACE = PauseMode


def kinds(channel: RecordingChannel) -> set[str]:
    return {finished.kind for finished in channel.finished.values()}


@pytest.mark.parametrize("modes", [(IN_PLACE,), (RETRACT,), (IN_PLACE, RETRACT), (ABORT, IN_PLACE, RETRACT)])
@pytest.mark.parametrize("max_samples", [1, 4])
def test_outputs_are_those_without_pauses(modes: tuple[PauseMode, ...], max_samples: int) -> None:
    bench, choose = Bench(pages=24, rows=4, max_samples=max_samples), random.Random(len(modes) + max_samples)
    scheduler = bench.scheduler
    for arrival in range(60):
        prompt = [2 + choose.randrange(38) for _ in range(choose.randrange(1, 30))]
        bench.add(prompt, choose.randrange(1, 20), seed=arrival)
        if scheduler.paused:
            steps = scheduler.log.steps
            for _ in range(3):
                scheduler.step()
            assert scheduler.log.steps == steps
            if choose.random() < 0.5:
                scheduler.resume()
        elif choose.random() < 0.3:
            mode = choose.choice(modes)
            scheduler.pause(mode)
            assert (scheduler.num_running == 0) or mode is IN_PLACE
            assert bool(scheduler.requests) or mode is ABORT or not scheduler.num_waiting
        for _ in range(choose.randrange(4)):
            scheduler.step()
    scheduler.resume()
    bench.run()
    bench.check_outputs()
    assert len(bench.channel.finished) == 60
    assert kinds(bench.channel) - {"abort"} <= {"stop", "length"}
    assert ("abort" in kinds(bench.channel)) == (ABORT in modes)


@pytest.mark.parametrize("mode", PauseMode)
def test_a_paused_scheduler_rests_and_still_serves_messages(mode: PauseMode) -> None:
    bench = Bench()
    scheduler = bench.scheduler
    running, other = (bench.add([3, 4, number], 40) for number in (5, 6))
    for _ in range(3):
        scheduler.step()
    scheduler.pause(mode)
    waiting = bench.add([7, 8, 9])
    grammar = Grammar(GrammarKind.REGEX, "3", "regex")
    compiling = bench.add([7, 8], sampling=SamplingParams(max_new_tokens=4, seed=5, grammar=grammar))
    while not scheduler.at_rest:
        scheduler.step()
    assert scheduler.num_waiting == {ABORT: 2, RETRACT: 4, IN_PLACE: 2}[mode]
    assert not scheduler.idle
    scheduler.abort(waiting)
    scheduler.abort(other)
    scheduler.step()
    assert {waiting, other} <= bench.channel.finished.keys()
    assert (running in bench.channel.finished) == (mode is ABORT)
    scheduler.resume()
    bench.run()
    assert bench.channel.finished[compiling].kind in ("stop", "length")
    assert bench.channel.finished[running].kind == ("abort" if mode is ABORT else "length")
    bench.check_outputs()
