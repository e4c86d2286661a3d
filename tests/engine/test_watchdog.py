"""A core that hangs is detected, reports where it hangs, and is killed; one that is idle, slow to read from or
compiling is left running."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.engine_fakes import load_fake_model, load_tokenizer
from helpers.sleeping_core import TRAP, load_sleeping
from helpers.whole_outputs import collect

from sglang_jax.config import EngineConfig
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.launch import launch_core
from sglang_jax.engine.types import GenerateInput
from sglang_jax.engine.watchdog import SilenceMeter, Watchdog
from sglang_jax.errors import EngineDeadError
from sglang_jax.runner.pulse import MAX_RANKS, Beat, Pulse
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.commands import GetState

TIMEOUT = 1.5
LONG = SamplingParams(max_new_tokens=200, ignore_eos=True)


def beat(ticks: int, *, busy: bool = True, building: bool = False) -> Beat:
    return Beat(steps=ticks, ticks=ticks, busy=busy, building=building, at=0.0)


def test_silence_is_counted_while_there_is_work() -> None:
    silence = SilenceMeter(between=1.0)
    assert silence.look(beat(5), waited_for=True, passed=1.0) == 0.0  # the first look has nothing to compare with
    assert [silence.look(beat(5), waited_for=False, passed=1.0) for _ in range(3)] == [1.0, 2.0, 3.0]
    assert silence.look(beat(6), waited_for=True, passed=1.0) == 0.0


@pytest.mark.parametrize(
    ("now", "waited_for", "silent"),
    [
        (beat(5, busy=False), False, 0.0),  # idle
        (beat(5, busy=False), True, 1.0),  # stopped before it saw the message
        (beat(5, busy=True), False, 1.0),  # the client has left, but the step does not end
        (beat(5, building=True), True, 0.0),  # compiles
    ],
)
def test_when_a_core_counts_as_silent(now: Beat, waited_for: bool, silent: float) -> None:
    silence = SilenceMeter(between=1.0)
    silence.look(beat(5, busy=now.busy), waited_for=waited_for, passed=1.0)
    assert silence.look(now, waited_for=waited_for, passed=1.0) == silent


def test_a_build_is_timed_separately() -> None:
    silence = SilenceMeter(between=1.0)
    for passed in (1.0, 2.0, 3.0, 99.0):
        assert silence.look(beat(5, building=True), waited_for=True, passed=passed) == 0.0
    assert silence.building == 2.0 + 2.0 + 2.0
    assert silence.look(beat(5), waited_for=True, passed=1.0) == 1.0
    assert silence.building == 0.0
    silence.look(beat(5, building=True), waited_for=True, passed=1.0)
    silence.look(beat(6, building=True), waited_for=True, passed=1.0)  # another one
    assert silence.building == 0.0
    silence.look(beat(6, busy=False, building=True), waited_for=False, passed=1.0)
    assert silence.building == 0.0


async def test_an_endless_build_is_detected() -> None:
    """Regression: time of builds did not count at all, so a hanging compiler was waited for without end."""
    pulse, barks = Pulse(), list[str]()
    pulse.note(steps=3, busy=True)
    watchdog = Watchdog(pulse, 0.05, lambda: True, barks.append, build_timeout=0.3)
    for _ in range(20):
        with pulse.building():
            await asyncio.sleep(0.01)
    assert not barks
    with pulse.building():
        await some_of(barks)
    watchdog.stop()
    assert re.fullmatch(r"it has built a program for \d+ s while there was work to do", barks[0])


def test_time_without_checks_does_not_count_against_the_core() -> None:
    silence = SilenceMeter(between=1.0)
    silence.look(beat(5), waited_for=True, passed=1.0)
    assert silence.look(beat(5), waited_for=True, passed=3600.0) == 2.0


def test_a_pulse_reports_only_steps_and_changes() -> None:
    pulse = Pulse()
    seen = [pulse.read().ticks]
    for steps, busy in [(0, True), (1, True), (1, True), (2, True), (2, False), (2, False), (2, True)]:
        pulse.note(steps=steps, busy=busy)
        seen.append(pulse.read().ticks)
    assert seen == [0, 1, 2, 2, 3, 4, 4, 5]
    assert pulse.read().busy
    assert time.monotonic() - pulse.read().at < 1.0
    with pulse.building():
        with pulse.building():
            assert pulse.read().building
        assert pulse.read().building
    assert not pulse.read().building
    assert pulse.read().ticks == 7


async def test_the_watchdog_barks_once_and_after_the_timeout() -> None:
    pulse, barks = Pulse(), []
    begin = time.monotonic()
    watchdog = Watchdog(pulse, 0.2, lambda: True, lambda what: barks.append((time.monotonic() - begin, what)))
    for step in range(1, 30):
        pulse.note(steps=step, busy=True)
        await asyncio.sleep(0.01)
    assert not barks
    last = time.monotonic() - begin
    await some_of(barks)
    await asyncio.sleep(0.3)
    ((when, what),) = barks
    assert when - last >= 0.15  # counted from the first look after the last step
    said = r"it has made no step for \d+ s while there was work to do \(step 29 was launched \d+ s ago\)"
    assert re.fullmatch(said, what)
    watchdog.stop()


async def some_of(found: list[Any]) -> None:
    """Waits until the list has an entry, however busy the machine is."""
    for _ in range(3000):
        if found:
            return
        await asyncio.sleep(0.01)


async def test_the_report_names_the_state_of_each_rank() -> None:
    """The rank that lags behind, or is silent, is the one that hangs."""
    pulse, barks = Pulse(), []
    for rank, steps in [(2, 28), (1, 29), (0, 5), (MAX_RANKS, 1), (MAX_RANKS + 1, 1), (10**9, 1)]:
        pulse.note_rank(rank, steps)
    first = pulse.ranks()
    assert [(one.rank, one.steps) for one in first] == [(1, 29), (2, 28), (MAX_RANKS, 1)]
    await asyncio.sleep(0.05)
    pulse.note_rank(1, 30)
    pulse.note_rank(2, 28)
    one, other, _ = pulse.ranks()
    assert one.at == one.heard > first[0].heard
    assert (other.at, other.heard > first[1].heard) == (first[1].at, True)
    watchdog = Watchdog(pulse, 0.2, lambda: True, barks.append)
    await some_of(barks)
    watchdog.stop()
    assert re.search(
        r"; rank 1 launched its step 30 \d+ s ago, and last reported \d+ s ago; rank 2 launched its step 28 ", barks[0]
    )


@asynccontextmanager
async def running(model_path: str, timeout: float = TIMEOUT) -> AsyncIterator[AsyncEngineClient]:
    config = EngineConfig(model_path=model_path, watchdog_timeout=timeout)
    client = await launch_core(config, in_process=False, load=load_sleeping, load_tokenizer=load_tokenizer)
    yield client
    await client.close()


def pid_of(client: AsyncEngineClient) -> int:
    return int(client.model_info.architecture)


async def gone(pid: int) -> bool:
    """The process ends, and is reaped, within some seconds."""
    for _ in range(500):
        if not Path(f"/proc/{pid}").exists():
            return True
        await asyncio.sleep(0.01)
    return False


async def test_a_hanging_core_is_killed_and_reports_where(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_jax.engine.core_link.DUMP_SECONDS", 0.3)
    async with running("hang:0.001") as client:
        unread = client.generate(GenerateInput(prompt=[1, 2, 3], sampling=LONG, stream=True))
        await anext(unread)
        await asyncio.sleep(2 * TIMEOUT)  # idle: the output has long ended, and no client reads it
        assert client.alive
        assert [delta async for delta in unread][-1].finish is not None
        begin = time.monotonic()
        hanging = asyncio.create_task(collect(client, GenerateInput(prompt=[1, TRAP], sampling=LONG)))
        while client.loads()[0].silent_seconds == 0.0:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDeadError, match=r"hangs: it has made no step for .* while there was work"):
            await asyncio.wait_for(hanging, 20)
        assert time.monotonic() - begin > 0.8 * TIMEOUT
        assert not client.alive
        assert await gone(pid_of(client))
        assert "in hang_in_python" in capfd.readouterr().err


async def test_a_core_that_hangs_in_native_code_reports_where(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other thread of its interpreter runs, so it can send nothing, and cannot end itself with its parent."""
    monkeypatch.setattr("sglang_jax.engine.core_link.DUMP_SECONDS", 0.3)
    async with running("native:0.001") as client:
        with pytest.raises(EngineDeadError, match="hangs"):
            await asyncio.wait_for(collect(client, GenerateInput(prompt=[1, TRAP], sampling=LONG)), 20)
        assert await gone(pid_of(client))
        assert "in hang_in_native_code" in capfd.readouterr().err


async def test_a_stopped_core_is_killed_and_reports_where(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """It is idle, and its own report says so."""
    async with running("sleep:0.001") as client:
        os.kill(pid_of(client), signal.SIGSTOP)
        asking = asyncio.create_task(client.call(GetState()))
        for attempt in (asking, collect(client, GenerateInput(prompt=[1, 2, 3]))):
            with pytest.raises(EngineDeadError, match="hangs"):
                await asyncio.wait_for(attempt, 20)
        assert await gone(pid_of(client))
        assert "T (stopped)" in caplog.text
        # Anywhere in it: the core continues for a moment while it writes its stacks, and handles messages that arrived
        # meanwhile.
        # Any thread may write them; a thread between two calls appears without its callers.
        assert re.search(r"scheduler/loop\.py|engine/channel\.py", capfd.readouterr().err)


async def test_a_core_in_a_thread_is_not_watched() -> None:
    config = EngineConfig(model_path="fake", watchdog_timeout=0.1)
    client = await launch_core(config, in_process=True, load=load_fake_model, load_tokenizer=load_tokenizer)
    assert [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "watchdog"] == []
    await client.close()
