"""A request: its states, and the facts that it keeps when it loses its row."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, auto

import numpy as np

from sglang_jax.grammar.interface import Matcher
from sglang_jax.mem_cache.radix_tree import Bookmark, Namespace
from sglang_jax.mem_cache.row_kv import RowKV
from sglang_jax.queues.fair_queue import FlowKey
from sglang_jax.runner.plan import Float64, Int32
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.sampling.wants import SAMPLES, Samples, Wants
from sglang_jax.scheduler.sessions import Turn


class RequestState(IntEnum):
    """The state of a request. It is an `IntEnum`, which hashes much faster than other enums.

    - COMPILING: its grammar is being compiled; it is not in the queue.
    - WAITING: it is in the queue, and never had a row.
    - PREFILL: its prompt is computed in chunks. DECODE: it samples in each step.
    - RETRACTED: it lost its row because pages were short, or because it read KV of another request that is not finite.
      It is in the queue again, with its output, before requests of its priority that never had a row.
    - FINISHED: it has ended. It keeps its row until no step in flight uses it and the row is released.
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
    """What admission knows of a request in the queue.

    - `queued`: whether it is in the queue; `cost`: its tokens in the fair order, 0 for a retracted request; `work`:
      tokens to compute, as of when it was queued or last considered.
    - `refused_at`: the step in which it first did not fit, None before; `overtaken_by`: later requests admitted since.
    - `as_guest`: whether its row is one reserved for client requests without a row; `in_turn`: whether it is one that
      the background gets although others wait; `bookmark`: its cached prefix so far.
    - `seen`, `idle_looks`: cached tokens at the last look, and looks since they grew, while it waits for a prefix that
      another request computes.
    """

    queued: bool = False
    cost: int = 0
    work: int = 0
    refused_at: int | None = None
    overtaken_by: int = 0
    as_guest: bool = False
    in_turn: bool = False
    bookmark: Bookmark = field(default_factory=Bookmark)
    seen: int = 0
    idle_looks: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A request from its arrival to its end.

    - `sequence`: order of arrival; `seed`: never negative, and chosen by the engine if the client gave none.
    - `tokens`: int32 bytes of prompt and kept output. While the request has a row, its samples are in `Rows`; they are
      added here if it is retracted.
    - `total_len`: maximum tokens of prompt and output.
    - `next_prompt_logprob`: the prompt position whose logprob is computed next, `prompt_len` if none;
      `published_prompt_logprob`: the one that is published next.
    - `kv`: its pages, while it has a row; `announced`: whether the runner knows that it has it.
    - `drafts`: as `DraftCounts`, of rows that it has lost.
    - `cached_tokens`: prompt tokens found in the prefix cache at its first admission, None before.
    - `matcher`: its position in its grammar, once that is compiled; it is that of the kept output.
    - `restarts`: times it was recomputed because shared KV was not finite; `retractions`: times pages were short.
    - `wants`: what it wants; `needs_all_tokens`: no token of its prompt may come from the cache; `pooled`: the sum of
      its vector's parts so far, None before the first.
    - `turn`: its turn of a session, None outside sessions; `arrival`: when its client sent it; `first_token`: when its
      first token was sampled, None before.
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
    published_prompt_logprob: int
    namespace: Namespace
    priority: int
    flow_key: FlowKey = ("", "")
    shared_len: int = 0
    background: bool = False
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
    wants: Wants = SAMPLES
    needs_all_tokens: bool = False
    pooled: Float64 | None = None
    turn: Turn | None = None
    waiting: Waiting = field(default_factory=Waiting)

    def move_to(self, state: RequestState) -> None:
        """Changes the state. Raises `RuntimeError` for a transition that is not in `TRANSITIONS`."""
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"request {self.id} cannot go from {self.state.name} to {state.name}")
        self.state = state

    @property
    def record(self) -> RowKV:
        assert self.kv is not None, f"request {self.id} has no row"
        return self.kv

    @property
    def row(self) -> int:
        return self.record.row

    @property
    def prefill_len(self) -> int:
        """Tokens to compute before the next is sampled: the prompt, and after a retraction also the output."""
        return len(self.tokens) // 4

    @property
    def samples(self) -> bool:
        """False for a request that only scores its prompt, or wants its vector."""
        return self.total_len > self.prefill_len

    @property
    def is_pooled(self) -> bool:
        """Whether it wants a vector, or scores of tokens, and no samples."""
        return not isinstance(self.wants, Samples)

    @property
    def match_limit(self) -> int:
        """Maximum tokens from the cache: the last token, and the position before each token whose logprob is wanted,
        must be computed, or all of them."""
        if self.needs_all_tokens:
            return 0
        limit = self.prefill_len - 1
        if self.next_prompt_logprob < self.prompt_len:
            limit = min(limit, max(self.next_prompt_logprob - 1, 0))
        return limit

    def token_slice(self, first: int, last: int) -> Int32:
        """Tokens `[first, last)` of prompt and kept output."""
        return np.frombuffer(self.tokens, np.int32, last - first, first * 4)
