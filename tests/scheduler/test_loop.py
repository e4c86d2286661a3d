"""The loop: asleep when idle, awake while there is work, ended on request."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
from helpers.scheduling import EOS, VOCAB, Bench, RecordingChannel

from sglang_jax.architectures import CacheKind
from sglang_jax.runner.fake_model import Oracle
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler import loop as loop_module
from sglang_jax.scheduler.commands import (
    CloseSession,
    ContinueGeneration,
    FlushCache,
    GetCacheReport,
    GetCacheSummary,
    GetState,
    NameWeights,
    OpenSession,
    PauseGeneration,
    PauseMode,
    ReleaseMemory,
    ResumeMemory,
    StartProfile,
    StopProfile,
    UpdateWeights,
    inbound_types,
)
from sglang_jax.scheduler.loop import SECONDS_BETWEEN_COUNTS, STATS_SECONDS, SchedulerLoop
from sglang_jax.scheduler.messages import (
    AbortRequest,
    Inbound,
    NewRequest,
    Reply,
    SchedulerStats,
    Shutdown,
    StopRequest,
)

PROMPT = bytes([5, 0, 0, 0, 6, 0, 0, 0, 7, 0, 0, 0])


def new(request_id: int, tokens: int = 4) -> NewRequest:
    sampling = SamplingParams(max_new_tokens=tokens, seed=1, ignore_eos=True)
    return NewRequest(id=request_id, token_ids=PROMPT, sampling=sampling, stream=True)


class ScriptedChannel(RecordingChannel):
    """Returns a batch of the script each time the loop would sleep, and asserts that it sleeps exactly when there is
    nothing to do. At its end it asks the loop to shut down."""

    def __init__(self, *script: list[Inbound]) -> None:
        super().__init__()
        self.script = list(script)
        self.must_sleep: Callable[[], bool] = lambda: True
        self.sleeps = 0
        self.polls = 0

    def receive(self, block: bool, seconds: float | None = None) -> Iterator[Inbound]:
        assert block == self.must_sleep(), "asleep with work to do, or spinning without"
        self.polls += not block
        if block:
            self.sleeps += 1
            self.inbox += self.script.pop(0) if self.script else [Shutdown()]
        while self.inbox:
            yield self.inbox.pop(0)

    @property
    def replies(self) -> list[Reply]:
        return [message for message in self.messages if isinstance(message, Reply)]

    @property
    def all_stats(self) -> list[SchedulerStats]:
        return [message for message in self.messages if isinstance(message, SchedulerStats)]


def make_loop(channel: ScriptedChannel, **sizes: object) -> SchedulerLoop:
    bench = Bench(scribble=False, **sizes)
    loop = SchedulerLoop(bench.runner, (EOS,), bench.config, channel)
    bench.runner.namespace_of = lambda row: loop.scheduler.rows.at(row).namespace
    channel.must_sleep = lambda: loop.scheduler.idle
    return loop


def test_asleep_exactly_when_idle() -> None:
    """Idle spinning takes a core from the device's host work."""
    channel = ScriptedChannel([new(1)], [new(2, 9), new(3)], [AbortRequest(77)])
    make_loop(channel).run()
    assert channel.sleeps == 4
    assert set(channel.finished) == {1, 2, 3}


def test_messages_are_served_while_steps_run() -> None:
    channel = ScriptedChannel([new(1, 40)])
    loop = make_loop(channel)
    loop.turn()
    channel.inbox = [new(2, 3)]
    while 2 not in channel.finished:
        loop.turn()
    assert 1 not in channel.finished
    channel.inbox = [AbortRequest(1)]
    loop.turn()
    assert channel.finished[1].kind == "abort"


def test_a_refusal_is_published_though_the_loop_goes_back_to_sleep() -> None:
    channel = ScriptedChannel([NewRequest(id=1, token_ids=b"", sampling=SamplingParams())])
    loop = make_loop(channel)
    loop.turn()
    assert channel.finished[1].kind == "error"
    assert loop.scheduler.idle


@pytest.mark.parametrize("drain", [True, False])
def test_shutdown_drains_or_stops_at_once(drain: bool) -> None:
    channel = ScriptedChannel([new(1, 20), new(2, 5)])
    loop = make_loop(channel)
    for _ in range(3):
        loop.turn()
    channel.inbox = [Shutdown(drain)]
    loop.run()
    assert set(channel.finished) == ({1, 2} if drain else set())
    assert len(channel.streams[1]) == (20 if drain else 2)
    assert loop.scheduler.idle == drain


def test_a_paused_loop_sleeps_and_looks_alive() -> None:
    """A watchdog would end an engine that makes no step while requests wait for it."""
    channel = ScriptedChannel([new(1, 20), new(2, 20)], [PauseGeneration(PauseMode.IN_PLACE)], [], [new(3)])
    loop = make_loop(channel)
    channel.must_sleep = lambda: loop.scheduler.at_rest
    loop.turn()
    channel.inbox = channel.script.pop(0)
    loop.turn()
    assert loop.scheduler.at_rest
    beats = []
    for _ in range(2):
        beats.append(loop._pulse.read())
        loop.turn()
    assert beats[0].ticks < beats[1].ticks
    assert not beats[1].busy
    assert not channel.finished
    loop.turn()  # the script ends with a request to drain, which ends the pause
    loop.run()
    assert set(channel.finished) == {1, 2, 3}


def test_a_second_shutdown_ends_the_drain() -> None:
    channel = ScriptedChannel([new(1, 100)])
    loop = make_loop(channel)
    loop.turn()
    channel.inbox = [Shutdown()]
    for _ in range(5):
        loop.turn()
    channel.inbox = [Shutdown(drain=False)]
    loop.run()
    assert 1 not in channel.finished


def test_an_abort_is_handled_while_draining() -> None:
    channel = ScriptedChannel([new(1, 100)])
    loop = make_loop(channel)
    loop.turn()
    channel.inbox = [Shutdown()]
    loop.turn()
    channel.inbox = [AbortRequest(1)]
    loop.run()
    assert channel.finished[1].kind == "abort"


def test_a_shutdown_ends_an_idle_loop_within_the_round() -> None:
    channel = ScriptedChannel([Shutdown()])
    make_loop(channel).run()
    assert channel.sleeps == 1
    assert channel.polls == 0


def test_flush_cache_is_answered() -> None:
    channel = ScriptedChannel([new(1)], [FlushCache(call=5)], [new(2, 50)])
    loop = make_loop(channel)
    while not channel.replies:
        loop.turn()
    assert channel.replies == [Reply(5, True, "")]
    assert loop.scheduler.cache.groups[0].pool.num_free == 64
    loop.turn()
    channel.inbox = [FlushCache(call=6)]
    loop.turn()
    assert channel.replies[1] == Reply(6, False, "1 requests run or wait")


def test_an_idle_loop_reports_how_many_programs_are_left_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = ScriptedChannel([], [], [])
    loop = make_loop(channel)
    left = iter([3, 3, 2, 2, 0, 0, 0, 0, 0, 0])
    report = loop._runner.report()
    monkeypatch.setattr(loop._runner, "report", lambda: replace(report, programs_left=next(left)))
    waits: list[float | None] = []
    receive = channel.receive

    def wait(block: bool, seconds: float | None = None) -> Iterator[Inbound]:
        waits.append(seconds)
        return receive(block, seconds)

    monkeypatch.setattr(channel, "receive", wait)
    loop.run()
    assert waits == [SECONDS_BETWEEN_COUNTS, SECONDS_BETWEEN_COUNTS, None, None]
    assert [stats.programs_left for stats in channel.all_stats] == [3, 2, 0, 0]


def test_get_state_is_answered_with_figures_of_scheduler_and_runner() -> None:
    channel = ScriptedChannel([new(1), new(2)], [GetState(call=9)])
    loop = make_loop(channel)
    while not channel.replies:
        loop.turn()
    (reply,) = channel.replies
    assert (reply.call, reply.ok, reply.message) == (9, True, "")
    figures = {
        "backend": "fake",
        "device": "none",
        "max_total_tokens": 256,
        "num_finished": 2,
        "num_running": 0,
        "num_waiting": 0,
        "prompt_tokens": 6,
        "generation_tokens": 8,
        "num_used_tokens": 0,
        "token_usage": 0.0,
        "cache_hit_rate": 0.0,
        "compiles_after_warm_up": 0,
        "weight_bytes": 0,
        "kv_bytes": 0,
        "compiled_programs": 0,
    }
    assert figures.items() <= reply.state.items()


def test_the_state_reports_each_pool() -> None:
    channel = ScriptedChannel([GetState(call=9)])
    make_loop(channel, more=((8, 10),)).turn()
    (reply,) = channel.replies
    figures = {"full_max_tokens": 256, "swa_max_tokens": 40, "swa_used_tokens": 0, "swa_token_usage": 0.0}
    assert figures.items() <= reply.state.items()
    assert "groups" not in reply.state


def test_the_state_reports_slots() -> None:
    channel = ScriptedChannel([GetState(call=9)])
    make_loop(channel, more=((CacheKind.STATE, 10),)).turn()
    (reply,) = channel.replies
    assert {"mamba_max_slots": 10, "mamba_used_slots": 0, "mamba_usage": 0.0}.items() <= reply.state.items()


def test_every_kind_of_message_has_its_case() -> None:
    """Regression: a kind of message that the scheduler did not know killed it."""
    served: dict[type[object], Inbound] = {
        NewRequest: new(1),
        AbortRequest: AbortRequest(1),
        StopRequest: StopRequest(1),
        OpenSession: OpenSession("s", "me"),
        CloseSession: CloseSession("s", "me"),
        FlushCache: FlushCache(call=1),
        GetState: GetState(call=1),
        PauseGeneration: PauseGeneration(PauseMode.RETRACT),
        ContinueGeneration: ContinueGeneration(call=1),
        UpdateWeights: UpdateWeights("missing"),
        NameWeights: NameWeights("v2"),
        ReleaseMemory: ReleaseMemory(call=1),
        ResumeMemory: ResumeMemory(call=1),
        GetCacheReport: GetCacheReport(call=1),
        GetCacheSummary: GetCacheSummary(call=1),
        StartProfile: StartProfile("/dev/null/none"),
        StopProfile: StopProfile(call=1),
        Shutdown: Shutdown(),
    }
    assert set(served) == set(typing.get_args(inbound_types()))
    for kind, effect in {
        NewRequest: lambda loop, channel: 1 in loop.scheduler.requests,
        AbortRequest: lambda loop, channel: channel.finished[1].kind == "abort",
        StopRequest: lambda loop, channel: not loop.scheduler.requests and not channel.finished,
        OpenSession: lambda loop, channel: channel.replies[0].ok and loop.scheduler.sessions.count == 1,
        CloseSession: lambda loop, channel: channel.replies[0].error.name == "SessionNotFoundError",
        FlushCache: lambda loop, channel: not channel.replies[0].ok,
        StartProfile: lambda loop, channel: "folder cannot be created" in channel.replies[0].error.message,
        StopProfile: lambda loop, channel: "no profile is being recorded" in channel.replies[0].error.message,
        GetCacheReport: lambda loop, channel: b"num_nodes" in channel.replies[0].report,
        GetCacheSummary: lambda loop, channel: b"num_nodes" in channel.replies[0].report,
        GetState: lambda loop, channel: channel.replies[0].ok,
        PauseGeneration: lambda loop, channel: loop.scheduler.paused and loop.scheduler.num_waiting == 1,
        ReleaseMemory: lambda loop, channel: channel.replies[0].error.code == "engine_busy",
        ResumeMemory: lambda loop, channel: channel.replies[0].ok,
        NameWeights: lambda loop, channel: channel.all_stats[-1].weight_version == "v2" and channel.replies[0].ok,
        UpdateWeights: lambda loop, channel: "missing does not exist" in channel.replies[0].error.message,
        ContinueGeneration: lambda loop, channel: channel.replies[0].ok and not loop.scheduler.paused,
        Shutdown: lambda loop, channel: loop._draining,
    }.items():
        channel = ScriptedChannel([new(1)])
        loop = make_loop(channel)
        if kind is not NewRequest:
            loop.turn()
            channel.inbox = [served[kind]]
        loop.turn()
        assert effect(loop, channel), kind


class TestStats:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        """Time as the loop sees it, set by the test."""
        clock = SimpleNamespace(now=1000.0)
        clock.monotonic = lambda: clock.now
        monkeypatch.setattr(loop_module, "time", clock)
        return clock

    def test_a_few_times_a_second_while_busy(self, clock: SimpleNamespace) -> None:
        """A snapshot for each step costs as much as the step."""
        channel = ScriptedChannel([new(1, 100)])
        loop = make_loop(channel)
        loop.turn()
        assert len(channel.all_stats) == 1
        for _ in range(9):
            clock.now += STATS_SECONDS / 10
            loop.turn()
        assert len(channel.all_stats) == 1
        clock.now += STATS_SECONDS / 5
        loop.turn()
        assert len(channel.all_stats) == 2
        assert channel.stats.num_running == 1
        assert channel.stats.steps == 11
        assert channel.stats.generation_tokens == 10

    def test_whenever_it_goes_idle(self, clock: SimpleNamespace) -> None:
        """Otherwise the last snapshot for hours shows a busy engine."""
        channel = ScriptedChannel([new(1, 3)])
        loop = make_loop(channel)
        while not channel.all_stats or not loop.scheduler.idle:
            loop.turn()
        assert channel.stats.num_running == 0
        assert channel.stats.num_used_tokens == 0
        assert channel.stats.num_finished == 1
        assert len(channel.all_stats) == 2


def test_an_error_of_the_runner_ends_the_loop() -> None:
    """An engine without its device must not continue as if nothing had happened."""

    class Broken(Exception):
        pass

    channel = ScriptedChannel([new(1)])
    loop = make_loop(channel)

    def launch(plan: object) -> typing.NoReturn:
        raise Broken

    loop._runner.launch = launch
    with pytest.raises(Broken):
        loop.run()


@pytest.mark.parametrize("abort", [True, False])
@pytest.mark.parametrize("paused", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_new_weights_use_no_kv_of_old_ones(abort: bool, paused: bool, fails: bool) -> None:
    """A cached prefix, and a running request's KV, belong to the weights that computed them."""
    channel = ScriptedChannel(*[[]] * 8)
    loop = make_loop(channel, pages=32)
    channel.must_sleep = lambda: loop.scheduler.at_rest
    runner = loop.scheduler._runner
    oracle = Oracle(VOCAB)
    wanted = {name: oracle.output([5, 6, 7] * 8, 1, 6, namespace=name or None) for name in ("", "new")}

    def request(number: int, tokens: int = 6) -> NewRequest:
        return msgspec.structs.replace(new(number, tokens), token_ids=PROMPT * 8)

    channel.inbox = [request(1)]
    while 1 not in channel.finished:
        loop.turn()
    channel.inbox = [request(2, 60), request(3)]
    for _ in range(4):
        loop.turn()
    if paused:
        channel.inbox = [PauseGeneration(PauseMode.IN_PLACE)]
        loop.turn()
    channel.inbox = [UpdateWeights("missing" if fails else "new", abort_all=abort, weight_version="v2", call=7)]
    before = len(channel.messages)
    loop.turn()
    told = [m.weight_version if isinstance(m, SchedulerStats) else type(m) for m in channel.messages[before:]]
    assert told[: told.index(Reply)].count("v2") == (not fails), "clients know the version before its first output"
    assert channel.all_stats[-1].weight_version == ("default" if fails else "v2")
    (reply,) = [one for one in channel.replies if one.call == 7]
    assert reply.ok != fails
    assert runner.weights == ("" if fails else "new")
    assert loop.scheduler.paused == paused
    assert (2 in channel.finished and channel.finished[2].kind == "abort") == abort
    assert fails or reply.message == str(0 if abort else 2)
    channel.inbox = [ContinueGeneration(), request(4)]
    while 4 not in channel.finished:
        loop.turn()
    assert channel.streams[1] == wanted[""]
    assert channel.streams[4] == wanted["" if fails else "new"]
    loop.run()
    assert set(channel.finished) == {1, 2, 3, 4}
