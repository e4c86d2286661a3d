"""What a request has produced so far, between the wire and whoever reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import numpy as np

from sglang_jax import errors
from sglang_jax.engine.detokenizer import OutputText
from sglang_jax.engine.types import FinishKind, FinishReason, GenerateOutput, TokenLogprob
from sglang_jax.errors import EngineDeadError, RequestError
from sglang_jax.scheduler.messages import Finished, WireError, WireLogprob

_ERROR_CLASSES: dict[str, type[RequestError]] = {
    error.__name__: error
    for error in (
        errors.RequestError,
        errors.ParameterError,
        errors.PromptTooLongError,
        errors.QueueFullError,
        errors.CapacityError,
        errors.NumericalError,
    )
}


def request_error(wire: WireError) -> RequestError:
    """The error that the scheduler met, as it would have been raised here."""
    return _ERROR_CLASSES.get(wire.name, RequestError)(wire.message, param=wire.param, code=wire.code)


def token_logprob(wire: WireLogprob) -> TokenLogprob:
    """A position's logprobs as clients see them."""
    return TokenLogprob(wire.token_id, wire.logprob, tuple(zip(wire.top_logprobs, wire.top_ids, strict=True)))


class Completion:
    """One of a request's n outputs: gathers what the scheduler publishes until somebody takes it.

    A reader that is slower than the engine finds more at once; nothing is kept twice, so what waits is never more than
    the output itself.
    """

    def __init__(
        self, outputs: RequestOutputs, *, wire_id: int, index: int, prompt_tokens: int, text: OutputText
    ) -> None:
        self.wire_id = wire_id
        self.outputs = outputs
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.finish: FinishReason | None = None
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] | None = None
        self._index = index
        self._text = text
        self._tokens: list[int] = []
        self._new_text: list[str] = []
        self._taken_text = ""
        self._taken_tokens = 0
        self._taken_logprobs = 0
        self._taken_finish = False

    def add_prompt_logprobs(self, entries: Sequence[WireLogprob]) -> None:
        """Appends the logprobs of the next prompt positions."""
        if self.prompt_logprobs is None:
            self.prompt_logprobs = []
        self.prompt_logprobs.extend(token_logprob(entry) for entry in entries)

    def push(self, token_id: int) -> bool:
        """Adds a token; True if its text completed a stop string, which ends the output."""
        self._tokens.append(token_id)
        self._new_text.append(self._text.push(token_id))
        if self._text.matched is None:
            return False
        self._finish(FinishReason(FinishKind.STOP, self._text.matched))
        return True

    def end(self, message: Finished) -> None:
        """The scheduler's last word on this output."""
        self.cached_tokens = message.cached_tokens
        for token_id in np.frombuffer(message.tokens, "<i4").tolist():
            self._tokens.append(token_id)
            self._new_text.append(self._text.push(token_id))
        error = request_error(message.error) if message.error is not None else None
        self.end_with(FinishReason(FinishKind(message.kind), message.matched_token, error))

    def end_with(self, reason: FinishReason) -> None:
        """Ends the output and shows the text that was held back."""
        self._new_text.append(self._text.flush())
        if self._text.matched is not None:
            reason = FinishReason(FinishKind.STOP, self._text.matched)
        self._finish(reason)

    def _finish(self, reason: FinishReason) -> None:
        del self.logprobs[len(self._tokens) :]
        self.finish = reason
        self.outputs.wake()

    @property
    def delivered(self) -> bool:
        """Nothing is left to take, now or later."""
        return self._taken_finish

    @property
    def has_news(self) -> bool:
        """Something to take: a new token, or the end."""
        return len(self._tokens) > self._taken_tokens or (self.finish is not None and not self._taken_finish)

    def take(self) -> GenerateOutput:
        """The state of the output, and what is new in it since the last call."""
        delta_text = "".join(self._new_text)
        self._new_text.clear()
        self._taken_text += delta_text
        output = GenerateOutput(
            request_id=self.outputs.request_id,
            index=self._index,
            text=self._taken_text,
            delta_text=delta_text,
            output_ids=self._tokens.copy(),
            delta_ids=self._tokens[self._taken_tokens :],
            prompt_tokens=self.prompt_tokens,
            completion_tokens=len(self._tokens),
            cached_tokens=self.cached_tokens,
            finish=self.finish,
            logprobs=self.logprobs.copy(),
            delta_logprobs=self.logprobs[self._taken_logprobs :],
            prompt_logprobs=self.prompt_logprobs,
        )
        self._taken_tokens = len(self._tokens)
        self._taken_logprobs = len(self.logprobs)
        self._taken_finish = self.finish is not None
        return output


class RequestOutputs:
    """The outputs of one request, for the one task that reads them.

    **Arguments:** `stream`: outputs are given as they grow, otherwise each once, finished.
    """

    def __init__(self, request_id: str, *, stream: bool) -> None:
        self.request_id = request_id
        self.stream = stream
        self.completions: Sequence[Completion] = ()
        self.aborted = False
        self.started = False
        self._news = asyncio.Event()
        self._lost: str | None = None

    def wake(self) -> None:
        """Tells the reader that there is something to take."""
        self._news.set()

    def lose(self, reason: str) -> None:
        """The engine is gone: the reader gets what is finished, then `EngineDeadError`."""
        self._lost = reason
        self._news.set()

    async def read(self) -> AsyncGenerator[GenerateOutput, None]:
        """Outputs until each completion has given its last. Raises `EngineDeadError`."""
        waiting = list(self.completions)
        while waiting:
            await self._news.wait()
            self._news.clear()
            for completion in waiting:
                if completion.finish is not None or (self.stream and completion.has_news):
                    yield completion.take()
            waiting = [completion for completion in waiting if not completion.delivered]
            if self._lost is not None and waiting and all(completion.finish is None for completion in waiting):
                raise EngineDeadError(self._lost, started=self.started)
