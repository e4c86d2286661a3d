"""The state that all routes share: the engine, the options, the metrics, and the requests in flight."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Self, TypeVar

from sglang_jax.config import ServerConfig
from sglang_jax.engine.batch import FLIGHTS_PER_ROW
from sglang_jax.engine.fair_threads import FairThreads
from sglang_jax.engine.types import EngineClient, GenerateInput, Origin, OutputDelta
from sglang_jax.errors import ModelNotFoundError, ParameterError, RequestError, quote
from sglang_jax.sampling import GenerationDefaults, SamplingParams
from sglang_jax.server.background import BackgroundRuns
from sglang_jax.server.callers import NO_CLAIM, Caller, Callers, Claim, Usage, current_caller
from sglang_jax.server.errors import ShuttingDownError, note_error
from sglang_jax.server.file_store import FileStore
from sglang_jax.server.json_body import LongWork
from sglang_jax.server.logprobs import HeldLogprobs
from sglang_jax.server.metrics import ServerMetrics
from sglang_jax.server.responses_store import ResponseStore
from sglang_jax.server.sampling import rename_field, renamed_fields
from sglang_jax.server.shutdown import Shutdown
from sglang_jax.server.streaming import FEW_LOGPROBS, logprobs_to_write
from sglang_jax.server.tracing import current_trace, note_model, traced

Rendered = TypeVar("Rendered")
Written = TypeVar("Written")

ANY_MODEL = "default"
"""A model name that every server accepts."""

STARTS_PER_TURN = 2
"""Completions of one request, at least one prompt's, that start before other work: checking and sending takes time."""

SHORT_CHAT = 16_384
"""Maximum characters of a chat that is rendered without waiting for longer ones; each message adds some."""

WRITER_REST = 1.0
"""After a long answer was written, no other starts for this many times as long: meanwhile the event loop waits up to
`serve.SWITCH_SECONDS` for Python's lock each time it has work."""

LOGPROBS_AT_ONCE = 2**19
"""Maximum prompt logprobs of one request that wait at once, with alternatives, each of some twenty bytes until written:
prompts with many start a few at a time."""

SECONDS_PER_DAY = 86_400.0

ENGINE_NAMES = {"request_id": "rid"}
"""The engine's names of fields, and the names that clients use on all routes."""


@dataclass(slots=True)
class ServerContext:
    """One engine behind HTTP. `draining`: requests in flight finish, new ones are refused; `shutdown` ends requests in
    flight; `in_flight`: HTTP requests that generate, by id, each with the ids of its prompts in the engine;
    `in_engine`: callers by the ids of all prompts; `files`: those of clients, None for a server without; `responses`:
    those that are stored; `background`: replies that continue without their client."""

    client: EngineClient
    config: ServerConfig
    metrics: ServerMetrics
    callers: Callers
    files: FileStore | None = None
    draining: bool = False
    shutdown: Shutdown = field(default_factory=Shutdown)
    in_flight: dict[str, tuple[str, ...]] = field(default_factory=dict)
    in_engine: dict[str, Caller] = field(default_factory=dict)
    long_work: LongWork = field(default_factory=LongWork)
    responses: ResponseStore = field(init=False)
    background: BackgroundRuns = field(default_factory=BackgroundRuns)
    _logprobs: HeldLogprobs = field(init=False)
    _templates: FairThreads = field(default_factory=lambda: FairThreads(1, "chat-template"))
    _short_templates: FairThreads = field(default_factory=lambda: FairThreads(1, "short-chat-template"))

    _writer: FairThreads = field(default_factory=lambda: FairThreads(1, "long-answers", rest=WRITER_REST))
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        config = self.config
        self._logprobs = HeldLogprobs(config.max_logprobs_per_response)
        self.responses = ResponseStore(
            config.response_store,
            most=config.max_stored_responses,
            most_bytes=config.max_response_store_bytes,
            seconds=config.response_store_days * SECONDS_PER_DAY,
        )

    @property
    def generation_defaults(self) -> GenerationDefaults:
        return self.client.model_info.generation_defaults

    def check_model(self, model: str | None) -> None:
        """Raises `ModelNotFoundError` for a name that is not the served model's."""
        note_model(model)
        names = self.config.model_names
        if model not in (None, ANY_MODEL, *names):
            raise ModelNotFoundError(
                f"the model {quote(model)} is not served here; this server serves {', '.join(map(repr, names))}",
                param="model",
            )

    async def render(self, work: Callable[[], Rendered], *, size: int, request_id: str) -> Rendered:
        """Returns the result of `work`, which runs a chat template on about `size` characters, in a thread, one at a
        time, in the fair order of callers and their requests. Short chats have a separate thread and do not wait for
        long ones."""
        threads = self._short_templates if size <= SHORT_CHAT else self._templates
        return await threads.run(work, size=size, tenant=current_caller().name, flow=request_id)

    async def write_answer(self, write: Callable[[], Written], outputs: Iterable[OutputDelta]) -> Written:
        """Returns the result of `write`, which encodes the outputs. With many completions or logprobs, that is done in
        a thread, so that requests need not wait: one at a time, half of the time, in the fair order of callers."""
        size = logprobs_to_write(outputs)
        if size <= FEW_LOGPROBS:
            return write()
        work, flow = partial(copy_context().run, write), str(next(self._numbers))
        return await self._writer.run(work, size=size, tenant=current_caller().name, flow=flow)

    async def encode(
        self, text: str, request_id: str, *, add_special_tokens: bool, max_tokens: int, param: str
    ) -> list[int]:
        """Returns the token ids of a text of a request; see `EngineClient.encode`."""
        return await self.client.encode(
            text,
            current_caller().origin(request_id),
            add_special_tokens=add_special_tokens,
            max_tokens=max_tokens,
            param=param,
        )

    def check_size(self, prompts: int, completions: int, param: str) -> None:
        """Raises `ParameterError` for an HTTP request with too many completions, before they are created."""
        limit = self.config.max_completions_per_request
        if completions > limit:
            raise ParameterError(
                f"{param} has {prompts} prompts, with n {quote(completions)} completions; the limit per request is "
                f"{limit} (--max-completions-per-request)",
                param=param,
            )

    def check_texts(self, texts: int, param: str) -> None:
        """Raises `ParameterError` for an HTTP request with too many texts to tokenize."""
        limit = self.config.max_completions_per_request
        if texts > limit:
            raise ParameterError(
                f"{param} has {texts} texts; the limit per request is {limit} (--max-completions-per-request); send "
                "them in several",
                param=param,
            )

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raises `ParameterError` for stop strings or a grammar that are longer than the options allow."""
        characters, most = sum(map(len, sampling.stop)), self.config.max_stop_characters
        if characters > most:
            raise ParameterError(
                f"stop may hold at most {most} characters together (--max-stop-characters), got {characters}",
                param="stop",
            )
        grammar, most = sampling.grammar, self.config.max_grammar_characters
        if grammar is not None and len(grammar.text) > most:
            raise ParameterError(
                f"{grammar.field} has {len(grammar.text)} characters, the limit is {most} (--max-grammar-characters)",
                param=grammar.field,
            )

    def generate(
        self,
        request_id: str,
        prompts: Sequence[GenerateInput],
        field_names: Mapping[str, str] = ENGINE_NAMES,
        claimed: Claim = NO_CLAIM,
    ) -> Call:
        """Returns the call of one HTTP request's prompts, which have their `request_id`, for `async with`.
        `field_names`: the route's names of the engine's fields; `claimed`: see `Caller.origin`."""
        return Call(self, request_id, prompts, field_names, current_caller(), claimed)

    async def collect(
        self,
        request_id: str,
        prompts: Sequence[GenerateInput],
        write: Callable[[list[list[OutputDelta]]], Written],
        field_names: Mapping[str, str] = ENGINE_NAMES,
        claimed: Claim = NO_CLAIM,
    ) -> Written:
        """Generates, and returns the result of `write` for each prompt's outputs by index. Raises `RequestError`."""
        outputs: list[list[OutputDelta]] = [[] for _ in prompts]
        with self._logprobs.share() as hold:  # until the answer is written
            async with self.generate(request_id, prompts, field_names, claimed) as deltas:
                with renamed_fields(field_names):
                    async for number, output in deltas:
                        hold(output)
                        outputs[number].append(output)
            finished = [sorted(some, key=lambda output: output.index) for some in outputs]
            return await self.write_answer(lambda: write(finished), chain(*finished))

    def abort(self, request_id: str) -> None:
        """Aborts the HTTP request or prompt with this id. Ignores unknown ids and, except for operators, others'
        ids."""
        caller = current_caller()
        for engine_id in self.in_flight.get(request_id, (request_id,)):
            if caller.admin or self.in_engine.get(engine_id) is caller:
                self.client.abort(engine_id)

    def enter(self, request_id: str, prompts: Sequence[GenerateInput], caller: Caller) -> None:
        """Adds a request to those in flight. Raises `ShuttingDownError`; `ParameterError` for an id that is in use."""
        if self.draining:
            raise ShuttingDownError("the server is shutting down and accepts no new requests")
        ids = tuple(prompt.request_id or "" for prompt in prompts)
        taken = [name for name in {request_id, *ids} if name in self.in_flight or name in self.in_engine]
        if taken or len(set(ids)) < len(ids):
            which = quote(taken[0]) if taken else "a duplicate in the list"
            raise ParameterError(f"rid must be unique among the requests in flight, got {which}", param="rid")
        self.in_flight[request_id] = ids
        self.in_engine.update(dict.fromkeys(ids, caller))

    def leave(self, request_id: str) -> None:
        for engine_id in self.in_flight.pop(request_id):
            del self.in_engine[engine_id]


class Call:
    """One HTTP request at the engine: an iterator over the deltas of its prompts as they arrive, each with its prompt's
    number. Leaving its `async with` aborts what still runs. Raises `RequestError`: on entry for requests that the
    caller may not make, later as soon as one prompt fails.

    It has plain coroutines, because each generator on the way costs a microsecond per token.
    """

    def __init__(
        self,
        context: ServerContext,
        request_id: str,
        prompts: Sequence[GenerateInput],
        field_names: Mapping[str, str],
        caller: Caller,
        claimed: Claim,
    ) -> None:
        self._context = context
        self._request_id = request_id
        self._field_names = field_names
        self._caller = caller
        self._origin = caller.origin(request_id, claimed)
        self._prompts = prompts
        self._single: PromptStream | None = None
        self._merged: MergedStreams | None = None
        self._usage = None if caller.tokens is None else Usage(caller.tokens)
        self._completions = 0

    async def __aenter__(self) -> Self:
        prompts = self._prompts
        if (trace := current_trace()) is not None:
            trace.call(self._request_id, prompts)
        for prompt in prompts:
            self._context.check_sampling(prompt.sampling)
        self._completions = self._caller.enter(prompts)
        try:
            self._context.enter(self._request_id, prompts, self._caller)
        except RequestError:
            self._caller.leave(self._completions)
            raise
        if len(prompts) > 1:
            most = FLIGHTS_PER_ROW * self._context.client.max_running_requests
            most_each = max(prompt.sampling.n for prompt in prompts)
            most_logprobs = max(map(_prompt_logprobs, prompts))
            at_once = min(len(prompts), max(1, most // most_each), max(1, LOGPROBS_AT_ONCE // max(1, most_logprobs)))
            self._merged = MergedStreams(map(self._stream, prompts), at_once, max(1, STARTS_PER_TURN // most_each))
        else:
            self._single = self._stream(prompts[0])
        return self

    def _stream(self, prompt: GenerateInput) -> PromptStream:
        return PromptStream(self._context, prompt, self._origin)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._merged is not None:
                await self._merged.close()
            elif self._single is not None:
                await self._single.close()
        finally:
            self._context.leave(self._request_id)
            self._caller.leave(self._completions)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, OutputDelta]:
        try:
            if self._merged is not None:
                number, delta = await self._merged.next()
            else:
                assert self._single is not None, "not entered"
                number, delta = 0, await self._single.next()
        except RequestError as error:
            rename_field(error, self._field_names)
            note_error(error)
            raise
        if self._usage is not None:
            self._usage.add(number, delta)
        return number, delta


class PromptStream:
    """The deltas of one prompt, whose times are recorded. Raises the error of a failed output."""

    def __init__(self, context: ServerContext, prompt: GenerateInput, origin: Origin) -> None:
        prompt, self._trace = traced(prompt)
        self._deltas = context.client.generate(prompt, origin)
        self._timing = context.metrics.timing(stream=prompt.stream)

    async def next(self) -> OutputDelta:
        """Returns the next delta. Raises `StopAsyncIteration` after the last, and `RequestError`."""
        try:
            delta = await anext(self._deltas)
        except StopAsyncIteration:
            self._timing.answered()
            raise
        if self._trace is not None:
            self._trace.output(delta)
        finish = delta.finish
        if finish is not None and finish.error is not None:
            raise finish.error
        self._timing.output(delta)
        return delta

    async def close(self) -> None:
        await self._deltas.aclose()


class MergedStreams:
    """The deltas of several prompts as they arrive. At most `at_once` of `streams`, created as needed, run or wait in
    the engine, so that other requests come before the rest. `per_turn` start before the event loop does other work."""

    def __init__(self, streams: Iterator[PromptStream], at_once: int, per_turn: int) -> None:
        # One place: while a stream waits to put its delta here, the engine merges its further deltas into one.
        self._ready: asyncio.Queue[tuple[int, OutputDelta] | Exception | None] = asyncio.Queue(maxsize=1)
        self._producer = asyncio.create_task(self._forward_all(streams, at_once, per_turn))

    async def next(self) -> tuple[int, OutputDelta]:
        """Returns a stream's number and next delta. Raises `StopAsyncIteration`, and the first stream's error."""
        numbered = await self._ready.get()
        if numbered is None:
            raise StopAsyncIteration
        if isinstance(numbered, Exception):
            raise numbered
        return numbered

    async def close(self) -> None:
        self._producer.cancel()
        await asyncio.wait({self._producer})

    async def _forward_all(self, streams: Iterator[PromptStream], at_once: int, per_turn: int) -> None:
        todo = enumerate(streams)
        try:
            async with asyncio.TaskGroup() as tasks:
                for started in range(at_once):
                    tasks.create_task(self._forward_each(todo))
                    if started % per_turn == per_turn - 1:
                        await asyncio.sleep(0)
        except ExceptionGroup as group:
            await self._ready.put(group.exceptions[0])  # raised by `next`
        else:
            await self._ready.put(None)

    async def _forward_each(self, todo: Iterator[tuple[int, PromptStream]]) -> None:
        for number, stream in todo:
            try:
                while True:
                    await self._ready.put((number, await stream.next()))
            except StopAsyncIteration:
                pass
            finally:
                await stream.close()


def _prompt_logprobs(prompt: GenerateInput) -> int:
    """Number of a prompt's logprobs with alternatives; for a text, an upper bound."""
    if not prompt.return_logprob or prompt.logprob_start_len < 0:
        return 0
    return max(0, len(prompt.prompt) - prompt.logprob_start_len) * (1 + prompt.top_logprobs_num)


def new_id(prefix: str) -> str:
    """Returns a random id for a response, such as `chatcmpl-0f...`."""
    return f"{prefix}-{uuid.uuid4().hex}"


def prompt_ids(request_id: str, count: int) -> list[str]:
    """Returns the engine's ids for the prompts of one HTTP request."""
    return [request_id] if count == 1 else [f"{request_id}-{number}" for number in range(count)]
