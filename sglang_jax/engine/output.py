"""The outputs of a request, buffered between the core's messages and their reader."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_jax import errors
from sglang_jax.config import DEFAULT_WEIGHT_VERSION
from sglang_jax.engine.detokenizer import OutputText
from sglang_jax.engine.packed_logprobs import PackedLogprob, PackedLogprobs, pack, unpack
from sglang_jax.engine.types import FinishKind, FinishReason, GenerateInput, OutputDelta, TokenizedRequest, TokenLogprob
from sglang_jax.errors import RequestError
from sglang_jax.scheduler.messages import DraftCounts, Finished, WireError, WireLogprob

TOKEN_BYTES, LOGPROB_BYTES, ALTERNATIVE_BYTES = 100, 150, 12
"""Estimated bytes of a waiting token, of its logprob, and of each alternative."""

PIECE_LOGPROBS = 2048
"""Maximum logprobs in one delta of a stream; writing them takes about 2 ms."""

_ERROR_CLASSES: dict[str, type[RequestError]] = {
    error.__name__: error
    for error in (
        errors.RequestError,
        errors.ParameterError,
        errors.GrammarError,
        errors.GrammarUnavailableError,
        errors.PromptTooLongError,
        errors.QueueFullError,
        errors.SessionNotFoundError,
        errors.SessionBusyError,
        errors.SessionLimitError,
        errors.CapacityError,
        errors.MemoryReleasedError,
        errors.NumericalError,
    )
}


def request_error(wire: WireError) -> RequestError:
    """Converts a scheduler's error into an exception."""
    return _ERROR_CLASSES.get(wire.name, RequestError)(wire.message, param=wire.param, code=wire.code)


def logprob_bytes(request: GenerateInput) -> int:
    """Estimated bytes of one position's logprobs while they wait."""
    return LOGPROB_BYTES + ALTERNATIVE_BYTES * request.top_logprobs_num


class Completion:
    """One of a request's n outputs. Buffers what its link receives until the reader takes it: a slow reader gets larger
    deltas, and the buffer never holds more than the output. `wire_id`: its id at the link. `aborted`: an abort was
    sent; the core decides how the output ended, so that both sides agree whether the turn of a session counts.
    `weight_version`, `pooled`: set by its link."""

    def __init__(self, outputs: RequestOutputs, *, index: int, prompt_tokens: int, text: OutputText) -> None:
        self.wire_id = 0
        self.outputs = outputs
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.queue_seconds: float | None = None
        self.drafts: DraftCounts | None = None
        self.finish: FinishReason | None = None
        self.weight_version = DEFAULT_WEIGHT_VERSION
        self.pooled: NDArray[np.float32] | None = None
        self.delivered = False
        self.aborted = False
        self._draft_counts: tuple[int, int, int] | None = None
        self._first_taken = False
        self._first_token = 0.0
        self._sampled: tuple[float, float] | None = None
        self._index = index
        self._text = text
        self._num_tokens = 0
        self._num_logprobs = 0
        self._by_token = True
        self._new_tokens: list[int] = []
        self._new_text: list[str] = []
        self._new_logprobs: list[TokenLogprob | PackedLogprob] = []

    def begin(self, *, drafting: bool) -> None:
        """Notes that the core started the output. `drafting`: whether the engine drafts tokens."""
        self.outputs.started = True
        if (progress := self.outputs.request.input.progress) is not None:
            progress.started(self._index, self.queue_seconds or 0.0)
        if drafting and self._draft_counts is None:
            self._draft_counts = (0, 0, 0)

    def note_retraction(self) -> None:
        """Notes that the core returned the output to its queue."""
        if (progress := self.outputs.request.input.progress) is not None:
            progress.retracted(self._index)

    def note_drafts(self, drafts: int, accepted: int) -> None:
        """Adds a step's drafted tokens, and how many of them were accepted."""
        steps, before, accepted_before = self._draft_counts or (0, 0, 0)
        self._draft_counts = (steps + 1, before + drafts, accepted_before + accepted)

    def add_prompt_logprobs(self, entries: Sequence[WireLogprob]) -> None:
        self.outputs.add_prompt_logprobs([pack(entry) for entry in entries])

    def add_logprob(self, entry: WireLogprob) -> None:
        """Appends the logprob of the next output token. The token itself is pushed afterwards."""
        self._new_logprobs.append(pack(entry))
        self._num_logprobs += 1

    def push(self, token_id: int) -> bool:
        """Adds a token, unless a stop string came before. True if its text completes one, which ends the output unless
        `aborted`."""
        if self._text.matched is not None:
            return False
        self._new_tokens.append(token_id)
        self._num_tokens += 1
        if self._num_tokens == 1:
            self._first_token = time.monotonic()
        self._new_text.append(self._text.push(token_id))
        if self._text.matched is None:
            return False
        if self.aborted:
            self._drop_surplus()
        else:
            self._sampled = (self._first_token, time.monotonic())  # the core will report nothing more about this output
            if self._draft_counts is not None:
                self.drafts = DraftCounts(*self._draft_counts)
            self._finish(FinishReason(FinishKind.STOP, self._text.matched))
        return True

    def add(self, delta: OutputDelta) -> None:
        """Adds a delta that another server has already converted to text."""
        self._by_token = False
        self._new_tokens += delta.token_ids
        self._num_tokens = delta.completion_tokens
        self._new_text.append(delta.text)
        self._new_logprobs += delta.logprobs
        self._num_logprobs += len(delta.logprobs)
        self.prompt_tokens, self.cached_tokens = delta.prompt_tokens, delta.cached_tokens
        self.drafts, self._sampled, self.pooled = delta.drafts, delta.sampled, delta.pooled
        self.weight_version = delta.weight_version
        if delta.queue_seconds is not None:
            self.queue_seconds = delta.queue_seconds
        if delta.prompt_logprobs is not None and not self.outputs.prompt_logprobs:
            self.outputs.add_prompt_logprobs(delta.prompt_logprobs)
        if delta.finish is not None:
            self._finish(delta.finish)
        elif self.outputs.stream:
            self.outputs.wake()

    def end(self, message: Finished) -> None:
        self.cached_tokens, self.drafts = message.cached_tokens, message.drafts
        self._sampled = message.sampled
        for token_id in np.frombuffer(message.tokens, "<i4").tolist():
            self._new_tokens.append(token_id)
            self._num_tokens += 1
            self._new_text.append(self._text.push(token_id))
        error = request_error(message.error) if message.error is not None else None
        self.end_with(FinishReason(FinishKind(message.kind), message.matched_token, error))

    def end_with(self, reason: FinishReason) -> None:
        """Ends the output and releases the text that was held back."""
        if self._text.matched is None:
            self._new_text.append(self._text.flush())
        if self._text.matched is not None and reason.kind is not FinishKind.ABORT:
            reason = FinishReason(FinishKind.STOP, self._text.matched)
        self._finish(reason)

    def _finish(self, reason: FinishReason) -> None:
        self._drop_surplus()
        self.finish = reason
        self.outputs.wake()

    def _drop_surplus(self) -> None:
        """Drops logprobs without a token: a logprob is not taken before its token, so they are still here."""
        surplus = self._num_logprobs - self._num_tokens
        if surplus > 0:
            del self._new_logprobs[-surplus:]
            self._num_logprobs = self._num_tokens

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def has_news(self) -> bool:
        return bool(self._new_tokens) or (self.finish is not None and not self.delivered)

    @property
    def unread_bytes(self) -> int:
        each = logprob_bytes(self.outputs.request.input)
        return TOKEN_BYTES * len(self._new_tokens) + each * len(self._new_logprobs)

    def forget(self) -> None:
        self._new_text, self._new_tokens, self._new_logprobs = [], [], []

    def take(self) -> OutputDelta:
        """Returns the output since the last call; of a stream, at most `PIECE_LOGPROBS` logprobs at once, because a
        slow reader may find thousands of tokens."""
        count = len(self._new_tokens)
        if self._new_logprobs and self._by_token and self.outputs.stream:
            count = min(count, max(1, PIECE_LOGPROBS // (1 + self.outputs.request.input.top_logprobs_num)))
        left = len(self._new_tokens) - count
        text, tokens, logprobs = self._new_text, self._new_tokens, self._new_logprobs
        self._new_text, self._new_tokens, self._new_logprobs = [], [], []
        if left:
            self._new_text, self._new_tokens, self._new_logprobs = text[count:], tokens[count:], logprobs[count:]
            text, tokens, logprobs = text[:count], tokens[:count], logprobs[:count]
            self.outputs.in_pieces = True
        finish = None if left else self.finish
        delta = OutputDelta(
            index=self._index,
            text=text[0] if len(text) == 1 else "".join(text),
            token_ids=tokens,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self._num_tokens - left,
            cached_tokens=self.cached_tokens,
            queue_seconds=None if self._first_taken else self.queue_seconds,
            sampled=None if finish is None else self._sampled,
            finish=finish,
            logprobs=list(map(unpack, logprobs)) if self.outputs.stream else PackedLogprobs(logprobs),
            prompt_logprobs=None if self._first_taken else self.outputs.prompt_logprobs,
            drafts=self.drafts,
            weight_version=self.weight_version,
            pooled=self.pooled,
        )
        if not self._first_taken:
            self._first_taken = True
            self.outputs.note_first_delta()
        self.delivered = finish is not None
        return delta


class RequestOutputs:
    """The outputs of one request at one link, for the one task that reads them. If the request streams, they are
    returned as they grow; otherwise each is returned once, finished.

    - `started`: the core had started the request.
    - `in_pieces`: a completion returned only part of its waiting output.
    - `prompt_logprobs`: of the prompt, if requested. The core computes them once, for the first completion; the others
      wait for them and share this list, which may be much larger than the outputs.
    """

    def __init__(self, request: TokenizedRequest) -> None:
        asked = request.input
        self.request = request
        self.stream = asked.stream
        self.completions: Sequence[Completion] = ()
        self.started = False
        wanted = asked.return_logprob and asked.logprob_start_len >= 0
        self.prompt_logprobs: PackedLogprobs | None = PackedLogprobs() if wanted else None
        # A turn has one completion, and its number of tokens is known only to its core.
        shared = wanted and request.session is None
        self._missing_prompt_logprobs = len(request.token_ids) - asked.logprob_start_len if shared else 0
        self._first_deltas_left = request.sampling.n
        self._failure: RequestError | None = None
        self._given_up = False
        self.in_pieces = False
        self._news: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def add_prompt_logprobs(self, entries: Sequence[TokenLogprob | PackedLogprob]) -> None:
        if (
            not self._first_deltas_left
        ):  # aborted while the prompt was computed: each completion already has what there was
            return
        self.prompt_logprobs = PackedLogprobs() if self.prompt_logprobs is None else self.prompt_logprobs
        self.prompt_logprobs.add(entries)
        self._missing_prompt_logprobs -= len(entries)
        self.wake()

    def note_first_delta(self) -> None:
        """Counts completions whose first delta, which has the prompt's logprobs, was taken. The last one frees them,
        because a stream may run for long."""
        self._first_deltas_left -= 1
        if not self._first_deltas_left:
            self.prompt_logprobs = None

    def fail(self, error: RequestError) -> None:
        """Ends the outputs with an error, raised after the buffered output unless all had ended."""
        self._failure = error
        self.wake()

    @property
    def unread_bytes(self) -> int:
        """Estimated bytes that wait to be taken; 0 without streaming."""
        if not self.stream:
            return 0
        prompt = logprob_bytes(self.request.input) * len(self.prompt_logprobs or ())
        return prompt + sum(one.unread_bytes for one in self.completions)

    def give_up(self, error: RequestError) -> None:
        """Drops the buffered output, so that the reader gets this error next."""
        for completion in self.completions:
            completion.forget()
        self.prompt_logprobs, self._first_deltas_left = None, 0
        self._given_up = True
        self.fail(error)

    def close(self) -> None:
        """Releases the outputs after their reader has left. Cuts references in both directions, and from a raised error
        to its frames, so that the memory is freed at once and not at the next garbage collection."""
        self.completions = ()
        self._failure = None

    async def take(self) -> list[OutputDelta]:
        """Waits for new output and returns all of it, nothing after the last. Raises the error given to `fail`."""
        if self.in_pieces:  # lets other tasks run between two pieces
            self.in_pieces = False
            await asyncio.sleep(0)
        while True:
            if self._given_up and self._failure is not None:
                raise self._failure
            ready, ended = self._ready()
            if ready or ended:
                return ready
            if self._failure is not None:
                raise self._failure
            self._news = asyncio.get_running_loop().create_future()
            await self._news

    def _ready(self) -> tuple[list[OutputDelta], bool]:
        """Returns the new deltas, and whether every output has already returned its last."""
        stream, ended = self.stream, True
        ready = []
        for completion in self.completions:
            if not completion.delivered:
                ended = False
                if self._missing_prompt_logprobs > 0 and self.completions[0].finish is None:
                    continue
                if completion.finish is not None or (stream and completion.has_news):
                    ready.append(completion.take())
        return ready, ended
