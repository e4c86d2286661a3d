"""Several replicas as one engine: every request goes to one of them, and what is asked of the engine to all."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from sglang_jax.engine import validation
from sglang_jax.engine.prompt_reader import PromptReader
from sglang_jax.engine.replica import Replica, ServingEngine, close_replicas
from sglang_jax.engine.routing import Candidate, RoutingPolicy, sticky_choice
from sglang_jax.engine.types import (
    FinishKind,
    FinishReason,
    GenerateInput,
    ModelInfo,
    OutputDelta,
    ReplicaLoad,
    ReplicaState,
    TextTokenizer,
)
from sglang_jax.errors import EngineDeadError, ParameterError, QueueFullError, ReplicaLostError, RequestError
from sglang_jax.scheduler.arrivals import arrival_seed
from sglang_jax.scheduler.messages import SchedulerStats

logger = logging.getLogger(__name__)

MAX_REROUTES = 3
"""How often a request is given to another replica after it was lost: whatever kills engines kills no more than that."""


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request at the door.

    - `prompt`: its token ids `[tokens]`, once they are known.
    - `engine`, `wire_id`: who has it, and under which name; None while nobody has.
    """

    request: GenerateInput
    prompt: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    engine: ServingEngine | None = None
    wire_id: str = ""
    aborted: bool = False

    def on_wire(self, wire_id: str) -> GenerateInput:
        """The request as a replica gets it."""
        return dataclasses.replace(self.request, prompt=self.prompt, request_id=wire_id)

    def abort(self) -> None:
        """Ends it wherever it is."""
        self.aborted = True
        if self.engine is not None:
            self.engine.abort(self.wire_id)


class ReplicatedClient:
    """`EngineClient` over replicas. All methods run on one event loop.

    A request that a replica had not begun when it was lost goes to another one, and so does one that a full queue
    refused. One that ran fails with `ReplicaLostError`. While no replica serves, but one is being started, requests
    wait.

    Requests without a seed get theirs here, by order of arrival, so that what they draw does not depend on where.

    **Arguments:**

    - `replicas`: at least one serves.
    - `policy`: which replica a request goes to, unless its `routing_key` tells.
    - `max_waiting`: most requests that wait while no replica serves; None: no limit.
    - `addresses`: HOST:PORT of each replica, where they are servers of their own.
    """

    def __init__(
        self,
        replicas: Sequence[Replica[ServingEngine]],
        tokenizer: TextTokenizer,
        policy: RoutingPolicy,
        *,
        random_seed: int = 0,
        max_waiting: int | None = None,
        addresses: Sequence[str] = (),
    ) -> None:
        self._replicas = replicas
        self._tokenizer = tokenizer
        self._reader = PromptReader(tokenizer)
        self._policy = policy
        self._random_seed = random_seed
        self._max_waiting = max_waiting
        self._addresses = addresses or [""] * len(replicas)
        self._model_info = next(one.client.model_info for one in replicas if one.state is ReplicaState.SERVING)
        self._in_flight = [0] * len(replicas)
        self._requests: dict[str, RoutedRequest] = {}
        self._names = itertools.count()
        self._name = uuid.uuid4().hex
        self._arrivals = 0
        self._waiting = 0
        self._changed = asyncio.Event()
        self._rolling = False
        for replica in replicas:
            replica.on_change = self._on_change
            self._on_change(replica.index)

    @property
    def tokenizer(self) -> TextTokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def model_info(self) -> ModelInfo:
        """What is known of the model."""
        return self._model_info

    @property
    def max_running_requests(self) -> int:
        """Most completions that the replicas which serve run at once."""
        return sum(replica.client.max_running_requests for replica in self._serving())

    @property
    def alive(self) -> bool:
        """A replica serves."""
        return bool(self._serving())

    @property
    def stats(self) -> SchedulerStats:
        """The replicas' newest snapshots together."""
        return total_stats([load.stats for load in self.loads()])

    def loads(self) -> list[ReplicaLoad]:
        """See `EngineClient.loads`."""
        return [self._load(replica) for replica in self._replicas]

    async def generate(self, request: GenerateInput) -> AsyncGenerator[OutputDelta, None]:
        """See `EngineClient.generate`. Raises `ReplicaLostError` as well."""
        validation.check_input(request, self._model_info)
        request_id = uuid.uuid4().hex if request.request_id is None else request.request_id
        if request_id in self._requests:
            raise ParameterError(f"request_id {request_id!r} belongs to a request that still runs", param="request_id")
        routed = self._requests[request_id] = RoutedRequest(self._with_seed(request))
        try:
            routed.prompt = await self._reader.token_ids(request.prompt, self._model_info.vocab_size)
            validation.check_length(request, len(routed.prompt), self._model_info.context_length)
            async with aclosing(self._route(routed)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            del self._requests[request_id]

    def abort(self, request_id: str) -> None:
        """See `EngineClient.abort`."""
        if request_id in self._requests:
            self._requests[request_id].abort()
            self._wake()

    def abort_all(self) -> None:
        """Ends all requests, as `abort` does."""
        for request_id in list(self._requests):
            self.abort(request_id)

    async def flush_cache(self) -> bool:
        """See `EngineClient.flush_cache`: of all replicas that serve."""
        if self._requests:
            return False
        serving = self._serving()
        done = await asyncio.gather(*(replica.client.flush_cache() for replica in serving))
        for replica, empty in zip(serving, done, strict=True):
            if empty:
                self._policy.reset(replica.index, replica.client.max_total_tokens)
        return all(done)

    async def states(self) -> list[dict[str, object]]:
        """See `EngineClient.states`; a replica that does not serve has nothing but its state."""
        return await asyncio.gather(*(self._state(replica) for replica in self._replicas))

    async def drain(self, index: int | None = None) -> None:
        """Lets one replica, or all in turn, finish what it has, and starts it anew; others take new requests meanwhile.

        **Raises:** `ParameterError` if there is no such replica, if it does not serve, or if another drain goes on;
        `EngineDeadError` if a replica does not come back: those after it are left alone then.
        """
        if index is not None and not 0 <= index < len(self._replicas):
            raise ParameterError(f"replica must be from 0 to {len(self._replicas) - 1}, got {index}", param="replica")
        if any(self._addresses):
            raise ParameterError(
                f"the replicas are servers of their own ({', '.join(self._addresses)}): end one by SIGTERM, which "
                "lets its requests finish while new ones go to the others, and start it again",
                param="replica",
            )
        if self._rolling:
            raise ParameterError("a drain goes on already; wait until it is done", param="replica")
        todo = self._replicas if index is None else [self._replicas[index]]
        idle = [one for one in todo if one.state is not ReplicaState.SERVING]
        if idle:
            raise ParameterError(
                f"replica {idle[0].index} is {idle[0].state}; only replicas that serve are drained", param="replica"
            )
        self._rolling = True
        try:
            for replica in todo:
                await replica.drain()
        finally:
            self._rolling = False

    async def close(self, *, drain: bool = False) -> None:
        """Ends all replicas, with `drain` once their requests have finished."""
        await close_replicas(self._replicas, drain=drain)
        self._reader.close()

    def _with_seed(self, request: GenerateInput) -> GenerateInput:
        sampling = request.sampling
        first = self._arrivals + 1
        self._arrivals += sampling.n
        if sampling.seed is not None:
            return request
        seed = arrival_seed(self._random_seed, first)
        return dataclasses.replace(request, sampling=dataclasses.replace(sampling, seed=seed))

    async def _route(self, routed: RoutedRequest) -> AsyncGenerator[OutputDelta, None]:
        """The outputs of one replica; of the next if that one cannot begin."""
        lost, full = 0, set[int]()
        while True:
            replica = await self._choose(routed, full)
            if replica is None:
                for output in _aborted_outputs(routed):
                    yield output
                return
            engine, begun = replica.client, False
            try:
                async with aclosing(self._attempt(routed, replica.index, engine)) as outputs:
                    async for output in outputs:
                        refusal = _refusal(output)
                        if refusal is not None and not begun:
                            raise refusal
                        begun = True
                        yield output
                return
            except QueueFullError:
                full.add(replica.index)
                if begun:
                    raise
            except EngineDeadError as error:
                lost += 1
                if begun or error.started or lost > (MAX_REROUTES if error.started is False else 1):
                    raise ReplicaLostError(
                        f"replica {replica.index} was lost while it had the request ({error.message}); send it again",
                        started=True,
                    ) from error
                logger.info("A request that replica %d had not begun goes to another", replica.index)

    async def _attempt(
        self, routed: RoutedRequest, index: int, engine: ServingEngine
    ) -> AsyncGenerator[OutputDelta, None]:
        completions = routed.request.sampling.n
        routed.engine, routed.wire_id = engine, f"{self._name}-{next(self._names)}"
        self._in_flight[index] += completions
        try:
            async with aclosing(engine.generate(routed.on_wire(routed.wire_id))) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._in_flight[index] -= completions
            routed.engine = None

    async def _choose(self, routed: RoutedRequest, full: set[int]) -> Replica[ServingEngine] | None:
        """The replica for a request, once there is one that is not `full`; None if it is aborted meanwhile."""
        while not routed.aborted:
            serving = [one for one in self._serving() if one.index not in full]
            if serving:
                return self._pick(routed, serving)
            if self._serving():
                raise QueueFullError("the queues of all replicas that serve are full; try again later")
            if all(replica.state is ReplicaState.STOPPED for replica in self._replicas):
                reasons = "; ".join(f"{replica.index}: {replica.last_end}" for replica in self._replicas)
                raise EngineDeadError(f"no replica is left ({reasons})")
            if self._max_waiting is not None and self._waiting >= self._max_waiting:
                raise QueueFullError(
                    f"no replica serves at the moment and {self._waiting} requests wait, the limit is "
                    f"{self._max_waiting}; try again later"
                )
            self._waiting += 1
            try:
                await self._changed.wait()
            finally:
                self._waiting -= 1
        return None

    def _pick(self, routed: RoutedRequest, serving: Sequence[Replica[ServingEngine]]) -> Replica[ServingEngine]:
        candidates = [
            Candidate(replica.index, self._in_flight[replica.index] + replica.client.foreign_load)
            for replica in serving
        ]
        tokens, key, namespace = routed.prompt.tobytes(), routed.request.routing_key, routed.request.extra_key
        index = sticky_choice(key, candidates) if key else self._policy.choose(tokens, namespace, candidates)
        self._policy.sent(index, tokens, namespace)
        return self._replicas[index]

    def _serving(self) -> list[Replica[ServingEngine]]:
        """An engine is lost some turns of the event loop before its replica knows."""
        return [one for one in self._replicas if one.state is ReplicaState.SERVING and one.client.alive]

    def _on_change(self, index: int) -> None:
        replica = self._replicas[index]
        if replica.state is ReplicaState.SERVING:
            self._policy.reset(index, replica.client.max_total_tokens)
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _load(self, replica: Replica[ServingEngine]) -> ReplicaLoad:
        engine = replica.client if replica.state in (ReplicaState.SERVING, ReplicaState.DRAINING) else None
        return ReplicaLoad(
            index=replica.index,
            state=replica.state,
            max_running_requests=0 if engine is None else engine.max_running_requests,
            max_total_tokens=0 if engine is None else engine.max_total_tokens,
            stats=SchedulerStats() if engine is None else engine.stats,
            address=self._addresses[replica.index],
            in_flight=self._in_flight[replica.index],
            restarts=replica.restarts,
            last_end=replica.last_end,
        )

    async def _state(self, replica: Replica[ServingEngine]) -> dict[str, object]:
        known: dict[str, object] = {"replica": replica.index, "replica_state": replica.state.value}
        if replica.state is not ReplicaState.SERVING:
            return known
        try:
            return known | await replica.client.state()
        except EngineDeadError as error:
            return known | {"replica_state": ReplicaState.DEAD.value, "error": error.message}


def _refusal(output: OutputDelta) -> RequestError | None:
    """The error of an output that ended because a queue was full."""
    error = output.finish.error if output.finish is not None else None
    return error if isinstance(error, QueueFullError) else None


def _aborted_outputs(routed: RoutedRequest) -> list[OutputDelta]:
    return [
        OutputDelta(
            index=index,
            text="",
            token_ids=[],
            prompt_tokens=len(routed.prompt),
            completion_tokens=0,
            cached_tokens=0,
            finish=FinishReason(FinishKind.ABORT),
        )
        for index in range(routed.request.sampling.n)
    ]


_MEANS: dict[str, Callable[[Sequence[float]], float]] = {"new_token_reserve": lambda values: sum(values) / len(values)}
"""How a figure of several schedulers becomes one, where it is not their sum."""


def total_stats(stats: Sequence[SchedulerStats]) -> SchedulerStats:
    """The figures of several schedulers as those of one."""
    values = [msgspec.structs.asdict(one) for one in stats]
    return SchedulerStats(**{name: _MEANS.get(name, sum)([one[name] for one in values]) for name in values[0]})
