"""What lies between the front end and engine cores: links, and who chooses among them.

A link carries requests to one core, and what the core gives into the requests' outputs. It knows no text: the front end
(`client.AsyncEngineClient`) has checked and tokenized the request, and the outputs turn tokens into text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from sglang_jax.engine.output import RequestOutputs
from sglang_jax.engine.types import GenerateInput, ModelInfo, OutputDelta, ReplicaLoad, SessionOptions
from sglang_jax.errors import EngineDeadError, QueueFullError
from sglang_jax.scheduler.messages import SchedulerStats


class Link(Protocol):
    """A running engine core, wherever it is."""

    @property
    def model_info(self) -> ModelInfo: ...

    @property
    def max_running_requests(self) -> int:
        """Most completions that it runs at once."""
        ...

    @property
    def max_total_tokens(self) -> int:
        """KV tokens that its pool holds."""
        ...

    @property
    def foreign_load(self) -> int:
        """Completions of other clients that it runs or that wait there."""
        ...

    @property
    def alive(self) -> bool:
        """False once it is gone or was told to stop."""
        ...

    @property
    def silent_seconds(self) -> float:
        """How long it has made no step though it has work; 0.0 where nobody watches."""
        ...

    @property
    def stats(self) -> SchedulerStats:
        """The newest snapshot that its scheduler published."""
        ...

    def submit(self, outputs: RequestOutputs) -> None:
        """Sends `outputs.request`, whose prompt is token ids; what comes back goes into `outputs`. Raises
        `EngineDeadError`."""
        ...

    def abort(self, outputs: RequestOutputs) -> None:
        """Ends a request that was submitted; its outputs end with what was generated, of kind ABORT."""
        ...

    def release(self, outputs: RequestOutputs) -> None:
        """The reader is done with a request, or gives it up: what still runs of it is ended."""
        ...

    async def open_session(self, options: SessionOptions) -> None:
        """Opens the session of this id. Raises as `EngineClient.open_session` does."""
        ...

    async def close_session(self, session_id: str, owner: str) -> None:
        """See `EngineClient.close_session`."""
        ...

    async def flush_cache(self) -> bool:
        """See `EngineClient.flush_cache`."""
        ...

    async def start_profile(self, folder: str, steps: int | None) -> str:
        """Has it record what it computes, and returns the folder that the recording will be in: `folder`, or one that a
        server elsewhere has for that. `steps`: how many, None for all until `stop_profile`.

        **Raises:** `ParameterError` while a profile is taken, or if the folder cannot be written; `EngineDeadError`.
        """
        ...

    async def stop_profile(self) -> str:
        """Returns once the recording is written, with its folder. Raises `ParameterError` if there is none;
        `EngineDeadError`."""
        ...

    async def state(self) -> dict[str, object]:
        """The scheduler's and the runner's figures. Raises `EngineDeadError`."""
        ...

    async def cache_reports(self) -> list[dict[str, object]]:
        """What lies in its prefix cache, as `CacheReport` has it; several if it is a server of several replicas. Raises
        `EngineDeadError`."""
        ...

    async def ended(self) -> str:
        """Waits until the core is gone; tells how it ended."""
        ...

    async def close(self, *, drain: bool = False) -> None:
        """Ends the core, with `drain` once its requests have finished. May be called again."""
        ...


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request at the front end, and what became of it so far.

    - `request`: with its prompt as token ids `[tokens]` once they are known, and its name.
    - `link`, `outputs`: who has it, and what that gives; None while nobody has. `index`: the link's number.
    - `lost`: how often a core was lost before it began the request; `full`: links whose queue had no room.
    """

    request: GenerateInput
    aborted: bool = False
    link: Link | None = None
    outputs: RequestOutputs | None = None
    index: int = 0
    lost: int = 0
    full: set[int] = field(default_factory=set)

    def abort(self) -> None:
        """Ends it wherever it is."""
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
        """A request that comes now is taken."""
        ...

    @property
    def gone(self) -> bool:
        """There will never be a link again."""
        ...

    @property
    def stats(self) -> SchedulerStats: ...

    def admit(self, request: GenerateInput) -> GenerateInput:
        """The request as it goes to any link. Raises `EngineDeadError` if none will ever take it."""
        ...

    async def choose(self, routed: RoutedRequest) -> Link | None:
        """The link that a request goes to, once there is one; None if it is aborted before. Raises `EngineDeadError`,
        `QueueFullError`."""
        ...

    def leave(self, routed: RoutedRequest) -> None:
        """The request is no longer at the link that was chosen for it."""
        ...

    def check_first(self, delta: OutputDelta) -> None:
        """Looks at the first delta of a request. Raises the `QueueFullError` that it ended in if another link may have
        room."""
        ...

    def failed(self, routed: RoutedRequest, error: EngineDeadError | QueueFullError, *, partly_read: bool) -> None:
        """The chosen link was lost, or its queue was full. Returns if the request may go to another; raises what its
        client is told otherwise. `partly_read`: its reader has something of it."""
        ...

    def wake(self) -> None:
        """A request that waits in `choose` may have been aborted."""
        ...

    async def open_session(self, options: SessionOptions) -> str:
        """See `EngineClient.open_session`."""
        ...

    async def close_session(self, session_id: str, owner: str) -> None:
        """See `EngineClient.close_session`."""
        ...

    async def flush_cache(self, *, idle: bool) -> bool:
        """See `EngineClient.flush_cache`. `idle`: the front end has no requests."""
        ...

    def loads(self) -> list[ReplicaLoad]: ...

    async def states(self) -> list[dict[str, object]]: ...

    async def cache_reports(self) -> list[dict[str, object]]: ...

    async def start_profile(self, folder: str, steps: int | None) -> list[str]: ...

    async def stop_profile(self) -> list[str]: ...

    async def drain(self, index: int | None, timeout: float | None) -> None: ...

    async def ended(self) -> str:
        """Waits until there will never be a link again; tells why."""
        ...

    async def close(self, *, drain: bool) -> None: ...
