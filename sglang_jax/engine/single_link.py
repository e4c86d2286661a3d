"""The link of an engine that is not restarted: one in this process, or a replica that its owner restarts."""

from __future__ import annotations

import uuid

import msgspec

from sglang_jax.engine.core_link import CoreLink
from sglang_jax.engine.link import Link, RoutedRequest
from sglang_jax.engine.types import ModelInfo, OutputDelta, ReplicaLoad, ReplicaState
from sglang_jax.errors import EngineDeadError, ParameterError, QueueFullError
from sglang_jax.sampling import SamplingParams
from sglang_jax.scheduler.commands import SessionCommand
from sglang_jax.scheduler.messages import Command, Result, SchedulerStats


class SingleLink:
    """`Links` with one link. A failure of the link is final."""

    def __init__(self, link: CoreLink) -> None:
        self._link = link

    @property
    def model_info(self) -> ModelInfo:
        return self._link.model_info

    @property
    def max_running_requests(self) -> int:
        return self._link.max_running_requests

    @property
    def alive(self) -> bool:
        return self._link.alive

    @property
    def gone(self) -> bool:
        """The engine is not restarted."""
        return not self.alive

    @property
    def stats(self) -> SchedulerStats:
        return self._link.stats

    def admit(self, sampling: SamplingParams) -> SamplingParams:
        self._link.check_alive()
        return sampling

    async def choose(self, routed: RoutedRequest) -> Link | None:
        return None if routed.aborted else self._link

    def leave(self, routed: RoutedRequest) -> None:
        """Does nothing: no requests are counted."""

    def check_first(self, delta: OutputDelta) -> None:
        """Does nothing: there is no other link, so an error stays in the output."""

    def failed(self, routed: RoutedRequest, error: EngineDeadError | QueueFullError, *, partly_read: bool) -> None:
        """See `Links.failed`. There is no other link, so it always raises."""
        raise error

    def wake(self) -> None:
        """Does nothing: no request waits in `choose`."""

    async def call(self, command: Command[Result], *, idle: bool) -> Result:
        """See `Links.call`. The core checks by itself whether it is idle."""
        if isinstance(command, SessionCommand) and not command.id:
            command = msgspec.structs.replace(command, id=uuid.uuid4().hex)
        return await self._link.call(command)

    def loads(self) -> list[ReplicaLoad]:
        return [
            ReplicaLoad(
                index=0,
                state=ReplicaState.SERVING if self.alive else ReplicaState.STOPPED,
                max_running_requests=self.max_running_requests,
                max_total_tokens=self._link.max_total_tokens,
                stats=self.stats,
                silent_seconds=self._link.silent_seconds,
            )
        ]

    async def drain(self, index: int | None, timeout: float | None) -> None:
        raise ParameterError(
            "the only engine cannot be restarted while it serves; that needs dp_size 2 or more",
            param="replica",
        )

    async def ended(self) -> str:
        return await self._link.ended()

    async def close(self, *, drain: bool) -> None:
        await self._link.close(drain=drain)
