"""Traces of requests: when each one waited, was prefilled and decoded. `otlp.py` writes them as spans."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_jax.engine.types import FinishKind, GenerateInput, OutputDelta
from sglang_jax.errors import RequestError, cut
from sglang_jax.server.callers import Caller
from sglang_jax.server.errors import CLIENT_CLOSED_REQUEST, NOTE_ERROR
from sglang_jax.server.token_count import TokenCount

OPERATIONS: Mapping[str, str] = {
    "/generate": "text_completion",
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/api/generate": "text_completion",
}
"""The routes that generate, and the names of OpenTelemetry's conventions for what they do."""

OPERATIONS_ON_TEXTS: Mapping[str, str] = {
    "/v1/embeddings": "embeddings",
    "/classify": "classify",
    "/v1/classify": "classify",
    "/v1/score": "score",
    "/score": "score",
    "/v1/rerank": "rerank",
    "/rerank": "rerank",
    "/v2/rerank": "rerank",
}
"""The routes for vectors and scores with their other names, and what they do; the conventions have only the first."""

_TRACED = {**OPERATIONS, **OPERATIONS_ON_TEXTS}

PROVIDER = "sglang_jax"

MAX_TRACED_COMPLETIONS = 32
"""Maximum completions of a request with spans: the first ones."""

Value = str | bool | int | float | Sequence[str]


class Span(Protocol):
    """The span of a request. `recording`: whether anything is kept of it, which its client or a sampler decides."""

    @property
    def recording(self) -> bool: ...

    def headers(self) -> dict[str, str]:
        """Headers by which another server continues the trace."""
        ...

    def child(
        self, name: str, start: int, end: int, attributes: Mapping[str, Value], events: Sequence[tuple[str, int]] = ()
    ) -> None:
        """Adds a finished span. Times are Unix times in nanoseconds; `events`: names and times."""
        ...

    def end(self, end: int, attributes: Mapping[str, Value], error: str | None) -> None:
        """Ends the span. `error`: the kind of error, if the request failed."""
        ...


class SpanWriter(Protocol):
    def start(self, name: str, headers: Mapping[str, str], start: int, attributes: Mapping[str, Value]) -> Span:
        """Starts the span of a request. `headers`: the client's, whose trace it continues."""
        ...


@dataclass(slots=True)
class CompletionTrace:
    """Times of one completion, by `time.monotonic()`. `row`: when it got a row; `first` and `last`: when its first and
    its last token were sampled; `retracted`: when it lost its row."""

    queued: float
    row: float | None = None
    first: float | None = None
    last: float | None = None
    end: float | None = None
    retracted: list[float] = field(default_factory=list)
    newest: OutputDelta | None = None


class PromptTrace:
    """Times of one prompt's completions. The engine calls `started` and `retracted`, see `Progress`."""

    def __init__(self, request: RequestTrace, number: int, prompt: GenerateInput) -> None:
        self._request = request
        self._number = number
        self._stream = prompt.stream
        now = time.monotonic()
        self.completions = [CompletionTrace(now) for _ in range(prompt.sampling.n)]

    def started(self, index: int, queue_seconds: float) -> None:
        one, now = self.completions[index], time.monotonic()
        one.row, one.queued = now, max(one.queued, now - queue_seconds)

    def retracted(self, index: int) -> None:
        self.completions[index].retracted.append(time.monotonic())

    def output(self, delta: OutputDelta) -> None:
        """Notes a delta. The engine says at the end when tokens were sampled; of a stream that is cut off before, the
        times are those at which deltas arrived."""
        one, now = self.completions[delta.index], time.monotonic()
        one.newest = delta
        self._request.tokens.add(self._number, delta)
        if self._stream and delta.completion_tokens:
            one.first, one.last = one.first or now, now
        if delta.sampled is not None:
            one.first, one.last = delta.sampled
        if delta.finish is not None:
            one.end = now


class RequestTrace:
    """The trace of one HTTP request. It ends when nobody holds it any more: the request, and a reply that continues in
    the background. `begin`: when the request came, by `time.monotonic_ns()`; `epoch`: the Unix time in nanoseconds at
    which that clock was 0."""

    def __init__(self, span: Span, model: str, begin: int, epoch: int) -> None:
        self.span = span
        self.tokens = TokenCount(Caller("traces"))
        self.model = model
        self.asked_model: str | None = None
        self.status = CLIENT_CLOSED_REQUEST
        self.error: str | None = None
        self._begin = begin / 1e9
        self._epoch = epoch
        self._holders = 1
        self.response_id = ""
        self._inputs: Sequence[GenerateInput] = ()
        self._prompts: list[PromptTrace] = []

    def call(self, request_id: str, prompts: Sequence[GenerateInput]) -> None:
        """Notes what the request asks of the engine."""
        self.response_id, self._inputs = self.response_id or request_id, prompts

    def prompt(self, prompt: GenerateInput) -> PromptTrace:
        """Returns the trace of the request's next prompt."""
        trace = PromptTrace(self, len(self._prompts), prompt)
        self._prompts.append(trace)
        return trace

    def note_error(self, error: RequestError) -> None:
        """Notes why the request failed; the first error counts."""
        if self.error is None:
            self.error = error.code or type(error).__name__

    def hold(self) -> Callable[[object], None]:
        """Keeps the trace open until the result is called."""
        self._holders += 1
        return lambda _: self.release()

    def release(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._end()

    def _end(self) -> None:
        end = time.monotonic()
        completions = [one for prompt in self._prompts for one in prompt.completions]
        for number, one in enumerate(completions[:MAX_TRACED_COMPLETIONS]):
            self._write(number, one, end)
        expected = sum(prompt.sampling.n for prompt in self._inputs)
        cut_off = sum(one.end is not None for one in completions) < expected
        error = self.error
        if error is None and (self.status == CLIENT_CLOSED_REQUEST or (cut_off and self.status < 400)):
            error = "cancelled"
        elif error is None and self.status >= 400:
            error = str(self.status)
        attributes: dict[str, Value] = {"http.response.status_code": self.status}
        if self.asked_model is not None:
            attributes["gen_ai.request.model"] = self.asked_model
        if self._inputs:
            attributes |= _request_attributes(self._inputs)
            attributes |= self._response_attributes(completions)
        self.span.end(self._unix(end), attributes, error)

    def _response_attributes(self, completions: Sequence[CompletionTrace]) -> dict[str, Value]:
        tokens = self.tokens
        found: dict[str, Value] = {
            "gen_ai.response.model": self.model,
            "gen_ai.response.id": self.response_id,
            "gen_ai.response.finish_reasons": [_finish_of(one) for one in completions],
            "gen_ai.usage.input_tokens": tokens.prompt_tokens,
            "gen_ai.usage.output_tokens": tokens.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": tokens.cached_tokens,
        }
        firsts = [one.first for one in completions if one.first is not None]
        if firsts:
            found["gen_ai.server.time_to_first_token"] = max(min(firsts) - self._begin, 0.0)
        if retractions := sum(len(one.retracted) for one in completions):
            found["sglang_jax.retractions"] = retractions
        return found

    def _write(self, number: int, one: CompletionTrace, end: float) -> None:
        """Writes the spans of a completion. One that another server runs has none here, because only that server knows
        when it got a row."""
        newest = one.newest
        ended = end if one.end is None else one.end
        attributes: dict[str, Value] = {"sglang_jax.completion": number}
        if one.row is None:
            if newest is None:
                self._child("queue", one.queued, ended, attributes)
            return
        row = one.row if one.first is None else min(one.row, one.first)
        first = ended if one.first is None else one.first
        self._child("queue", min(one.queued, row), row, attributes)
        prefill, decode = dict(attributes), dict(attributes)
        if newest is not None:
            prefill["gen_ai.usage.input_tokens"] = newest.prompt_tokens
            prefill["gen_ai.usage.cache_read.input_tokens"] = newest.cached_tokens
            decode["gen_ai.usage.output_tokens"] = newest.completion_tokens
            decode["gen_ai.response.finish_reasons"] = [_finish_of(one)]
        last = first if one.last is None else max(one.last, first)
        lost = one.retracted
        self._child("prefill", row, first, prefill, [moment for moment in lost if one.first is None or moment <= first])
        if one.first is not None:
            self._child("decode", first, last, decode, [moment for moment in lost if moment > first])

    def _child(
        self, name: str, start: float, end: float, attributes: Mapping[str, Value], retracted: Sequence[float] = ()
    ) -> None:
        # The server hears of a retraction a little later than it was, sometimes only after the last token.
        events = [("retracted", self._unix(min(moment, end))) for moment in retracted]
        self.span.child(name, self._unix(start), self._unix(end), attributes, events)

    def _unix(self, moment: float) -> int:
        return self._epoch + int(moment * 1e9)


def _request_attributes(prompts: Sequence[GenerateInput]) -> dict[str, Value]:
    """What the request asks for, by its first prompt: no text of a client."""
    sampling = prompts[0].sampling
    if sampling.max_new_tokens == 0:  # nothing is sampled
        return {"sglang_jax.prompts": len(prompts)} if len(prompts) > 1 else {}
    found: dict[str, Value] = {
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.stream": prompts[0].stream,
    }
    if sampling.max_new_tokens is not None:
        found["gen_ai.request.max_tokens"] = sampling.max_new_tokens
    if sampling.seed is not None:
        found["gen_ai.request.seed"] = sampling.seed
    if sampling.n > 1:
        found["gen_ai.request.choice.count"] = sampling.n
    if len(prompts) > 1:
        found["sglang_jax.prompts"] = len(prompts)
    return found


def _finish_of(one: CompletionTrace) -> str:
    finish = None if one.newest is None else one.newest.finish
    return (FinishKind.ABORT if finish is None else finish.kind).value


_TRACE: ContextVar[RequestTrace | None] = ContextVar("trace", default=None)


def current_trace() -> RequestTrace | None:
    """The trace of the current request, if anything of it is kept."""
    trace = _TRACE.get()
    return trace if trace is not None and trace.span.recording else None


def trace_headers() -> dict[str, str]:
    """Headers by which another server continues the current request's trace; none without a trace."""
    trace = _TRACE.get()
    return {} if trace is None else trace.span.headers()


def note_model(model: str | None) -> None:
    """Notes the model's name in a request."""
    trace = current_trace()
    if trace is not None and model is not None:
        trace.asked_model = cut(model)


def note_response_id(response_id: str) -> None:
    """Notes the id of the current request's answer, if it is not the request's."""
    trace = current_trace()
    if trace is not None:
        trace.response_id = response_id


def traced(prompt: GenerateInput) -> tuple[GenerateInput, PromptTrace | None]:
    """Returns a prompt that reports to the current trace, and its part of the trace; without one, the same prompt."""
    request = current_trace()
    if request is None:
        return prompt, None
    trace = request.prompt(prompt)
    return replace(prompt, progress=trace), trace


def _joined(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Returns headers by their names in small letters. Values of repeated ones are joined, as for `tracestate`
    (RFC 9110, section 5.3); a `traceparent` with two values is invalid, and so ignored."""
    headers: dict[str, str] = {}
    for name, value in raw:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        headers[key] = f"{headers[key]},{text}" if key in headers else text
    return headers


class Traced:
    """Around an application: writes a span for each request to a route that generates, in which its parts note what
    they know."""

    def __init__(self, app: ASGIApp, writer: SpanWriter, model: str) -> None:
        self._app = app
        self._writer = writer
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = scope["path"].rstrip("/") if scope["type"] == "http" and scope["method"] == "POST" else ""
        if route not in _TRACED:
            await self._app(scope, receive, send)
            return
        operation = _TRACED[route]
        attributes: dict[str, Value] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,
            "http.request.method": "POST",
            "http.route": route,
        }
        headers = _joined(scope["headers"])
        begin = time.monotonic_ns()
        epoch = time.time_ns() - begin
        span = self._writer.start(f"{operation} {self._model}", headers, epoch + begin, attributes)
        trace = RequestTrace(span, self._model, begin, epoch)
        token, noting = _TRACE.set(trace), NOTE_ERROR.set(trace.note_error)

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                trace.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            _TRACE.reset(token)
            NOTE_ERROR.reset(noting)
            trace.release()
