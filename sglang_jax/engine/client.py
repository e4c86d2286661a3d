"""The engine as the server and `Engine` see it: validates, tokenizes, routes what the core publishes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_jax.engine import validation
from sglang_jax.engine.channel import ClientChannel, Published, Ready, Stopped
from sglang_jax.engine.detokenizer import OutputText
from sglang_jax.engine.output import Completion, RequestOutputs
from sglang_jax.engine.prompt_reader import PromptReader
from sglang_jax.engine.types import (
    FinishKind,
    FinishReason,
    GenerateInput,
    ModelInfo,
    OutputDelta,
    ReplicaLoad,
    ReplicaState,
    TextTokenizer,
)
from sglang_jax.errors import EngineDeadError, ParameterError
from sglang_jax.scheduler.messages import (
    AbortRequest,
    FlushCache,
    GetState,
    Inbound,
    NewRequest,
    Reply,
    SchedulerStats,
    Shutdown,
    StepOutputs,
    StopRequest,
)

logger = logging.getLogger(__name__)

STOP_SECONDS = 5.0
"""How long a core that was told to stop at once may take."""

LAST_WORDS_SECONDS = 0.2
"""How long messages may be on their way once their sender has ended."""

SHUT_DOWN = "the engine was shut down"


class CoreHandle(Protocol):
    """The running engine core, as its client holds it."""

    @property
    def ended(self) -> asyncio.Future[str]:
        """Done once the core is gone; the result tells how it ended."""
        ...

    def kill(self) -> None:
        """Ends the core by force if that is possible: a process can be killed, a thread cannot."""
        ...


class AsyncEngineClient:
    """`EngineClient` over a channel. Made by `launch.launch_engine`; all methods run on one event loop.

    **Arguments:** `resources` is closed once the core has ended.
    """

    def __init__(
        self,
        channel: ClientChannel,
        core: CoreHandle,
        ready: Ready,
        tokenizer: TextTokenizer,
        resources: contextlib.ExitStack,
    ) -> None:
        self._channel = channel
        self._core = core
        self._ready = ready
        self._tokenizer = tokenizer
        self._resources = resources
        self._reader = PromptReader(tokenizer)
        self._requests: dict[str, RequestOutputs] = {}
        self._completions: dict[int, Completion] = {}
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._numbers = itertools.count()
        self._stats = SchedulerStats()
        self._closing = False
        self._end: str | None = None
        self._over = asyncio.Event()
        core.ended.add_done_callback(self._on_core_ended)
        channel.start(self._receive)

    @property
    def tokenizer(self) -> TextTokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def model_info(self) -> ModelInfo:
        """What is known of the model."""
        return self._ready.model_info

    @property
    def max_running_requests(self) -> int:
        """Most completions that the engine runs at once."""
        return self._ready.max_running_requests

    @property
    def max_total_tokens(self) -> int:
        """KV tokens that the engine's pool holds."""
        return self._ready.max_total_tokens

    @property
    def foreign_load(self) -> int:
        """See `ServingEngine.foreign_load`: nobody else speaks to this core."""
        return 0

    @property
    def alive(self) -> bool:
        """False once the engine is gone or was told to stop."""
        return self._end is None and not self._closing

    @property
    def stats(self) -> SchedulerStats:
        """The newest snapshot that the scheduler published."""
        return self._stats

    async def generate(self, request: GenerateInput) -> AsyncGenerator[OutputDelta, None]:
        """See `EngineClient.generate`."""
        self._check_alive()
        validation.check_input(request, self.model_info)
        outputs = self._register(request)
        try:
            prompt = await self._reader.token_ids(request.prompt, self.model_info.vocab_size)
            validation.check_length(request, len(prompt), self.model_info.context_length)
            self._check_alive()
            self._submit(request, prompt, outputs)
            while deltas := await outputs.take():
                for delta in deltas:
                    yield delta
        finally:
            self._release(outputs)

    def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`. Its outputs end with what was generated, of kind ABORT."""
        outputs = self._requests.get(request_id)
        if outputs is not None:
            outputs.aborted = True
            self._abort_unfinished(outputs)

    def abort_all(self) -> None:
        """Ends all requests, as `abort` does."""
        for request_id in list(self._requests):
            self.abort(request_id)

    async def flush_cache(self) -> bool:
        """See `EngineClient.flush_cache`."""
        reply = await self._call(FlushCache(next(self._numbers)))
        if not reply.ok:
            logger.info("The prefix cache was not emptied: %s", reply.message)
        return reply.ok

    async def state(self) -> dict[str, object]:
        """The scheduler's and the runner's figures. Raises `EngineDeadError`."""
        reply = await self._call(GetState(next(self._numbers)))
        return dict(reply.state)

    def loads(self) -> list[ReplicaLoad]:
        """See `EngineClient.loads`."""
        state = ReplicaState.SERVING if self.alive else ReplicaState.STOPPED
        return [
            ReplicaLoad(
                index=0,
                state=state,
                max_running_requests=self.max_running_requests,
                max_total_tokens=self.max_total_tokens,
                stats=self._stats,
            )
        ]

    async def states(self) -> list[dict[str, object]]:
        """See `EngineClient.states`."""
        return [await self.state()]

    async def drain(self, index: int | None = None) -> None:
        """See `EngineClient.drain`."""
        raise ParameterError(
            "there is one engine, which cannot be started again while it serves: dp_size must be 2 or more for that",
            param="replica",
        )

    async def ended(self) -> str:
        """Waits until the engine is gone; tells how it ended."""
        await self._over.wait()
        return self._end or SHUT_DOWN

    async def close(self, *, drain: bool = False) -> None:
        """Ends the engine. With `drain`, requests in flight finish first; otherwise they get `EngineDeadError`.

        No new request is taken from the call on. May be called again without `drain` to cut a drain short.
        """
        self._closing = True
        if not drain:
            self._fail_in_flight(SHUT_DOWN)
        self._tell(Shutdown(drain))
        try:
            await asyncio.wait_for(asyncio.shield(self._core.ended), None if drain else STOP_SECONDS)
        except TimeoutError:
            logger.warning("The engine has not stopped within %g s; a process of its own is now killed", STOP_SECONDS)
            self._core.kill()
            await self._core.ended
        await self._over.wait()
        self._reader.close()
        self._resources.close()

    def _receive(self, message: Published) -> None:
        match message:
            case StepOutputs():
                self._on_step(message)
            case SchedulerStats():
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
        # What it published before it ended still counts, and may be on its way.
        asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self._lose, ended.result())

    def _lose(self, reason: str) -> None:
        if self._end is None:
            logger.error("The engine is lost: %s", reason)
            self._note_end(f"the engine is lost: {reason}")

    def _note_end(self, reason: str) -> None:
        self._end = reason
        self._fail_in_flight(reason)
        self._over.set()

    def _fail_in_flight(self, reason: str) -> None:
        for outputs in self._requests.values():
            outputs.lose(reason)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineDeadError(reason))
        self._calls.clear()

    def _check_alive(self) -> None:
        if not self.alive:
            raise EngineDeadError(self._end or "the engine is shutting down")

    def _tell(self, message: Inbound) -> None:
        """Sends what need not arrive if the engine is gone."""
        with contextlib.suppress(EngineDeadError):
            self._channel.send(message)

    def _register(self, request: GenerateInput) -> RequestOutputs:
        request_id = uuid.uuid4().hex if request.request_id is None else request.request_id
        if request_id in self._requests:
            raise ParameterError(f"request_id {request_id!r} belongs to a request that still runs", param="request_id")
        outputs = RequestOutputs(request_id, stream=request.stream)
        self._requests[request_id] = outputs
        return outputs

    def _submit(self, request: GenerateInput, prompt: NDArray[np.int32], outputs: RequestOutputs) -> None:
        room = self.model_info.context_length - len(prompt)
        each = validation.expand(request.sampling, room)
        outputs.completions = [self._completion(request, outputs, index, len(prompt)) for index in range(len(each))]
        if outputs.aborted:  # while its prompt was tokenized
            for completion in outputs.completions:
                completion.end_with(FinishReason(FinishKind.ABORT))
            return
        token_ids = prompt.tobytes()
        arrival = time.monotonic()
        for completion, sampling in zip(outputs.completions, each, strict=True):
            message = NewRequest(
                id=completion.wire_id,
                token_ids=token_ids,
                sampling=sampling,
                stream=request.stream or bool(request.sampling.stop),
                top_logprobs=request.top_logprobs_num if request.return_logprob else -1,
                logprob_start=request.logprob_start_len if request.return_logprob else -1,
                extra_key=request.extra_key,
                priority=request.priority,
                arrival=arrival,
            )
            if request.return_logprob and request.logprob_start_len >= 0:
                completion.prompt_logprobs = []
            self._completions[completion.wire_id] = completion
            self._channel.send(message)

    def _completion(
        self, request: GenerateInput, outputs: RequestOutputs, index: int, prompt_tokens: int
    ) -> Completion:
        sampling = request.sampling
        text = OutputText(
            self._tokenizer.stream_decoder(sampling.skip_special_tokens, continues_text=request.continues_text),
            sampling.stop,
            validation.stop_token_ids(sampling, self.model_info),
            include_stop=sampling.include_stop,
        )
        return Completion(outputs, wire_id=next(self._numbers), index=index, prompt_tokens=prompt_tokens, text=text)

    def _release(self, outputs: RequestOutputs) -> None:
        """The reader is done with a request, or gives it up."""
        self._abort_unfinished(outputs)
        for completion in outputs.completions:
            self._completions.pop(completion.wire_id, None)
        del self._requests[outputs.request_id]

    def _abort_unfinished(self, outputs: RequestOutputs) -> None:
        for completion in outputs.completions:
            if completion.wire_id in self._completions:
                self._tell(AbortRequest(completion.wire_id))

    async def _call(self, message: FlushCache | GetState) -> Reply:
        self._check_alive()
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[message.call] = reply
        try:
            self._channel.send(message)
            return await reply
        finally:
            self._calls.pop(message.call, None)

    def _on_step(self, step: StepOutputs) -> None:
        """One pass over a step. Tokens come after their logprobs, so that a token that ends its output finds them."""
        completions = self._completions
        for started in step.started:
            if started.id in completions:
                completions[started.id].cached_tokens = started.cached_tokens
                completions[started.id].outputs.started = True
        for wire_id, entries in step.prompt_logprobs:
            if wire_id in completions:
                completions[wire_id].add_prompt_logprobs(entries)
        for wire_id, entry in step.logprobs:
            if wire_id in completions:
                completions[wire_id].add_logprob(entry)
        ids, tokens = np.frombuffer(step.ids, "<i8").tolist(), np.frombuffer(step.tokens, "<i4").tolist()
        for wire_id, token_id in zip(ids, tokens, strict=True):
            completion = completions.get(wire_id)
            if completion is None:
                continue
            if completion.push(token_id):
                del completions[wire_id]
                self._tell(StopRequest(wire_id))
            elif completion.outputs.stream:
                completion.outputs.wake()
        for finished in step.finished:
            completion = completions.pop(finished.id, None)
            if completion is not None:
                completion.end(finished)
