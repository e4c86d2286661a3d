"""What a client sends the scheduler, and what the scheduler publishes: the words on the wire.

Encoded with msgpack by `msgspec`; arrays travel as little-endian bytes. A request is known by an integer `id` that its
client chose (unique for the client's life).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

from sglang_jax.sampling.params import SamplingParams


class SessionTurn(msgspec.Struct, frozen=True, array_like=True):
    """A request is the next turn of a session: its token ids are what comes behind the turns before it.

    - `session`: the session's id; `owner`: whose it must be.
    - `name`: what the client calls this turn; `after`: what it calls the one that it takes for the last, None if it
      does not say.
    - `bos`: the token that prompts begin with, which is left out where there are turns before this one; -1 for none.
    """

    session: str
    owner: str
    name: str
    after: str | None = None
    bos: int = -1


class NewRequest(msgspec.Struct, tag="new", frozen=True, kw_only=True):
    """A prompt to run. Text is tokenized already, `n > 1` is expanded already, `sampling.seed` stays None for
    "any seed".

    - `token_ids`: int32 bytes.
    - `stream`: tokens are published as they are sampled; otherwise all at once when the request ends.
    - `top_logprobs`: -1 for none; 0..20 alternatives beside each output token's logprob.
    - `logprob_start`: first position of `token_ids` whose logprob is wanted, -1 for none. In a session it is counted
      without the token that texts begin with, where that is left out.
    - `tenant`, `flow`: whose it is, and which of its client requests it is part of; tenants that wait have turns, by
      the tokens that they ask for, and so have the client requests of each. Those without a name are one.
    - `arrival`: `time.monotonic()` of the client.
    - `session`: None for a request that stands alone.
    - `shared_len`: so many tokens probably begin other prompts as well, as those of a system message do.
    """

    id: int
    token_ids: bytes
    sampling: SamplingParams
    stream: bool = False
    top_logprobs: int = -1
    logprob_start: int = -1
    extra_key: str | None = None
    priority: int = 0
    tenant: str = ""
    flow: str = ""
    arrival: float = 0.0
    session: SessionTurn | None = None
    shared_len: int = 0


class AbortRequest(msgspec.Struct, tag="abort", frozen=True):
    """End a request wherever it is; its KV is not kept. It is published as finished with kind `abort`."""

    id: int


class StopRequest(msgspec.Struct, tag="stop", frozen=True):
    """The client found a stop string: end the request, keep its KV for reuse, publish nothing more of it.

    `num_tokens`: output tokens up to the one that completed the string, -1 for all that there are: a session goes on
    behind them, even if the request has ended meanwhile.
    """

    id: int
    num_tokens: int = -1


class OpenSession(msgspec.Struct, tag="open_session", frozen=True):
    """Answered by `Reply`. `owner`: whose it is; `streaming`: a turn may leave out which one it follows; `timeout`:
    seconds without a turn after which the session is closed, None for the engine's default."""

    call: int
    id: str
    owner: str
    streaming: bool = False
    timeout: float | None = None


class CloseSession(msgspec.Struct, tag="close_session", frozen=True):
    """Answered by `Reply`. A turn that runs goes on to its end."""

    call: int
    id: str
    owner: str


class FlushCache(msgspec.Struct, tag="flush", frozen=True):
    """Empty the prefix cache. Answered by `Reply(ok=...)`; refused while requests run or wait."""

    call: int


class GetCacheReport(msgspec.Struct, tag="cache_report", frozen=True):
    """Answered by `Reply` whose `report` is a `CacheReport`, encoded as JSON."""

    call: int


class StartProfile(msgspec.Struct, tag="start_profile", frozen=True):
    """Record what the runner does, for a folder. Answered by `Reply`. `steps`: after so many the recording ends by
    itself; None for one that `StopProfile` ends."""

    call: int
    folder: str
    steps: int | None = None


class StopProfile(msgspec.Struct, tag="stop_profile", frozen=True):
    """End the recording and write it. Answered by `Reply` once it is written."""

    call: int


class GetState(msgspec.Struct, tag="state", frozen=True):
    """Answered by `Reply` whose `state` has the scheduler's and the runner's figures."""

    call: int


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """Stop the loop once everything accepted so far has finished (`drain`), or now."""

    drain: bool = True


Inbound = (
    NewRequest
    | AbortRequest
    | StopRequest
    | OpenSession
    | CloseSession
    | FlushCache
    | GetState
    | GetCacheReport
    | StartProfile
    | StopProfile
    | Shutdown
)


class WireLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Logprob of one token, and the likeliest alternatives at its position, likeliest first."""

    token_id: int
    logprob: float | None
    top_ids: list[int]
    top_logprobs: list[float]


class WireError(msgspec.Struct, frozen=True, array_like=True):
    """A `RequestError`: its class name, and its fields."""

    name: str
    message: str
    param: str | None
    code: str


class Started(msgspec.Struct, frozen=True, array_like=True):
    """A request got its row for the first time, `queue_seconds` after its arrival. `cached_tokens` of its prompt were
    found in the prefix cache. `prompt_tokens`: of the prompt, with all before it where it is a turn of a session.
    `guesses`: whether the engine guesses tokens."""

    id: int
    cached_tokens: int
    queue_seconds: float = 0.0
    prompt_tokens: int = 0
    guesses: bool = False


class DraftCounts(msgspec.Struct, frozen=True, array_like=True):
    """What came of guessing a request's tokens: `steps` with drafts, `drafts` in them, and how many were `right`."""

    steps: int
    drafts: int
    right: int


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """A request ended.

    - `kind`: stop, length, abort or error; `matched_token` is the id that ended it, if one did.
    - `num_tokens`: output tokens in all.
    - `tokens`: int32 bytes of all output tokens for a request that did not stream, else empty.
    - `sampled`: when its first and its last token were sampled, by the client's `time.monotonic()`; None if none was.
    - `drafts`: None where the engine does not guess.
    """

    id: int
    kind: str
    matched_token: int | None
    num_tokens: int
    tokens: bytes
    cached_tokens: int
    error: WireError | None = None
    sampled: tuple[float, float] | None = None
    drafts: DraftCounts | None = None


class StepOutputs(msgspec.Struct, tag="step", frozen=True, kw_only=True):
    """What one step gave, or who starts with the step that is launched next (`started` alone).

    - `ids` (int64 bytes) and `tokens` (int32 bytes): what streaming requests sampled, a request once for each of
      its tokens, in order. Its last token is here too, before its `Finished`.
    - `logprobs`: (request id, entry) for every request that asked, streaming or not, in order of positions.
    - `prompt_logprobs`: likewise for prompt positions; they all come before the request's first output token. A
      later entry list for the same request replaces nothing: lists are appended.
    - `drafts`: int64 bytes `[requests, 3]`: id, drafts in this step and how many were right, of streaming requests with
      drafts. `Finished` has the sums, but a client that sees a stop string does not wait for it.
    """

    ids: bytes
    tokens: bytes
    started: list[Started] = []
    finished: list[Finished] = []
    logprobs: list[tuple[int, WireLogprob]] = []
    prompt_logprobs: list[tuple[int, list[WireLogprob]]] = []
    drafts: bytes = b""


class GroupUsage(msgspec.Struct, frozen=True):
    """KV tokens of one cache group, or its slots where it has states. `name`: see `architectures.group_names`; of a
    draft model's groups, `draft` and that. `unit`: what is counted, `token` or `slot`.
    `session_tokens`: of the used ones those that sessions keep."""

    name: str
    used_tokens: int
    max_tokens: int
    unit: str = "token"
    session_tokens: int = 0

    @property
    def usage(self) -> float:
        """Share of the pool that is neither free nor evictable."""
        return self.used_tokens / self.max_tokens

    @property
    def usage_name(self) -> str:
        """What the share is called where operators read it."""
        return f"{self.name} token usage" if self.unit == "token" else f"{self.name} usage"


class ExpertBalance(msgspec.Struct, frozen=True, array_like=True):
    """Of one layer with experts. `tokens`: choices of an expert by a token since the start. `balancedness`: mean over
    maximum of the tokens of its experts in the last minute: 1 if all are chosen equally often."""

    layer: int
    tokens: int
    balancedness: float


StateValue = str | int | float | bool | None | dict[str, list[int]]
"""What `/server_info` tells under one name."""


class SchedulerStats(msgspec.Struct, tag="stats", frozen=True, kw_only=True):
    """A snapshot, published when it changed and at most a few times a second, and whenever the scheduler goes idle.

    Counters count since the start; three of them tell of guesses: of rows and steps with any, of their tokens, and of
    those that were right. `gen_throughput` is output tokens per second over the last interval.
    `num_used_tokens` and `max_total_tokens` are those of the first cache group; `groups` tells of each, but where there
    is one alone, of layers that see all tokens.
    `num_session_tokens`: of the first group's pages those that sessions keep (`groups` tells of all);
    `num_pins_let_go`: how often a session lost what it kept because others needed the memory; `num_sessions_timed_out`:
    how many were closed for that.
    `experts`: of each layer whose experts are counted, seconds old while the scheduler is busy.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_used_tokens: int = 0
    max_total_tokens: int = 0
    gen_throughput: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_retractions: int = 0
    num_evicted_pages: int = 0
    num_memory_faults: int = 0
    num_draft_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    compiles_after_warm_up: int = 0
    programs_left: int = 0
    num_sessions: int = 0
    num_session_tokens: int = 0
    num_pins_let_go: int = 0
    num_sessions_timed_out: int = 0
    new_token_reserve: float = 0.0
    steps: int = 0
    groups: list[GroupUsage] = []
    experts: list[ExpertBalance] = []

    @property
    def token_usage(self) -> float:
        """Share of the pool that is neither free nor evictable; of several that of the fullest."""
        if self.groups:
            return max(group.usage for group in self.groups)
        return self.num_used_tokens / self.max_total_tokens if self.max_total_tokens else 0.0

    @property
    def accept_rate(self) -> float:
        """Share of drafts that were right."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def accept_length(self) -> float:
        """Mean tokens of a row in a step with drafts."""
        return 1.0 + self.num_accepted_tokens / self.num_draft_steps if self.num_draft_steps else 0.0

    @property
    def cache_hit_rate(self) -> float:
        """Share of prompt tokens that came from the prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Reply(msgspec.Struct, tag="reply", frozen=True):
    """The answer to the inbound message with the same `call`. `error`: what the call is refused with."""

    call: int
    ok: bool
    message: str = ""
    state: dict[str, StateValue] = {}
    error: WireError | None = None
    report: bytes = b""


Outbound = StepOutputs | SchedulerStats | Reply


class Channel(Protocol):
    """The scheduler's end of the line to its client. Carries messages in order, both ways."""

    def receive(self, block: bool, seconds: float | None = None) -> Iterator[Inbound]:
        """Waiting messages, one after the other; with `block`, waits (on a poll) until there is at least one, for so
        many `seconds` at most. Who stops asking leaves the others for the next call."""
        ...

    def send(self, message: Outbound) -> None: ...
