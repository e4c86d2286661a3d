"""The interfaces between the front end and engine cores: a link to one core, and the links of a front end. A link sends
requests to its core and stores the results in the requests' outputs. It does not handle text: the front end
(`client.AsyncEngineClient`) tokenizes requests, and the outputs convert tokens to text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from sglang_jax.engine.output import RequestOutputs
from sglang_jax.engine.types import ModelInfo, OutputDelta, ReplicaLoad, TokenizedRequest
from sglang_jax.errors import EngineDeadError, QueueFullError
from sglang_jax.sampling import SamplingParams
from sglang_jax.scheduler.messages import Command, Result, SchedulerStats


class Link(Protocol):
    """A running engine core, in this process or elsewhere."""

    @property
    def model_info(self) -> ModelInfo: ...

    @property
    def max_running_requests(self) -> int:
        """Maximum completions that the core runs at once."""
        ...

    @property
    def max_total_tokens(self) -> int:
        """KV tokens that the core's pool holds."""
        ...

    @property
    def external_load(self) -> int:
        """Completions of other clients that are running or queued at the core."""
        ...

    @property
    def alive(self) -> bool:
        """Whether the core takes requests; False once it has ended or was asked to stop."""
        ...

    @property
    def silent_seconds(self) -> float:
        """Seconds without a step although there is work; 0.0 if the core is not watched."""
        ...

    @property
    def stats(self) -> SchedulerStats:
        """The newest snapshot that the core's scheduler published."""
        ...

    def submit(self, outputs: RequestOutputs) -> None:
        """Sends `outputs.request`, and fills `outputs`. Raises `EngineDeadError`."""
        ...

    def abort(self, outputs: RequestOutputs) -> None:
        """Aborts a submitted request. Its outputs end with the text so far and kind ABORT."""
        ...

    def release(self, outputs: RequestOutputs) -> None:
        """Forgets a request whose reader has finished or left; aborts its unfinished completions."""
        ...

    async def call(self, command: Command[Result]) -> Result:
        """Has the core execute a command. Raises `RequestError` if it is refused, `EngineDeadError`."""
        ...

    async def ended(self) -> str:
        """Waits until the core has ended. Returns how it ended."""
        ...

    async def close(self, *, drain: bool = False) -> None:
        """Ends the core; with `drain`, after its requests have finished. May be called again."""
        ...


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request at the front end, and its state.

    - `request`: set once the prompt is tokenized; before that, a request can only be aborted.
    - `link`, `outputs`: the link that has the request, and its outputs there, or None; `index`: the link's number.
    - `lost`: number of cores that were lost before they started it; `full`: links whose queue had no room.
    """

    request: TokenizedRequest = field(init=False)
    aborted: bool = False
    link: Link | None = None
    outputs: RequestOutputs | None = None
    index: int = 0
    lost: int = 0
    full: set[int] = field(default_factory=set)

    def abort(self) -> None:
        self.aborted = True
        if self.link is not None and self.outputs is not None:
            self.link.abort(self.outputs)


class Links(Protocol):
    """The links of a front end: one (`single_link.SingleLink`), or those of replicas (`router.Router`)."""

    @property
    def model_info(self) -> ModelInfo: ...

    @property
    def max_running_requests(self) -> int: ...

    @property
    def alive(self) -> bool:
        """Whether a new request is accepted."""
        ...

    @property
    def gone(self) -> bool:
        """Whether there will never be a link again."""
        ...

    @property
    def stats(self) -> SchedulerStats: ...

    def admit(self, sampling: SamplingParams) -> SamplingParams:
        """Counts a request as arrived, and returns its sampling parameters for any link. Raises `EngineDeadError` if no
        link will ever take it."""
        ...

    async def choose(self, routed: RoutedRequest) -> Link | None:
        """Waits for a link that takes the request, and returns it; None if the request is aborted before. Raises
        `EngineDeadError`, `QueueFullError`."""
        ...

    def leave(self, routed: RoutedRequest) -> None:
        """Notes that the request has left the link that was chosen for it."""
        ...

    def check_first(self, delta: OutputDelta) -> None:
        """Checks the first delta of a request. Raises its `QueueFullError` if another link may have room."""
        ...

    def failed(self, routed: RoutedRequest, error: EngineDeadError | QueueFullError, *, partly_read: bool) -> None:
        """Handles the loss of the chosen link, or its full queue: returns if the request may be sent to another link,
        and raises the error for its client otherwise. `partly_read`: the client already has some output."""
        ...

    def wake(self) -> None:
        """Wakes requests that wait in `choose`, to find those that were aborted."""
        ...

    async def call(self, command: Command[Result], *, idle: bool) -> Result:
        """See `EngineClient.call`. `idle`: whether the front end has no requests."""
        ...

    def loads(self) -> list[ReplicaLoad]: ...

    async def drain(self, index: int | None, timeout: float | None) -> None: ...

    async def ended(self) -> str:
        """Waits until there will never be a link again. Returns why."""
        ...

    async def close(self, *, drain: bool) -> None: ...
