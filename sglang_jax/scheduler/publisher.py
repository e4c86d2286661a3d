"""Collects the outputs of a step, and sends them as one message."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_jax.errors import RequestError
from sglang_jax.mem_cache.lengths import Index
from sglang_jax.runner.plan import Float64, Int32, StepResult, TopLogprobs
from sglang_jax.scheduler.messages import Channel, DraftCounts, Finished, Started, StepOutputs, WireError, WireLogprob
from sglang_jax.scheduler.planner import PlannedStep
from sglang_jax.scheduler.request import Request, RequestState
from sglang_jax.scheduler.rows import Rows

_NO_IDS: NDArray[np.int64] = np.zeros(0, np.int64)
_NO_TOKENS: Int32 = np.zeros(0, np.int32)


def wire_error(error: RequestError) -> WireError:
    return WireError(type(error).__name__, error.message, error.param, error.code)


class Publisher:
    """Sends one `StepOutputs` per step with outputs. `drafts`: whether requests have draft counts."""

    def __init__(self, channel: Channel, rows: Rows, drafts: bool = False) -> None:
        self._channel = channel
        self._drafts = drafts
        self._rows = rows
        self._ids = _NO_IDS
        self._tokens = _NO_TOKENS
        self._started: list[Started] = []
        self._finished: list[Finished] = []
        self._logprobs: list[tuple[int, WireLogprob]] = []
        self._prompt_logprobs: list[tuple[int, list[WireLogprob]]] = []
        self._pooled: list[tuple[int, bytes]] = []
        self._draft_counts = b""
        self._retracted: list[int] = []

    def drafts(self, rows: Index, drafted: NDArray[np.int64]) -> None:
        """Publishes the draft counts of `rows` `[rows]` of streaming requests that have not ended since the launch.
        `drafted`: as `Rows.drafts`."""
        published = self._rows.streams[rows] & self._rows.active[rows] & (drafted[:, 0] > 0)
        if np.count_nonzero(published):
            counts = np.column_stack((self._rows.ids[rows[published]], drafted[published, 1:])).astype(np.int64)
            self._draft_counts += counts.tobytes()

    def tokens(self, rows: Index, tokens: Int32, counts: Int32) -> None:
        """Publishes the first `counts` `[rows]` of `tokens` `[rows, width]`, of streaming requests."""
        streams = self._rows.streams[rows]
        ids = self._rows.ids[rows]
        if np.count_nonzero(streams) < len(rows):
            ids, tokens, counts = ids[streams], tokens[streams], counts[streams]
        if tokens.shape[1] == 1:
            tokens = tokens[:, 0]
        else:
            ids = np.repeat(ids, counts)
            tokens = tokens[np.arange(tokens.shape[1]) < counts[:, None]]
        if len(self._ids):
            ids, tokens = np.concatenate((self._ids, ids)), np.concatenate((self._tokens, tokens))
        self._ids, self._tokens = ids, tokens

    def started(self, request: Request, now: float) -> None:
        waited = max(now - request.arrival, 0.0)
        self._started.append(Started(request.id, request.cached_tokens or 0, waited, request.prompt_len, self._drafts))

    def retracted(self, request: Request) -> None:
        self._retracted.append(request.id)

    def finished(
        self,
        request: Request,
        kind: str,
        *,
        last_step: float,
        matched_token: int | None = None,
        error: RequestError | None = None,
    ) -> None:
        """Publishes the end of a request. `last_step`: the end of the newest finished step, which sampled its last
        token."""
        if request.kv is not None:
            count = int(self._rows.num_tokens[request.row])
            output = self._rows.token_bytes(request.row, request.prompt_len, count)
        else:
            output = request.tokens[request.prompt_len * 4 :]
        self._finished.append(
            Finished(
                request.id,
                kind,
                matched_token,
                len(output) // 4,
                b"" if request.stream else output,
                request.cached_tokens or 0,
                None if error is None else wire_error(error),
                None if request.first_token is None or not output else (request.first_token, last_step),
                DraftCounts(*self._rows.drafts_of(request)) if self._drafts else None,
            )
        )

    def refused(self, request_id: int, error: RequestError) -> None:
        self._finished.append(Finished(request_id, "error", None, 0, b"", 0, wire_error(error)))

    def logprobs(self, result: StepResult, rows: Index, picks: Index, counts: Int32) -> None:
        """Publishes logprobs of the first `counts` tokens of each of `rows` `[rows]`. `picks`: their indices in the
        plan."""
        reported, width = result.logprobs, result.tokens.shape[1]
        if reported is None:
            return
        alternatives = self._rows.top_logprobs[rows]
        for index in np.nonzero(alternatives >= 0)[0].tolist():
            request_id, pick = int(self._rows.ids[rows[index]]), int(picks[index])
            for place, token in enumerate(result.tokens[pick, : counts[index]].tolist()):
                entry = _entry(token, reported, pick * width + place, int(alternatives[index]))
                self._logprobs.append((request_id, entry))

    def prompt_logprobs(self, planned: PlannedStep, result: StepResult) -> None:
        answers = zip(planned.logprob_requests, planned.plan.prompt_logprobs, result.prompt_logprobs, strict=True)
        for request, asked, reported in answers:
            if request.state in (RequestState.FINISHED, RequestState.RETRACTED):
                continue
            request.published_prompt_logprob = max(request.published_prompt_logprob, 1) + len(asked.targets)
            count = max(request.top_logprobs, 0)
            entries = [_entry(token, reported, index, count) for index, token in enumerate(asked.targets.tolist())]
            self._prompt_logprobs.append((request.id, entries))

    def pooled(self, request: Request, found: Float64) -> None:
        """Publishes the vector or the scores of a request, `[numbers]`."""
        self._pooled.append((request.id, found.astype("<f4").tobytes()))

    def first_prompt_token(self, request: Request) -> None:
        """Publishes a logprob of None for the first prompt token, which nothing predicts."""
        token = int(request.token_slice(0, 1)[0])
        self._prompt_logprobs.append((request.id, [WireLogprob(token, None, [], [])]))

    def flush(self) -> None:
        if not (
            len(self._ids)
            or self._started
            or self._finished
            or self._retracted
            or self._logprobs
            or self._prompt_logprobs
        ):
            return
        self._channel.send(
            StepOutputs(
                ids=self._ids.tobytes(),
                tokens=self._tokens.tobytes(),
                started=self._started,
                finished=self._finished,
                logprobs=self._logprobs,
                prompt_logprobs=self._prompt_logprobs,
                pooled=self._pooled,
                drafts=self._draft_counts,
                retracted=self._retracted,
            )
        )
        self._draft_counts = b""
        self._ids, self._tokens = _NO_IDS, _NO_TOKENS
        self._started, self._finished, self._logprobs, self._prompt_logprobs, self._pooled = [], [], [], [], []
        self._retracted = []


def _entry(token: int, reported: TopLogprobs, index: int, count: int) -> WireLogprob:
    return WireLogprob(
        token,
        float(reported.logprobs[index]),
        reported.top_ids[index, :count].tolist(),
        reported.top_logprobs[index, :count].tolist(),
    )
