"""A link to an engine core that this process started: sends requests and receives outputs over a channel."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from typing import Protocol

import msgspec
import numpy as np

from sglang_jax.engine import validation
from sglang_jax.engine.channel import ClientChannel, Published, Ready, Stopped
from sglang_jax.engine.output import Completion, RequestOutputs, request_error
from sglang_jax.engine.types import ModelInfo
from sglang_jax.engine.watchdog import Watchdog
from sglang_jax.errors import EngineDeadError, UnreadError
from sglang_jax.runner.pulse import Pulse
from sglang_jax.scheduler.messages import (
    AbortRequest,
    Command,
    Inbound,
    NewRequest,
    Reply,
    Result,
    SchedulerStats,
    Shutdown,
    StepOutputs,
    StopRequest,
)

logger = logging.getLogger(__name__)

MAX_UNREAD_BYTES = 32 * 2**20
UNREAD_SECONDS = 0.1
"""Default of the maximum unread memory of all streams, estimated, and seconds between two checks. It leaves slow
readers room for hundreds of thousands of tokens."""

STOP_SECONDS = 5.0
"""Seconds that a core may take to stop at once."""

LAST_WORDS_SECONDS = 0.2
"""Seconds to wait for messages that are still in transit when their sender has ended."""

DUMP_SECONDS = 1.0
"""Seconds that a hanging core gets to write its stacks before it is killed."""

SHUT_DOWN = "the engine was shut down"


class CoreHandle(Protocol):
    """A running engine core, as its link sees it."""

    @property
    def ended(self) -> asyncio.Future[str]:
        """Done once the core has ended; the result says how."""
        ...

    @property
    def pulse(self) -> Pulse | None:
        """Where the core reports progress; None for a core that cannot be killed."""
        ...

    def dump_stacks(self) -> None: ...

    def kill(self) -> None:
        """Kills the core if possible: a process can be killed, a thread cannot."""
        ...


class CoreLink:
    """`Link` over a channel; all methods run on one event loop. A core that hangs counts as lost, like one that died:
    it is killed after it had a moment to log its stacks. `resources`: closed after the core has ended;
    `watchdog_timeout` (None: not watched), `max_unread_bytes`: see `EngineConfig`; `build_timeout`: see `Watchdog`."""

    def __init__(
        self,
        channel: ClientChannel,
        core: CoreHandle,
        ready: Ready,
        resources: contextlib.ExitStack,
        watchdog_timeout: float | None = None,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
        build_timeout: float = math.inf,
    ) -> None:
        self._max_unread_bytes = max_unread_bytes
        self._channel = channel
        self._core = core
        self._ready = ready
        self._resources = resources
        self._requests: set[RequestOutputs] = set()
        self._completions: dict[int, Completion] = {}
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._numbers = itertools.count()
        version = ready.model_info.weight_version
        self._stats = SchedulerStats(programs_left=ready.programs_left, weight_version=version)
        self._closing = False
        self._end: str | None = None
        self._over = asyncio.Event()
        self._unread_at = 0.0
        self._watchdog: Watchdog | None = None
        if watchdog_timeout is not None and core.pulse is not None:
            self._watchdog = Watchdog(core.pulse, watchdog_timeout, self._is_awaited, self._on_hang, build_timeout)
        core.ended.add_done_callback(self._on_core_ended)
        channel.start(self._receive)

    @property
    def model_info(self) -> ModelInfo:
        return self._ready.model_info

    @property
    def max_running_requests(self) -> int:
        return self._ready.max_running_requests

    @property
    def max_total_tokens(self) -> int:
        return self._ready.max_total_tokens

    @property
    def external_load(self) -> int:
        """0: this core has no other clients."""
        return 0

    @property
    def alive(self) -> bool:
        return self._end is None and not self._closing

    @property
    def silent_seconds(self) -> float:
        return 0.0 if self._watchdog is None else self._watchdog.silent_seconds

    @property
    def stats(self) -> SchedulerStats:
        return self._stats

    def check_alive(self) -> None:
        """Raises `EngineDeadError` if the core takes no more requests."""
        if not self.alive:
            raise EngineDeadError(self._end or "the engine is shutting down")

    def submit(self, outputs: RequestOutputs) -> None:
        self.check_alive()
        self._requests.add(outputs)
        tokenized = outputs.request
        request, origin = tokenized.input, tokenized.origin
        room = self.model_info.context_length - len(tokenized.token_ids)
        token_ids, arrival = tokenized.token_ids.tobytes(), time.monotonic()
        logprob_start = request.logprob_start_len if request.return_logprob else -1
        for completion, sampling in zip(outputs.completions, validation.expand(tokenized.sampling, room), strict=True):
            completion.wire_id = next(self._numbers)
            completion.weight_version = self._stats.weight_version
            self._completions[completion.wire_id] = completion
            self._channel.send(
                NewRequest(
                    id=completion.wire_id,
                    token_ids=token_ids,
                    sampling=sampling,
                    stream=request.stream or bool(tokenized.sampling.stop),
                    top_logprobs=request.top_logprobs_num if request.return_logprob else -1,
                    logprob_start=logprob_start,
                    extra_key=tokenized.namespace,
                    priority=request.priority,
                    tenant=origin.tenant,
                    flow=origin.flow,
                    arrival=arrival,
                    session=tokenized.session,
                    shared_len=request.shared_len,
                    background=origin.background,
                    wants=request.wants,
                )
            )
            logprob_start = -1  # the completions share the prompt's logprobs

    def abort(self, outputs: RequestOutputs) -> None:
        for completion in outputs.completions:
            if self._completions.get(completion.wire_id) is completion:
                completion.aborted = True
                self._send_if_alive(AbortRequest(completion.wire_id))

    def release(self, outputs: RequestOutputs) -> None:
        self.abort(outputs)
        for completion in outputs.completions:
            if self._completions.get(completion.wire_id) is completion:
                del self._completions[completion.wire_id]
        self._requests.discard(outputs)

    async def call(self, command: Command[Result]) -> Result:
        self.check_alive()
        numbered = msgspec.structs.replace(command, call=next(self._numbers))
        waiting: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[numbered.call] = waiting
        try:
            self._channel.send(numbered)
            reply = await waiting
        finally:
            self._calls.pop(numbered.call, None)
        if reply.error is not None:
            raise request_error(reply.error)
        return command.read(reply)

    async def ended(self) -> str:
        await self._over.wait()
        return self._end or SHUT_DOWN

    async def close(self, *, drain: bool = False) -> None:
        self._closing = True
        if not drain:
            self._fail_in_flight(SHUT_DOWN)
        self._send_if_alive(Shutdown(drain))
        try:
            await asyncio.wait_for(asyncio.shield(self._core.ended), None if drain else STOP_SECONDS)
        except TimeoutError:
            doing = "waiting for its step in flight" if self._core.pulse is None else "killing its process"
            logger.warning("The engine did not stop within %g s: %s", STOP_SECONDS, doing)
            self._core.kill()
            await self._core.ended
        await self._over.wait()
        self._resources.close()

    def _receive(self, message: Published) -> None:
        match message:
            case StepOutputs():
                self._on_step(message)
                self._look_for_unread()
            case SchedulerStats():
                if message.weight_version != self._stats.weight_version:
                    for completion in self._completions.values():
                        completion.weight_version = message.weight_version
                self._stats = message
            case Reply():
                call = self._calls.pop(message.call, None)
                if call is not None and not call.done():
                    call.set_result(message)
            case Stopped():
                self._on_stopped(message)

    def _on_stopped(self, message: Stopped) -> None:
        if message.failure:
            self._lose(message.failure)
        elif self._closing:
            self._note_end(SHUT_DOWN)
        else:
            self._lose("the engine stopped")

    def _on_core_ended(self, ended: asyncio.Future[str]) -> None:
        # Messages that it sent before it ended still count, and may be in transit.
        asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self._lose, ended.result())

    def _is_awaited(self) -> bool:
        """Whether the core owes an output or a reply. Outputs that it sent and no reader has taken do not count."""
        return bool(self._completions or self._calls)

    def _on_hang(self, what: str) -> None:
        self._lose(f"the engine process hangs: {what}")
        self._core.dump_stacks()
        asyncio.get_running_loop().call_later(DUMP_SECONDS, self._core.kill)

    def _lose(self, reason: str) -> None:
        if self._end is None:
            logger.error("The engine is lost: %s", reason)
            self._note_end(f"the engine is lost: {reason}")

    def _note_end(self, reason: str) -> None:
        self._end = reason
        if self._watchdog is not None:
            self._watchdog.stop()
        self._fail_in_flight(reason)
        self._over.set()

    def _fail_in_flight(self, reason: str) -> None:
        for outputs in self._requests:
            outputs.fail(EngineDeadError(reason, started=outputs.started))
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineDeadError(reason))
        self._calls.clear()

    def _send_if_alive(self, message: Inbound) -> None:
        """Sends a message that may be lost if the engine has ended."""
        with contextlib.suppress(EngineDeadError):
            self._channel.send(message)

    def _look_for_unread(self) -> None:
        """Ends the streams with the most unread bytes until all fit the limit. Without it, an engine that is faster
        than its clients would fill the memory."""
        now = time.monotonic()
        if now < self._unread_at:
            return
        self._unread_at = now + UNREAD_SECONDS
        waiting = {outputs: outputs.unread_bytes for outputs in self._requests}
        total = sum(waiting.values())
        while total > self._max_unread_bytes:
            outputs = max(waiting, key=waiting.__getitem__)
            size = waiting.pop(outputs)
            logger.warning(
                "Ended a stream because its client does not read it: %d MiB unread, %d MiB in all streams",
                size >> 20,
                total >> 20,
            )
            self.release(outputs)
            outputs.give_up(
                UnreadError(
                    f"{size} bytes of this stream are unread, and {total} of all streams; the limit for all is "
                    f"{self._max_unread_bytes} (--max-unread-bytes). Read streams as they come, and ask for fewer "
                    "logprobs of prompts at a time"
                )
            )
            total -= size

    def _on_step(self, step: StepOutputs) -> None:
        """Passes a step's outputs on. Logprobs come before tokens, because a token may end its output."""
        completions = self._completions
        for started in step.started:
            if started.id in completions:
                completions[started.id].cached_tokens = started.cached_tokens
                completions[started.id].queue_seconds = started.queue_seconds
                completions[started.id].prompt_tokens = started.prompt_tokens or completions[started.id].prompt_tokens
                completions[started.id].begin(drafting=started.drafting)
        for wire_id in step.retracted:
            if wire_id in completions:
                completions[wire_id].note_retraction()
        for wire_id, drafts, accepted in np.frombuffer(step.drafts, "<i8").reshape(-1, 3).tolist():
            if wire_id in completions:
                completions[wire_id].note_drafts(drafts, accepted)
        for wire_id, entries in step.prompt_logprobs:
            if wire_id in completions:
                completions[wire_id].add_prompt_logprobs(entries)
        for wire_id, numbers in step.pooled:
            if wire_id in completions:
                completions[wire_id].pooled = np.frombuffer(numbers, "<f4")
        for wire_id, entry in step.logprobs:
            if wire_id in completions:
                completions[wire_id].add_logprob(entry)
        ids, tokens = np.frombuffer(step.ids, "<i8").tolist(), np.frombuffer(step.tokens, "<i4").tolist()
        for wire_id, token_id in zip(ids, tokens, strict=True):
            completion = completions.get(wire_id)
            if completion is None:
                continue
            if completion.push(token_id):
                if completion.finish is not None:
                    del completions[wire_id]
                self._send_if_alive(StopRequest(wire_id, completion.num_tokens))
            elif completion.outputs.stream:
                completion.outputs.wake()
        for finished in step.finished:
            completion = completions.pop(finished.id, None)
            if completion is not None:
                completion.end(finished)
