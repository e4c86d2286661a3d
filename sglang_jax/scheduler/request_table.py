"""The running requests as arrays, one entry per row, so that a decode batch is advanced by a few vector operations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_jax.runner.plan import Bool, Int32
from sglang_jax.sampling.params import MAX_STOP_TOKEN_IDS
from sglang_jax.scheduler.request import Request

NO_TOKEN = -2
"""Fills unused stop columns; no token id and not `INVALID_TOKEN`."""


@dataclass(frozen=True, slots=True)
class Advance:
    """What drawing one token did to some rows, each `[rows]`: ended by a stop token; reached its last token."""

    stopped: Bool
    full: Bool


class RequestTable:
    """Struct of arrays, `[rows]` each but where stated.

    - `ids`: the clients' ids; `streams`: publish each token; `top_logprobs`: -1 or how many alternatives.
    - `prompt_len`, `num_tokens` (known to the host), `total_len` (limit): tokens.
    - `stop_ids`: `[rows, MAX_STOP_TOKEN_IDS]`, of which the first `stop_width` columns are in use by some row.
    - `tokens`: `[rows, max_context + 1]` prompt and output.
    - `last_step`: the last launched step that has the row.
    - `active`: the row's request is not over, and what it draws counts.
    """

    def __init__(self, rows: int, max_context: int) -> None:
        self.ids: NDArray[np.int64] = np.zeros(rows, np.int64)
        self.streams: NDArray[np.bool_] = np.zeros(rows, np.bool_)
        self.top_logprobs: NDArray[np.int8] = np.full(rows, -1, np.int8)
        self.prompt_len: Int32 = np.zeros(rows, np.int32)
        self.num_tokens: Int32 = np.zeros(rows, np.int32)
        self.total_len: Int32 = np.zeros(rows, np.int32)
        self.stop_ids: Int32 = np.full((rows, MAX_STOP_TOKEN_IDS), NO_TOKEN, np.int32)
        self.stop_width = 1
        self.tokens: Int32 = np.zeros((rows, max_context + 1), np.int32)
        self.last_step: NDArray[np.int64] = np.full(rows, -1, np.int64)
        self.active: Bool = np.zeros(rows, np.bool_)
        self.requests: list[Request | None] = [None] * rows
        self.num_with_logprobs = 0
        self._widths = [0] * (MAX_STOP_TOKEN_IDS + 1)

    def seat(self, requests: list[Request]) -> None:
        """Enters requests that were given rows."""
        rows = np.array([request.row for request in requests], np.int32)
        self.ids[rows] = [request.id for request in requests]
        self.streams[rows] = [request.stream for request in requests]
        self.top_logprobs[rows] = [request.top_logprobs for request in requests]
        self.prompt_len[rows] = [request.prompt_len for request in requests]
        self.num_tokens[rows] = [request.prefill_len for request in requests]
        self.total_len[rows] = [request.total_len for request in requests]
        self.stop_ids[rows] = NO_TOKEN
        self.active[rows] = True
        for row, request in zip(rows.tolist(), requests, strict=True):
            self.requests[row] = request
            self.num_with_logprobs += request.top_logprobs >= 0
            width = len(request.stop_ids)
            self._widths[width] += 1
            self.stop_ids[row, :width] = request.stop_ids
            self.tokens[row, : request.prefill_len] = np.frombuffer(request.tokens, np.int32)
        self._set_stop_width()

    def end(self, request: Request) -> None:
        """What this request still draws does not count, and it will not need room for more."""
        self.active[request.row] = False

    def vacate(self, request: Request) -> None:
        """Takes a request out before its row is freed."""
        row = request.row
        self.requests[row] = None
        self.active[row] = False
        self.num_with_logprobs -= request.top_logprobs >= 0
        self._widths[len(request.stop_ids)] -= 1
        self._set_stop_width()
        self.last_step[row] = -1

    def _set_stop_width(self) -> None:
        width = max(self.stop_width, 1)
        while width < MAX_STOP_TOKEN_IDS and any(self._widths[width + 1 :]):
            width += 1
        while width > 1 and not self._widths[width]:
            width -= 1
        self.stop_width = width

    def at(self, row: int) -> Request:
        """The request in a row."""
        request = self.requests[row]
        assert request is not None, f"row {row} is empty"
        return request

    def advance(self, rows: Int32, tokens: Int32) -> Advance:
        """Appends one drawn token to each of `rows` `[rows]`."""
        counts = self.num_tokens[rows]
        self.tokens[rows, counts] = tokens
        counts += 1
        self.num_tokens[rows] = counts
        if self.stop_width == 1:
            stopped = self.stop_ids[rows, 0] == tokens
        else:
            stopped = (self.stop_ids[rows, : self.stop_width] == tokens[:, None]).any(axis=1)
        return Advance(stopped, counts >= self.total_len[rows])

    def token_bytes(self, row: int, first: int, last: int) -> bytes:
        """Tokens `[first, last)` of a row as int32 bytes."""
        return self.tokens[row, first:last].tobytes()
