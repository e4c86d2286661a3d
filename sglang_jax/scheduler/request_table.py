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
        self.requests: list[Request | None] = [None] * rows
        self.num_with_logprobs = 0

    def seat(self, request: Request) -> None:
        """Enters a request that was given a row."""
        row = request.row
        self.requests[row] = request
        self.ids[row] = request.id
        self.streams[row] = request.stream
        self.top_logprobs[row] = request.top_logprobs
        self.num_with_logprobs += request.top_logprobs >= 0
        self.prompt_len[row] = request.prompt_len
        self.num_tokens[row] = request.prefill_len
        self.total_len[row] = request.total_len
        self.stop_ids[row] = NO_TOKEN
        self.stop_ids[row, : len(request.stop_ids)] = request.stop_ids
        self.stop_width = max(self.stop_width, len(request.stop_ids))
        self.tokens[row, : request.prefill_len] = request.token_slice(0, request.prefill_len)

    def vacate(self, request: Request) -> None:
        """Takes a request out before its row is freed."""
        self.requests[request.row] = None
        self.num_with_logprobs -= request.top_logprobs >= 0
        self.last_step[request.row] = -1

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
