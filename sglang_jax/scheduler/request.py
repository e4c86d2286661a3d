"""One request's life: its states, and the facts that outlast a row."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, auto

import numpy as np

from sglang_jax.grammar.interface import Matcher
from sglang_jax.mem_cache.radix_tree import Bookmark, Namespace
from sglang_jax.mem_cache.row_kv import RowKV
from sglang_jax.runner.plan import Int32
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.sessions import Turn

FlowKey = tuple[str, str]
"""A tenant, and which of its client requests a request is part of."""


class RequestState(IntEnum):
    """A number, as looking one up takes a fraction of what other enums take.

    - COMPILING: its grammar is being compiled; in no queue.
    - WAITING: in the queue, never had a row.
    - PREFILL: has a row; its tokens are being computed, chunk by chunk.
    - DECODE: samples a token each step.
    - RETRACTED: lost its row to a shortage, or to KV of somebody else that turned out bad; back in the queue with its
      output, before its equals that never had a row.
    - FINISHED: over. It may keep its row for some steps: while one in flight uses it, and until it is released.
    """

    COMPILING = auto()
    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    RETRACTED = auto()
    FINISHED = auto()


TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    RequestState.COMPILING: frozenset({RequestState.WAITING, RequestState.FINISHED}),
    RequestState.WAITING: frozenset({RequestState.PREFILL, RequestState.FINISHED}),
    RequestState.PREFILL: frozenset({RequestState.DECODE, RequestState.RETRACTED, RequestState.FINISHED}),
    RequestState.DECODE: frozenset({RequestState.RETRACTED, RequestState.FINISHED}),
    RequestState.RETRACTED: frozenset({RequestState.PREFILL, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


@dataclass(slots=True)
class Waiting:
    """What admission remembers of a request in the queue.

    - `queued`: it is in the queue.
    - `cost`: tokens that its turn takes, 0 for one that was retracted.
    - `work`: tokens that were still to be computed when it was queued or last looked at.
    - `refused_at`: the step at which it was first found not to fit, None before; `passed`: requests behind it that were
      given room since.
    - `as_guest`: it was given a row that is kept for client requests that have none.
    - `bookmark`: how far its prompt was followed into the tree of what is cached.
    - `seen`, `idle_looks`: cached tokens at the last look, and looks since they grew, while a prefix of it is computed.
    """

    queued: bool = False
    cost: int = 0
    work: int = 0
    refused_at: int | None = None
    passed: int = 0
    as_guest: bool = False
    bookmark: Bookmark = field(default_factory=Bookmark)
    seen: int = 0
    idle_looks: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A request from its arrival to its end.

    - `sequence`: order of arrival; `seed`: resolved, non-negative.
    - `tokens`: int32 bytes of prompt and kept output. While the request has a row, what it samples is in the request
      table, and comes back here if it is retracted.
    - `total_len`: most tokens it may hold, prompt and output.
    - `next_prompt_logprob`: prompt position whose logprob is to be computed next; `prompt_len` when none is.
      `told_prompt_logprob`: the one to be published next.
    - `kv`: the ownership record while it has a row.
    - `drafts`: as `DraftCounts`, of rows that it has lost.
    - `cached_tokens`: prompt tokens found in the prefix cache at its first admission, None before.
    - `announced`: the runner was told who has the row now.
    - `matcher`: where its output is in its grammar, once that is compiled; it goes on where the kept output ends.
    - `restarts`: how often it was computed anew because KV that it shared turned out bad.
    - `retractions`: how often it lost its row.
    - `turn`: what it is of a session, None if it stands alone.
    - `waiting`: what admission remembers of it while it is in the queue.
    - `arrival`: when its client sent it; `first_token`: when its first token was there, None before.
    """

    id: int
    sequence: int
    sampling: SamplingParams
    seed: int
    tokens: bytes
    prompt_len: int
    total_len: int
    stop_ids: Int32
    stream: bool
    top_logprobs: int
    next_prompt_logprob: int
    told_prompt_logprob: int
    namespace: Namespace
    priority: int
    flow_key: FlowKey = ("", "")
    shared_len: int = 0
    arrival: float = 0.0
    first_token: float | None = None
    state: RequestState = RequestState.WAITING
    kv: RowKV | None = None
    cached_tokens: int | None = None
    drafts: tuple[int, int, int] = (0, 0, 0)
    announced: bool = False
    matcher: Matcher | None = None
    restarts: int = 0
    retractions: int = 0
    turn: Turn | None = None
    waiting: Waiting = field(default_factory=Waiting)

    def move_to(self, state: RequestState) -> None:
        """**Raises:** `RuntimeError` for a transition that the table does not have."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"request {self.id} cannot go from {self.state.name} to {state.name}")
        self.state = state

    @property
    def record(self) -> RowKV:
        """The ownership record of a request that has a row."""
        assert self.kv is not None, f"request {self.id} has no row"
        return self.kv

    @property
    def row(self) -> int:
        return self.record.row

    @property
    def prefill_len(self) -> int:
        """Tokens to compute before the next one is sampled: the prompt, and after a retraction the kept output."""
        return len(self.tokens) // 4

    @property
    def samples(self) -> bool:
        """Whether it is to sample a token once its tokens are computed; one that only scores its prompt does not."""
        return self.total_len > self.prefill_len

    @property
    def match_limit(self) -> int:
        """Most tokens that may come from the cache: one must run to give logits, and so must every position whose
        successor's logprob is wanted."""
        limit = self.prefill_len - 1
        if self.next_prompt_logprob < self.prompt_len:
            limit = min(limit, max(self.next_prompt_logprob - 1, 0))
        return limit

    def token_slice(self, first: int, last: int) -> Int32:
        """Tokens `[first, last)` of prompt and kept output."""
        return np.frombuffer(self.tokens, np.int32, last - first, first * 4)
