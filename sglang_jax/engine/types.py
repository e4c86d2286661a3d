"""The input and output types of an engine, shared by server, command line and scripts."""

from __future__ import annotations

import hmac
from collections.abc import AsyncGenerator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from sglang_jax.architectures.pooling import Pooler
from sglang_jax.config import DEFAULT_WEIGHT_VERSION
from sglang_jax.engine.output_buffer import LazyOutput
from sglang_jax.errors import RequestError
from sglang_jax.sampling.defaults import GenerationDefaults
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.sampling.wants import SAMPLES, Wants
from sglang_jax.scheduler.messages import Command, DraftCounts, Result, SchedulerStats, SessionTurn


@dataclass(frozen=True, slots=True)
class SessionTurnInput:
    """Makes a prompt the next turn of the session `session_id`.

    - `after`: the `request_id` of the turn that it follows, which must be the session's last; None: the last one.
    - `name`: the name of the turn, if not its `request_id`.
    - `opening`: the token that starts a conversation, left out in later turns; -1: there is none; None: the token that
      the tokenizer adds before texts.
    - `whole`: the prompt is the whole conversation, which may differ from the earlier turns. The session is opened if
      need be, and keeps in the cache what this turn leaves there; the prompt also runs if none can be opened.
    """

    session_id: str
    after: str | None = None
    name: str | None = None
    opening: int | None = None
    whole: bool = False


class Progress(Protocol):
    """Where a link reports what happens to a prompt's completions. Its methods run on the event loop and return at
    once."""

    def started(self, index: int, queue_seconds: float) -> None:
        """Completion `index` has got a row, after it waited for `queue_seconds`."""
        ...

    def retracted(self, index: int) -> None:
        """Completion `index` has lost its row, and waits for another."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateInput:
    """One prompt, as a client asks for it. `sampling.n > 1` gives n outputs with `index` 0..n-1.

    - `prompt`: text, or token ids.
    - `request_id`: chosen by the client for `abort`; generated if None.
    - `stream`: return outputs as they grow; otherwise only the finished output.
    - `logprob_start_len`: first prompt position whose logprob is returned; -1 for none. In a session, it counts from
      the turn's first token.
    - `top_logprobs_num`: alternatives per position, at most `MAX_TOP_LOGPROBS`.
    - `extra_key`: cached prefixes are shared only between requests with the same value.
    - `priority`: higher goes first under the priority policy.
    - `routing_key`: requests with the same key go to the same replica while it serves.
    - `markers`: special tokens to keep in the text even if special tokens are skipped, for parsers of replies. They are
      not searched for stop strings.
    - `continues_text`: the output continues the prompt's text, so a leading space is kept. False: the output is a
      separate text, such as a chat answer; sentencepiece starts each text with a space.
    - `session`: the prompt is the next turn of a session that belongs to the request's tenant.
    - `shared_len`: the number of the prompt's first tokens that other prompts probably share. Layers that keep states
      store a snapshot there.
    - `wants`: for others than samples, `sampling` is `pooling.NO_SAMPLES`, and there is one finished output.
    - `progress`: what the link tells when completions start; other servers do not tell it.
    """

    prompt: str | Sequence[int] | NDArray[np.int32]
    sampling: SamplingParams = SamplingParams()
    request_id: str | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    extra_key: str | None = None
    priority: int = 0
    routing_key: str | None = None
    markers: frozenset[int] = frozenset()
    continues_text: bool = True
    session: SessionTurnInput | None = None
    shared_len: int = 0
    wants: Wants = SAMPLES
    progress: Progress | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Origin:
    """Who sends a request.

    - `tenant`: the client. Queued tenants take turns.
    - `flow`: which of the tenant's calls a prompt belongs to. The calls of a tenant take turns, too.
    - `cache_secret`: separates the tenant's cached prefixes from those of others; empty if they are shared.
    - `background`: its requests get only rows and pages that no other request waits for.
    """

    tenant: str = ""
    flow: str = ""
    cache_secret: bytes = b""
    background: bool = False

    def namespace(self, extra_key: str | None) -> str | None:
        """Returns the part of the prefix cache for requests with this `extra_key`; None for the common part."""
        if not self.cache_secret:
            return extra_key
        name = b"\1" + extra_key.encode("utf-8", "surrogatepass") if extra_key else b"\0"
        return "key-" + hmac.digest(self.cache_secret, name, "sha256").hex()


SCRIPT = Origin()
"""The origin of requests of the engine's own process."""


@dataclass(frozen=True, slots=True)
class TokenizedRequest:
    """A request as links take it: what the client asks for, and what the front end adds. The front end makes it once,
    after it has tokenized the prompt.

    - `request_id`: the client's, or a generated one.
    - `token_ids`: the prompt, int32 `[tokens]`.
    - `sampling`: the client's, with a seed if replicas need one.
    - `namespace`: requests share cached prefixes only within one.
    - `session`: the turn, with its owner, its name, and the token that starts a conversation.
    """

    input: GenerateInput
    request_id: str
    token_ids: NDArray[np.int32]
    sampling: SamplingParams
    origin: Origin
    namespace: str | None
    session: SessionTurn | None


class FinishKind(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why an output ended. `matched`: the stop string or the token id; `error`: set only for `ERROR`."""

    kind: FinishKind
    matched: str | int | None = None
    error: RequestError | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's logprob under the raw logits (None for a prompt's first token). `top`: the most likely alternatives as
    (logprob, token id), most likely first."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[float, int], ...] = ()


class OutputDelta(msgspec.Struct, kw_only=True):
    """The new part of a completion since its last delta; without streaming, the whole finished completion.

    The concatenated deltas of a completion are its text, token ids and logprobs. Text in a stream never ends inside a
    multi-byte character, and never contains part of a stop string.

    - `completion_tokens`: output tokens so far, including these.
    - `prompt_logprobs`: only in the completion's first delta, if requested.
    - `queue_seconds`: only in the first delta: seconds until it got a row. None from a remote server that does not
      report it.
    - `sampled`: when its first and its last token were sampled, by `time.monotonic()`; only in the last delta, and only
      if the engine reports it.
    - `drafts`: in the last delta of a completion that the engine ended, if it drafts tokens.
    - `weight_version`: of the weights that sampled its last token.
    - `pooled`: the vector or scores of the prompt `[numbers]`, if it wants these.
    """

    index: int
    text: str
    token_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_seconds: float | None = None
    sampled: tuple[float, float] | None = None
    finish: FinishReason | None = None
    logprobs: Sequence[TokenLogprob] = ()
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    drafts: DraftCounts | None = None
    weight_version: str = DEFAULT_WEIGHT_VERSION
    pooled: NDArray[np.float32] | None = None


@dataclass(slots=True, kw_only=True)
class GenerateOutput(LazyOutput):
    """State of one completion, for callers in Python. In a stream, each output has everything generated so far, and the
    part that is new since the previous output: the concatenated `delta_*` equal the final `text`, `output_ids` and
    `logprobs`. These three are assembled when one of them is first read, at a cost proportional to their length."""

    request_id: str
    index: int
    text: str
    delta_text: str
    output_ids: list[int]
    delta_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish: FinishReason | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    delta_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None
    drafts: DraftCounts | None = None
    pooled: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Properties of the model. `generation_defaults`: values of sampling fields that a request leaves out; empty if the
    engine does not apply the model's defaults. `keeps_states`: some layers keep a state, and no keys. `weight_version`:
    of the weights at the start. `pooler`: of a model that gives vectors or scores, `pooled_width` numbers each."""

    model_path: str
    architecture: str
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    generation_defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    keeps_states: bool = False
    weight_version: str = DEFAULT_WEIGHT_VERSION
    pooler: Pooler | None = None
    pooled_width: int = 0


class ReplicaState(StrEnum):
    """State of a replica. `DEAD`: lost, and to be restarted; `STOPPED`: closed, or not restarted any more."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    DEAD = "dead"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """One replica, as operators see it.

    - `max_running_requests`, `max_total_tokens`: its rows and KV tokens; 0 while it has no engine.
    - `address`: HOST:PORT of a remote server, else empty.
    - `stats`: the newest snapshot of its scheduler; zeros while it has none.
    - `in_flight`: completions that this process has sent it and that have not ended.
    - `silent_seconds`: how long its engine has made no step although it has work.
    - `restarts`: number of restarts; `last_end`: why the last engine ended or failed to start.
    """

    index: int
    state: ReplicaState
    max_running_requests: int
    max_total_tokens: int
    stats: SchedulerStats
    address: str = ""
    in_flight: int = 0
    silent_seconds: float = 0.0
    restarts: int = 0
    last_end: str = ""


class StreamDecoder(Protocol):
    """Turns the tokens of one output into text. An incomplete character is held back, not returned as U+FFFD."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str:
        """Returns the text that was held back, after the output has ended."""
        ...


class TextTokenizer(Protocol):
    """Converts text to token ids and back. Thread-safe."""

    @property
    def longest_token(self) -> int:
        """Maximum characters of text in one token."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Returns the token ids of two texts as one input, with the special tokens of this tokenizer's pairs. Raises as
        `encode`."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def stream_decoder(
        self,
        skip_special_tokens: bool = True,
        *,
        continues_text: bool = False,
        markers: Set[int] = frozenset(),
    ) -> StreamDecoder:
        """Returns a decoder for one output. It is cheap to make and must not be shared between threads.
        `continues_text`, `markers`: see `GenerateInput`."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of the tokens that `skip_special_tokens` leaves out, by their text."""
        ...

    def token_id(self, text: str) -> int | None:
        """The token that the vocabulary spells exactly so, special or not; None if there is none."""
        ...

    @property
    def role_tokens(self) -> Mapping[str, str]:
        """The text of tokens that have a role, by transformers' names of the roles, such as `bos_token`."""
        ...

    @property
    def chat_template(self) -> str:
        """The chat template; empty without one. Raises `RequestError` if there are several and none is for chats."""
        ...

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """The format of replies in transformers' schema, if the checkpoint has one; else None."""
        ...

    def token_text(self, token_id: int) -> str:
        """One token as text, special tokens included."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token, which may be part of a character."""
        ...

    def check_roles(self, roles: Sequence[object]) -> None:
        """Raises `ParameterError` for the first message role that the chat template lacks, naming those it has."""
        ...

    def marked(self, text: str) -> str:
        """Returns a message's text as `render_chat` passes it to the template."""
        ...

    def render_chat(
        self,
        messages: Sequence[dict[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Renders a conversation with the chat template, for `encode`. Control tokens that messages spell out are
        marked as text. `tools` are in OpenAI's form; `variables` are further inputs of the template. Raises
        `RequestError` if the template refuses it or there is none, and as `check_roles` does."""
        ...


class EngineClient(Protocol):
    """An engine as the server sees it. All methods run on the server's event loop."""

    @property
    def tokenizer(self) -> TextTokenizer: ...

    async def encode(
        self, text: str, origin: Origin, *, add_special_tokens: bool, max_tokens: int, param: str
    ) -> list[int]:
        """Returns the token ids of a text without blocking other requests. Tenants and their flows take turns. Raises
        `PromptTooLongError`, naming `param`, for a text that cannot fit the model's context, and for a large one of
        more than `max_tokens`."""
        ...

    @property
    def model_info(self) -> ModelInfo: ...

    @property
    def max_running_requests(self) -> int:
        """Maximum completions that run at once."""
        ...

    @property
    def alive(self) -> bool:
        """Whether an engine process takes requests."""
        ...

    @property
    def gone(self) -> bool:
        """Whether no engine process is left, and none will be restarted."""
        ...

    @property
    def stats(self) -> SchedulerStats:
        """The newest snapshot that the scheduler published."""
        ...

    def generate(self, request: GenerateInput, origin: Origin = SCRIPT) -> AsyncGenerator[OutputDelta, None]:
        """Validates, then yields deltas; without `stream`, one finished delta for each of the n completions. Closing
        the generator aborts the request. Raises `RequestError` for bad input, and `EngineDeadError` at any time."""
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request; its outputs end with the text so far and kind ABORT. Unknown ids are ignored."""
        ...

    def abort_all(self) -> None: ...

    async def call(self, command: Command[Result]) -> Result:
        """Executes a control command; its class in `scheduler/commands.py` describes the result. Raises `RequestError`
        if it is refused, `EngineDeadError`."""
        ...

    async def drain(self, index: int | None = None, timeout: float | None = None) -> None:
        """Drains and restarts one replica, or all one after the other; each gets `timeout` seconds to finish its
        requests, while others take new ones. Raises `ParameterError` if that cannot be done."""
        ...

    def loads(self) -> list[ReplicaLoad]:
        """The load of each replica. An engine without replicas is reported as one."""
        ...

    async def close(self, *, drain: bool = False) -> None:
        """Ends the engine; with `drain`, after its requests have finished. May be called again without `drain`."""
        ...
