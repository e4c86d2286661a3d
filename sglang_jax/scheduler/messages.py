"""The messages between a client and the scheduler.

They are encoded with msgpack by `msgspec`; arrays are little-endian bytes. A request has an integer `id` that its
client chooses, unique for the lifetime of the client.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec

from sglang_jax.config import DEFAULT_WEIGHT_VERSION
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.sampling.wants import SAMPLES, Wants

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class SessionTurn(msgspec.Struct, frozen=True, array_like=True):
    """Marks a request as the next turn of a session: its token ids follow those of the earlier turns, or are the whole
    conversation.

    - `session`, `owner`: the session's id and its owner.
    - `name`: the client's name for this turn; `after`: its name for the previous turn, None if the client does not say.
    - `bos`: the token that prompts start with, which is removed from all turns but the first; -1 for none.
    - `whole`: the token ids are the whole conversation, earlier turns included; they may differ from what these were.
      The session is opened if need be; the request runs without one if none can be opened.
    """

    session: str
    owner: str
    name: str
    after: str | None = None
    bos: int = -1
    whole: bool = False


class NewRequest(msgspec.Struct, tag="new", frozen=True, kw_only=True):
    """A prompt to run, as token ids. The client has expanded `n > 1`; a `sampling.seed` of None means any seed.

    - `token_ids`: int32 bytes.
    - `stream`: publish tokens as they are sampled; otherwise all when the request ends.
    - `top_logprobs`: alternatives with each output token's logprob, 0 to 20; -1 for no logprobs.
    - `logprob_start`: first position of `token_ids` whose logprob is wanted, -1 for none. In a session, a removed `bos`
      is not counted.
    - `tenant`, `flow`: its tenant, and the client request that it is part of; both share fairly, see `FairQueue`.
      Requests with an empty name share one.
    - `arrival`: `time.monotonic()` of the client.
    - `background`: it gets only what no other request waits for, see `Background`.
    - `wants`: for other wants than samples, `sampling.max_new_tokens` is 0.
    - `shared_len`: length of a prefix that other prompts probably share, such as a system message, in tokens.
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
    background: bool = False
    wants: Wants = SAMPLES


class AbortRequest(msgspec.Struct, tag="abort", frozen=True):
    """Ends a request in any state, without keeping its KV. It is published as finished with kind `abort`."""

    id: int


class StopRequest(msgspec.Struct, tag="stop", frozen=True):
    """Ends a request in whose output the client found a stop string: keeps its KV, and publishes nothing more.
    `num_tokens`: output tokens up to the one that completed the string, -1 for all. A session continues after them,
    even if the request has ended in the meantime."""

    id: int
    num_tokens: int = -1


class Command(msgspec.Struct, Generic[Result_co], frozen=True, kw_only=True):
    """A control command. Its `Reply` has the same `call`, a number that the link chooses. `Result_co`: what the caller
    gets. All commands are in `commands.py`."""

    call: int = 0

    def read(self, reply: Reply) -> Result_co:
        """Returns the result of one engine, from a reply without an error."""
        raise NotImplementedError

    def for_replica(self, index: int) -> Self:
        """Returns the command as this one of several replicas gets it."""
        return self


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """Stops the loop after all accepted requests have finished (`drain`), or at once."""

    drain: bool = True


OneWay = NewRequest | AbortRequest | StopRequest | Shutdown
Inbound = OneWay | Command[Any]


class WireLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The logprob of one token, and the most likely alternatives at its position, most likely first."""

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
    """A request got its row for the first time, `queue_seconds` after its arrival. `cached_tokens`: prompt tokens found
    in the prefix cache; `prompt_tokens`: of the prompt, with all earlier turns of a session; `drafting`: whether the
    engine speculates."""

    id: int
    cached_tokens: int
    queue_seconds: float = 0.0
    prompt_tokens: int = 0
    drafting: bool = False


class DraftCounts(msgspec.Struct, frozen=True, array_like=True):
    """Results of speculation for a request: `steps` with drafts, `drafts` in them, and how many of these were `right`,
    that is, accepted."""

    steps: int
    drafts: int
    right: int


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """A request ended.

    - `kind`: stop, length, abort or error; `matched_token`: the stop token that ended it, if one did.
    - `num_tokens`: of the output; `tokens`: int32 bytes of the output of a request that does not stream, otherwise
      empty.
    - `sampled`: when its first and its last token were sampled, by the client's `time.monotonic()`; None without
      tokens.
    - `drafts`: None if the engine does not speculate.
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
    """The outputs of one step, or only `started`: the requests that start with the next step.

    - `ids` (int64 bytes) and `tokens` (int32 bytes): the tokens of streaming requests, one id per token, in order. The
      last token of a request is in the same message as its `Finished`, or in an earlier one.
    - `logprobs`: (request id, entry) of all requests that asked, streaming or not, in order of positions;
      `prompt_logprobs`: the same for prompt positions, before the first output token, in one list per message.
    - `pooled`: (request id, float32 bytes) of requests that want a vector or scores, before their `Finished`.
    - `drafts`: int64 bytes `[requests, 3]`: id, drafts in this step, and accepted ones, of streaming requests with
      drafts. `Finished` has the sums, but a client that finds a stop string does not wait for it.
    - `retracted`: ids of requests that lost their rows and are back in the queue.
    """

    ids: bytes
    tokens: bytes
    started: list[Started] = []
    finished: list[Finished] = []
    logprobs: list[tuple[int, WireLogprob]] = []
    prompt_logprobs: list[tuple[int, list[WireLogprob]]] = []
    pooled: list[tuple[int, bytes]] = []
    drafts: bytes = b""
    retracted: list[int] = []


class GroupUsage(msgspec.Struct, frozen=True):
    """Usage of one cache group, in KV tokens, or in slots of states (`unit`: `token` or `slot`). `name`: see
    `architectures.group_names`, with `draft` before it for a draft model's group; `session_tokens`: the used ones that
    sessions keep."""

    name: str
    used_tokens: int
    max_tokens: int
    unit: str = "token"
    session_tokens: int = 0

    @property
    def usage(self) -> float:
        """Fraction of the pool that is neither free nor evictable."""
        return self.used_tokens / self.max_tokens

    @property
    def usage_name(self) -> str:
        """Its name in logs and `/server_info`."""
        return f"{self.name} token usage" if self.unit == "token" else f"{self.name} usage"


class ExpertBalance(msgspec.Struct, frozen=True, array_like=True):
    """The balance of one layer with experts. `tokens`: choices of an expert by a token since the start; `balancedness`:
    mean tokens per expert divided by the maximum, over the last minute (1: all experts are chosen equally often)."""

    layer: int
    tokens: int
    balancedness: float


StateValue = str | int | float | bool | None | dict[str, list[int]]
"""A value in `/server_info`."""


class SchedulerStats(msgspec.Struct, tag="stats", frozen=True, kw_only=True):
    """A snapshot, published at most every 0.25 s, and whenever the scheduler is idle. Counters count since the start.

    - `num_draft_steps`, `num_draft_tokens`, `num_accepted_tokens`: rows in steps with drafts, their drafts, and
      accepted drafts.
    - `gen_throughput`: output tokens per second over the last interval.
    - `num_used_tokens`, `max_total_tokens`, `num_session_tokens`: of the first cache group.
    - `weight_version`: of the weights that sampled all outputs that are sent after it, up to the next snapshot.
    - `groups`: all cache groups; empty if there is only one, of layers that see all tokens.
    - `num_pins_let_go`: how often a session lost its kept KV to others, or to the limit of sessions' memory.
    - `num_sessions_timed_out`: sessions closed by their timeout.
    - `experts`: of each layer whose experts are counted; a few seconds old while the scheduler is busy.
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
    weight_version: str = DEFAULT_WEIGHT_VERSION
    groups: list[GroupUsage] = []
    experts: list[ExpertBalance] = []

    @property
    def token_usage(self) -> float:
        """Fraction of the fullest pool that is neither free nor evictable."""
        if self.groups:
            return max(group.usage for group in self.groups)
        return self.num_used_tokens / self.max_total_tokens if self.max_total_tokens else 0.0

    @property
    def accept_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def accept_length(self) -> float:
        """Mean tokens of a row in a step with drafts."""
        return 1.0 + self.num_accepted_tokens / self.num_draft_steps if self.num_draft_steps else 0.0

    @property
    def cache_hit_rate(self) -> float:
        """Fraction of prompt tokens that came from the prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class Reply(msgspec.Struct, tag="reply", frozen=True):
    """The answer to the command with the same `call`. `error`: why it was refused."""

    call: int
    ok: bool
    message: str = ""
    state: dict[str, StateValue] = {}
    error: WireError | None = None
    report: bytes = b""


Outbound = StepOutputs | SchedulerStats | Reply


class Channel(Protocol):
    """The scheduler's end of the connection to its client. It carries messages in order, in both directions."""

    def receive(self, block: bool, seconds: float | None = None) -> Iterator[Inbound]:
        """The waiting messages, one at a time. With `block`, waits on a poll until there is one, for at most `seconds`.
        Messages that the caller does not take stay for the next call."""
        ...

    def send(self, message: Outbound) -> None: ...
