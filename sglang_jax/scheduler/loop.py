"""The loop around the scheduler: read messages, step, repeat. It sleeps on a poll if there is nothing to do."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext

import msgspec

from sglang_jax.config import EngineConfig
from sglang_jax.errors import CheckpointError, ConfigError, ParameterError, RequestError
from sglang_jax.grammar.compiler import GrammarCompiler
from sglang_jax.runner.protocol import Runner, RunnerReport
from sglang_jax.runner.pulse import Pulse
from sglang_jax.scheduler import commands
from sglang_jax.scheduler.cache_report import summarize_cache
from sglang_jax.scheduler.commands import PauseMode
from sglang_jax.scheduler.expert_watch import ExpertWatch
from sglang_jax.scheduler.messages import (
    AbortRequest,
    Channel,
    Command,
    Inbound,
    NewRequest,
    Reply,
    SchedulerStats,
    Shutdown,
    StateValue,
    StopRequest,
)
from sglang_jax.scheduler.profiling import Profiling
from sglang_jax.scheduler.publisher import wire_error
from sglang_jax.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

STATS_SECONDS = 0.25
"""Minimum time between two snapshots of a busy scheduler."""

SECONDS_BETWEEN_COUNTS = 1.0
"""Interval at which an idle loop publishes the number of programs still compiled in the background, and at which a
paused one shows that it is alive."""

COMPILER_WAIT_SECONDS = 0.005
"""How long an iteration waits for grammars if there is nothing else to do."""

MESSAGES_PER_TURN = 256
SECONDS_OF_MESSAGES = 0.003
"""Limits on the messages of one iteration, so that thousands of arrivals do not delay running requests."""


class SchedulerLoop:
    """Serves one client through a channel until a `Shutdown`. `pulse`: reports progress to a watchdog."""

    def __init__(
        self,
        runner: Runner,
        model_eos_ids: tuple[int, ...],
        config: EngineConfig,
        channel: Channel,
        pulse: Pulse | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.scheduler = Scheduler(runner, model_eos_ids, config, channel, grammars=grammars)
        self._pulse = pulse or Pulse()
        self._runner = runner
        self._channel = channel
        self._profiling = Profiling(runner, self._pulse)
        self._experts = ExpertWatch(runner.expert_load, enabled=config.enable_expert_distribution_metrics)
        self._draining = False
        self._stopped = False
        self._stats_at = 0.0

    def run(self) -> None:
        """Returns after a `Shutdown`: at once, or (`drain`) when all accepted requests have finished. Raises what the
        runner raises: the engine cannot continue without its device."""
        while not self._stopped:
            self.turn()
        self._profiling.close()

    def turn(self) -> None:
        """One iteration: messages, then a step if there is work."""
        scheduler = self.scheduler
        self._take_in()
        if self._stopped:
            return
        scheduler.step()
        self._pulse.note(steps=scheduler.log.steps, busy=not scheduler.at_rest)
        self._profiling.after_step(scheduler.log.steps)
        if scheduler.only_compiles:
            with self._pulse.building():
                scheduler.constraints.wait(COMPILER_WAIT_SECONDS)
        self._publish_stats()
        if self._draining and scheduler.idle:
            self._stopped = True

    def _take_in(self) -> None:
        asleep = self.scheduler.at_rest and not self._draining
        messages = self._channel.receive(asleep, self._seconds_asleep() if asleep else None)
        # Requests that wait because of a pause are not a reason to suspect the loop.
        with self._pulse.building() if asleep and self.scheduler.paused else nullcontext():
            first = next(messages, None)
        if first is None:
            return
        # Before messages are processed, so that a watchdog notices one that never ends.
        self._pulse.note(steps=self.scheduler.log.steps, busy=True)
        self._serve(first)
        until = time.monotonic() + SECONDS_OF_MESSAGES
        for message in itertools.islice(messages, MESSAGES_PER_TURN - 1):
            self._serve(message)
            if time.monotonic() >= until or self._stopped:
                break

    def _seconds_asleep(self) -> float | None:
        """Maximum time to sleep; None to sleep until a message arrives."""
        to_timeout = self.scheduler.sessions.seconds_to_timeout()
        if not self._runner.report().programs_left and not self.scheduler.paused:
            return to_timeout
        return SECONDS_BETWEEN_COUNTS if to_timeout is None else min(to_timeout, SECONDS_BETWEEN_COUNTS)

    def _serve(self, message: Inbound) -> None:
        match message:
            case NewRequest():
                self.scheduler.add(message)
            case AbortRequest():
                self.scheduler.abort(message.id)
            case StopRequest():
                self.scheduler.stop(message.id, message.num_tokens)
            case Command():
                self._channel.send(self._answer(message))
            case Shutdown():
                self.scheduler.resume()  # a drain finishes the requests that wait
                self._draining = True
                self._stopped = not message.drain

    def _answer(self, command: Command[object]) -> Reply:
        try:
            return self._execute(command)
        except RequestError as error:
            return Reply(command.call, False, error.message, error=wire_error(error))

    def _execute(self, command: Command[object]) -> Reply:
        """Raises `RequestError` if the command is refused."""
        scheduler, call = self.scheduler, command.call
        match command:
            case commands.OpenSession():
                scheduler.sessions.open(command)
                return Reply(call, True)
            case commands.CloseSession():
                scheduler.sessions.close(command.id, command.owner)
                return Reply(call, True)
            case commands.FlushCache():
                done = scheduler.flush_cache()
                return Reply(call, done, "" if done else f"{len(scheduler.requests)} requests run or wait")
            case commands.PauseGeneration(mode):
                scheduler.pause(mode)
                return Reply(call, True)
            case commands.ContinueGeneration():
                scheduler.resume()
                return Reply(call, True)
            case commands.UpdateWeights():
                return Reply(call, True, str(self._update_weights(command)))
            case commands.NameWeights(version):
                scheduler.weight_version = version
                self._send_stats()
                return Reply(call, True)
            case commands.ReleaseMemory(tags):
                self._change_memory(scheduler.release_memory, tags)
                return Reply(call, True)
            case commands.ResumeMemory(tags):
                self._change_memory(scheduler.resume_memory, tags)
                return Reply(call, True)
            case commands.GetState():
                return Reply(call, True, state=self._state())
            case commands.GetCacheReport():
                return Reply(call, True, report=msgspec.json.encode(scheduler.report_cache()))
            case commands.GetCacheSummary():
                return Reply(call, True, report=msgspec.json.encode(summarize_cache(scheduler.cache)))
            case commands.StartProfile(folder, steps):
                self._profiling.start(folder, steps, scheduler.log.steps)
                return Reply(call, True, folder)
            case commands.StopProfile():
                return Reply(call, True, self._profiling.stop())
        raise RequestError(f"the engine has no case for {type(command).__name__}")

    def _change_memory(
        self, change: Callable[[frozenset[commands.MemoryTag]], None], tags: frozenset[commands.MemoryTag]
    ) -> None:
        try:
            with self._pulse.building():
                change(tags)
        except (CheckpointError, ConfigError) as error:
            raise ParameterError(str(error), param="tags") from error

    def _update_weights(self, command: commands.UpdateWeights) -> int:
        """Returns the number of requests that wait. Raises `ParameterError`."""
        scheduler = self.scheduler
        was_paused = scheduler.paused
        scheduler.pause(PauseMode.ABORT if command.abort_all else PauseMode.IN_PLACE)
        try:
            with self._pulse.building():
                scheduler.load_weights(command.model_path, command.weight_version)
            self._send_stats()  # before outputs of the new weights, because it has the name of their version
            if command.flush_cache:
                scheduler.forget_kv()
        except (CheckpointError, ConfigError) as error:
            raise ParameterError(str(error), param="model_path") from error
        finally:
            scheduler.paused = was_paused
        return len(scheduler.requests)

    def _publish_stats(self) -> None:
        now = time.monotonic()
        if self.scheduler.idle or now - self._stats_at >= STATS_SECONDS:
            self._stats_at = now
            self._send_stats()

    def _send_stats(self) -> None:
        self._channel.send(self._stats(self._runner.report()))

    def _stats(self, report: RunnerReport) -> SchedulerStats:
        scheduler = self.scheduler
        experts = self._experts.balances(scheduler.log.steps, idle=scheduler.idle)
        return scheduler.log.stats(report.compiles_after_warm_up, report.programs_left, experts)

    def _state(self) -> dict[str, StateValue]:
        report = self._runner.report()
        stats = self._stats(report)
        figures = msgspec.structs.asdict(stats)
        state: dict[str, StateValue] = {
            **{name: value for name, value in figures.items() if name not in ("groups", "experts")},
            "paused": self.scheduler.paused,
            "released_memory": ", ".join(sorted(self.scheduler.released)),
            "token_usage": stats.token_usage,
            "cache_hit_rate": stats.cache_hit_rate,
            "backend": report.backend,
            "device": report.device,
            "compiled_programs": report.compiled_programs,
            "weight_bytes": report.weight_bytes,
            "kv_bytes": report.kv_bytes,
            **self.scheduler.budget.report(),
        }
        for group in stats.groups:
            name = group.name.replace(" ", "_")
            state[f"{name}_used_{group.unit}s"] = group.used_tokens
            state[f"{name}_max_{group.unit}s"] = group.max_tokens
            state[group.usage_name.replace(" ", "_")] = group.usage
        if self._experts.enabled:
            state["expert_tokens"] = self._experts.totals()
        return state | dict(report.details)
