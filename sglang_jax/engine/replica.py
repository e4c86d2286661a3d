"""A replica: an engine that is started, watched, and restarted when it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from sglang_jax.config import EngineConfig
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.launch import TokenizerLoader, launch_engine, tokenizer_of_model
from sglang_jax.engine.placement import Placement, place_replicas
from sglang_jax.engine.types import ReplicaState, TextTokenizer
from sglang_jax.errors import CheckpointError, ConfigError, EngineDeadError

logger = logging.getLogger(__name__)


class ReplicaEngine(Protocol):
    async def ended(self) -> str: ...

    async def close(self, *, drain: bool = False) -> None: ...


EngineT_co = TypeVar("EngineT_co", bound=ReplicaEngine, covariant=True)


@dataclass(frozen=True, slots=True)
class Backoff:
    """How a lost engine is restarted. Times are in seconds. The first restart is immediate. While engines fail within
    `settled_after`, each further one waits twice as long as the one before, from `first_delay` up to `max_delay`.

    - `give_up`: consecutive failed starts after which the replica stops; None: never.
    - `max_restarts`: maximum consecutive restarts of engines that fail to start or within `settled_after`; None: no
      limit.
    """

    first_delay: float = 1.0
    max_delay: float = 30.0
    settled_after: float = 60.0
    give_up: int | None = 5
    max_restarts: int | None = None

    def delay(self, failures: int) -> float:
        return 0.0 if failures <= 1 else float(min(self.first_delay * 2 ** (failures - 2), self.max_delay))


class Replica(Generic[EngineT_co]):
    """An engine that is restarted after it was lost. All methods run on one event loop.

    - `start`: starts the engine and waits until it serves; called again for each restart.
    - `on_change`: called with the index after each change of `state`.
    - `clock`, `sleep`: time, in seconds.
    """

    def __init__(
        self,
        index: int,
        start: Callable[[], Awaitable[EngineT_co]],
        *,
        backoff: Backoff | None = None,
        on_change: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.index = index
        self.restarts = 0
        self.on_change = on_change
        self._start = start
        self._backoff = backoff or Backoff()
        self._clock = clock
        self._sleep = sleep
        self._state = ReplicaState.STARTING
        self._client: EngineT_co | None = None
        self._end = ""
        self._failures = 0
        self._restarts_in_a_row = 0
        self._changed = asyncio.Event()
        self._keep_task: asyncio.Task[None] | None = None

    @property
    def state(self) -> ReplicaState:
        return self._state

    @property
    def client(self) -> EngineT_co:
        """The engine. Raises `EngineDeadError` with the reason if there is none."""
        if self._client is None or self._state not in (ReplicaState.SERVING, ReplicaState.DRAINING):
            raise EngineDeadError(f"replica {self.index} is {self._state}: {self._end or 'no engine yet'}")
        return self._client

    @property
    def last_end(self) -> str:
        """How the last engine ended, or why the last start failed; empty before either."""
        return self._end

    async def start(self) -> None:
        """Starts the engine, and keeps one running from then on. Raises what the first start raises."""
        self._client = await self._start()
        self._set_state(ReplicaState.SERVING)
        self._keep_task = asyncio.create_task(self._keep_running(), name=f"replica-{self.index}")

    def start_later(self) -> None:
        """Like `start`, but retries until it succeeds, and returns immediately."""
        self._keep_task = asyncio.create_task(self._keep_running(), name=f"replica-{self.index}")

    async def serving(self) -> EngineT_co:
        """Waits until the engine serves, and returns it. Raises `EngineDeadError` if the replica has stopped."""
        while self._state is not ReplicaState.SERVING:
            if self._state is ReplicaState.STOPPED:
                raise EngineDeadError(f"replica {self.index} is stopped: {self._end}")
            await self._changed.wait()
        return self.client

    async def drain(self, timeout: float | None = None) -> None:
        """Lets the engine finish its requests within `timeout` seconds, starts a new one, and waits until it serves.
        Raises `EngineDeadError` if the replica does not serve, or if no new engine could be started."""
        if self._state is not ReplicaState.SERVING:
            raise EngineDeadError(f"replica {self.index} is {self._state}: only a serving replica can be drained")
        client = self.client
        logger.info("Replica %d drains", self.index)
        self._set_state(ReplicaState.DRAINING)
        changed = self._changed
        try:
            await asyncio.wait_for(client.close(drain=True), timeout)
        except TimeoutError:
            logger.warning("Replica %d did not drain within %g s; aborting its requests", self.index, timeout)
            await client.close()
        await changed.wait()
        await self.serving()

    async def close(self, *, drain: bool = False) -> None:
        """Ends the engine without a restart; with `drain`, after its requests have finished."""
        if self._keep_task is not None:
            self._keep_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keep_task
        self._end = "it was shut down"
        client, self._client = self._client, None
        self._set_state(ReplicaState.STOPPED)
        if client is not None:
            await client.close(drain=drain)

    async def _keep_running(self) -> None:
        """Watches and restarts the engine. Logs its own errors, which stop the replica: no caller awaits it."""
        try:
            while self._state is not ReplicaState.STOPPED:
                await self._watch()
                await self._restart()
        except Exception as error:
            logger.exception("Replica %d is abandoned", self.index)
            self._end = f"{type(error).__name__}: {error}"
            self._set_state(ReplicaState.STOPPED)

    async def _watch(self) -> None:
        """Waits until the engine, if there is one, has ended, and releases its resources."""
        client = self._client
        if client is None:
            return
        begin = self._clock()
        reason = await client.ended()
        if self._state is ReplicaState.DRAINING:
            logger.info("Replica %d is drained and restarts", self.index)
            self._set_state(ReplicaState.STARTING)
        else:
            self._end = reason
            if self._clock() - begin >= self._backoff.settled_after:
                self._failures = self._restarts_in_a_row = 0
            self._failures += 1
            self._set_state(ReplicaState.DEAD)
        await client.close()
        self._client = None

    async def _restart(self) -> None:
        if self._state is ReplicaState.DEAD and not await self._may_start_again("is lost", self._failures):
            return
        failed_starts = 0
        while self._client is None:
            try:
                self._client = await self._start()
            except (EngineDeadError, ConfigError, CheckpointError, OSError) as error:
                failed_starts += 1
                self._failures += 1
                self._end = f"it failed to start: {error}"
                self._set_state(ReplicaState.DEAD)
                if failed_starts == self._backoff.give_up:
                    self._give_up(f"{failed_starts} starts in a row failed")
                    return
                if not await self._may_start_again("has no engine", self._failures + 1):
                    return
            else:
                self.restarts += 1
                self._set_state(ReplicaState.SERVING)
                logger.info("Replica %d serves", self.index)

    async def _may_start_again(self, what: str, failures: int) -> bool:
        """Waits for the delay before the next start; False if the replica stops instead."""
        if self._restarts_in_a_row == self._backoff.max_restarts:
            self._give_up(f"it was restarted {self._restarts_in_a_row} times in a row")
            return False
        delay = self._backoff.delay(failures)
        logger.error("Replica %d %s (%s); it is restarted in %g s", self.index, what, self._end, delay)
        await self._sleep(delay)
        self._restarts_in_a_row += 1
        self._set_state(ReplicaState.STARTING)
        return True

    def _give_up(self, why: str) -> None:
        logger.error("Replica %d is not restarted again: %s (last failure: %s)", self.index, why, self._end)
        self._set_state(ReplicaState.STOPPED)

    def _set_state(self, state: ReplicaState) -> None:
        self._state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if self.on_change is not None:
            self.on_change(self.index)


LaunchReplica = Callable[[EngineConfig, Placement], Awaitable[AsyncEngineClient]]


async def launch_replicas(
    config: EngineConfig, count: int, *, launch: LaunchReplica | None = None, backoff: Backoff | None = None
) -> list[Replica[AsyncEngineClient]]:
    """Like `start_replicas`, with a front end per replica, for callers that distribute requests themselves."""
    return await start_replicas(config, count, launch or _launcher(), backoff=backoff)


async def start_replicas(
    config: EngineConfig,
    count: int,
    launch: Callable[[EngineConfig, Placement], Awaitable[EngineT_co]],
    *,
    backoff: Backoff | None = None,
) -> list[Replica[EngineT_co]]:
    """Starts `count` engines of the same model, each in a separate process on its own part of the machine, and waits
    until all serve. `launch`: starts an engine, or a link to one, from a replica's options and placement. Raises
    `ConfigError` if the machine is too small for them, and what `launch` raises; then no engine is left running."""
    replicas = create_replicas(config, count, launch, backoff=backoff)
    await start_all(replicas)
    return replicas


def create_replicas(
    config: EngineConfig,
    count: int,
    launch: Callable[[EngineConfig, Placement], Awaitable[EngineT_co]],
    *,
    backoff: Backoff | None = None,
) -> list[Replica[EngineT_co]]:
    """Like `start_replicas`, without starting them. Raises `ConfigError` if the machine is too small for them."""
    placements = place_replicas(config, count)
    for placement in placements:
        logger.info("%s", placement)
    return [
        Replica(index, partial(launch, placement.options(config), placement), backoff=backoff)
        for index, placement in enumerate(placements)
    ]


async def start_all(replicas: Sequence[Replica[EngineT_co]]) -> None:
    """Starts all replicas and waits until they serve. Raises the first error; then no engine is left running."""
    try:
        async with asyncio.TaskGroup() as starts:
            for replica in replicas:
                starts.create_task(replica.start())
    except BaseException as error:
        await close_replicas(replicas)
        if isinstance(error, ExceptionGroup):
            raise error.exceptions[0] from None
        raise


async def close_replicas(replicas: Sequence[Replica[EngineT_co]], *, drain: bool = False) -> None:
    await asyncio.gather(*(replica.close(drain=drain) for replica in replicas))


def _launcher() -> LaunchReplica:
    """Launches engines that share one tokenizer in this process."""
    shared = SharedTokenizer()

    async def launch(config: EngineConfig, placement: Placement) -> AsyncEngineClient:
        return await launch_engine(config, placement=placement, load_tokenizer=shared)

    return launch


class SharedTokenizer:
    """Loads a tokenizer once, for callers on any thread, with `load` (None for the tokenizer that the options name)."""

    def __init__(self, load: TokenizerLoader | None = None) -> None:
        self._load = load or tokenizer_of_model
        self._tokenizer: TextTokenizer | None = None
        self._lock = threading.Lock()

    def __call__(self, config: EngineConfig) -> TextTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._load(config)
            return self._tokenizer
