"""Routes each request to one replica, and sends management calls to all of them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import uuid
from collections.abc import Callable, Sequence

import msgspec

from sglang_jax.engine.fan_out import call_all_or_none, call_each
from sglang_jax.engine.link import Link, RoutedRequest
from sglang_jax.engine.replica import Replica, close_replicas
from sglang_jax.engine.routing import Candidate, RoutingPolicy, session_home, sticky_choice
from sglang_jax.engine.types import ModelInfo, OutputDelta, ReplicaLoad, ReplicaState
from sglang_jax.errors import (
    EngineDeadError,
    ParameterError,
    QueueFullError,
    ReplicaLostError,
    SessionNotFoundError,
    quote,
)
from sglang_jax.sampling import SamplingParams
from sglang_jax.scheduler.commands import COMMANDS, AllOrNone, Each, OfSession, Rule, SessionCommand
from sglang_jax.scheduler.messages import Command, ExpertBalance, GroupUsage, Result, SchedulerStats, SessionTurn
from sglang_jax.scheduler.request_builder import arrival_seed

logger = logging.getLogger(__name__)

MAX_REROUTES = 3
"""Maximum reroutes of a request after replicas were lost: bounds the engines that a harmful request can kill."""


class Router:
    """`Links` of one or more replicas. All methods run on one event loop.

    If a replica is lost, its unstarted requests go to another replica, or to the same one after its restart. Its
    running requests fail, with `ReplicaLostError` if there are other replicas. A request that a full queue refused goes
    to another replica. While no replica serves, but one is starting, requests wait, `max_waiting` at most.

    Requests without a seed get one here, by order of arrival, so that their samples do not depend on the replica.

    A session belongs to one replica and is lost with it. `session_home` computes the replica from the session's id, so
    the router stores nothing about sessions.

    - `replicas`: at least one serves.
    - `policy`: chooses the replica of a request without a `routing_key`.
    - `addresses`: HOST:PORT of each replica, empty for engines of this server; may be left out if all are.
    """

    def __init__(
        self,
        replicas: Sequence[Replica[Link]],
        policy: RoutingPolicy,
        *,
        random_seed: int = 0,
        max_waiting: int | None = None,
        addresses: Sequence[str] = (),
    ) -> None:
        self.replicas = replicas
        self._policy = policy
        self._random_seed = random_seed
        self._max_waiting = max_waiting
        self._addresses = addresses or [""] * len(replicas)
        self._is_single = len(replicas) == 1 and not addresses
        self._model_info = next(one.client.model_info for one in replicas if one.state is ReplicaState.SERVING)
        self._in_flight = [0] * len(replicas)
        self._arrivals = 0
        self._num_waiting = 0
        self._changed = asyncio.Event()
        self._draining = False
        for replica in replicas:
            replica.on_change = self._on_change
            self._on_change(replica.index)

    @property
    def model_info(self) -> ModelInfo:
        return self._model_info

    @property
    def max_running_requests(self) -> int:
        return sum(replica.client.max_running_requests for replica in self._serving())

    @property
    def alive(self) -> bool:
        return bool(self._serving())

    @property
    def gone(self) -> bool:
        return all(replica.state is ReplicaState.STOPPED for replica in self.replicas)

    @property
    def stats(self) -> SchedulerStats:
        return total_stats([load.stats for load in self.loads()])

    def loads(self) -> list[ReplicaLoad]:
        return [self._load(replica) for replica in self.replicas]

    @property
    def num_waiting(self) -> int:
        """Requests that wait because no replica serves."""
        return self._num_waiting

    def admit(self, sampling: SamplingParams) -> SamplingParams:
        """Adds a seed if there is none."""
        first = self._arrivals + 1
        self._arrivals += sampling.n
        if sampling.seed is not None:
            return sampling
        return dataclasses.replace(sampling, seed=arrival_seed(self._random_seed, first))

    async def choose(self, routed: RoutedRequest) -> Link | None:
        turn = routed.request.session
        if turn is not None and not turn.whole:
            return self._choose_for_turn(routed, turn)
        home = None if turn is None or routed.aborted else self._home(turn.session)
        if home is not None and home.index not in routed.full:
            self._note_sent(routed, home.index)
            return home.client
        while not routed.aborted:
            serving = self._serving()
            if candidates := [one for one in serving if one.index not in routed.full]:
                return self._pick(routed, candidates)
            if serving:
                raise QueueFullError("the queues of all serving replicas are full; try again later")
            await self._wait_for_replica()
        return None

    def _choose_for_turn(self, routed: RoutedRequest, turn: SessionTurn) -> Link | None:
        if routed.aborted:
            return None
        home = self._home(turn.session)
        if home is None:
            raise SessionNotFoundError(
                f"there is no session {quote(turn.session)}: its replica was lost with all its sessions; "
                "open a new one",
                param="session_params.id",
            )
        if home.index in routed.full:
            raise QueueFullError(f"the queue of the replica of session {quote(turn.session)} is full; try again later")
        self._note_sent(routed, home.index)
        return home.client

    def _home(self, session_id: str) -> Replica[Link] | None:
        """Returns the replica of a session; None if it does not serve."""
        index = session_home(session_id, len(self.replicas))
        return next((one for one in self._serving() if one.index == index), None)

    async def call(self, command: Command[Result], *, idle: bool) -> Result:
        rule: Rule[Result] = COMMANDS[type(command)]
        match rule:
            case OfSession():
                return await self._call_home(command, rule)
            case AllOrNone():
                serving = self._some_serving()
                if self._is_single:
                    return await serving[0].client.call(command)
                return rule.merge(await call_all_or_none(command, rule, serving))
            case Each():
                if rule.while_busy is not None and not idle:
                    return rule.while_busy
                results = await call_each(command, rule, self._serving() if rule.absent is None else self.replicas)
                if rule.empties_cache:
                    for index in [index for index, emptied in results.items() if emptied]:
                        self._policy.reset(index, self.replicas[index].client.max_total_tokens)
                return rule.merge(results)

    async def _call_home(self, command: Command[Result], rule: OfSession[Result]) -> Result:
        """Sends a session's command to its replica. A session without an id goes to a replica with the lowest load."""
        assert isinstance(command, SessionCommand)
        session_id = command.id or self._new_session_id()
        home = self._home(session_id)
        if home is None:
            raise rule.lost(session_id)
        return await home.client.call(msgspec.structs.replace(command, id=session_id))

    def _new_session_id(self) -> str:
        serving = self._some_serving()
        loads = {one.index: self._in_flight[one.index] + one.client.external_load for one in serving}
        least = {index for index, load in loads.items() if load == min(loads.values())}
        while session_home(made_up := uuid.uuid4().hex, len(self.replicas)) not in least:
            pass
        return made_up

    def leave(self, routed: RoutedRequest) -> None:
        self._in_flight[routed.index] -= routed.request.sampling.n

    def check_first(self, delta: OutputDelta) -> None:
        if delta.finish is not None and isinstance(delta.finish.error, QueueFullError):
            raise delta.finish.error

    def failed(self, routed: RoutedRequest, error: EngineDeadError | QueueFullError, *, partly_read: bool) -> None:
        if isinstance(error, QueueFullError):
            routed.full.add(routed.index)
            if partly_read:
                raise error
            return
        routed.lost += 1
        if partly_read or error.started or routed.lost > (MAX_REROUTES if error.started is False else 1):
            raise self._client_error(routed, error) from error
        logger.info("Rerouted a request that replica %d had not started", routed.index)

    def _client_error(self, routed: RoutedRequest, error: EngineDeadError) -> EngineDeadError:
        """Returns the error for a lost request's client, which says to send it again if there are other replicas."""
        if self._is_single:
            return EngineDeadError(f"{error.message}; it was running the request", started=True)
        return ReplicaLostError(
            f"replica {routed.index} was lost while it ran the request ({error.message}); send it again", started=True
        )

    def wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def drain(self, index: int | None, timeout: float | None = None) -> None:
        """See `EngineClient.drain`. Raises `ParameterError` if there is no such replica, if it is a separate server or
        does not serve, or during another drain; `EngineDeadError` if a replica does not come back, and then the
        replicas after it are not drained."""
        if index is not None and not 0 <= index < len(self.replicas):
            raise ParameterError(f"replica must be from 0 to {len(self.replicas) - 1}, got {index}", param="replica")
        todo = self.replicas if index is None else [self.replicas[index]]
        if servers := [address for one in todo if (address := self._addresses[one.index])]:
            raise ParameterError(
                f"the replicas are separate servers ({', '.join(servers)}): stop one with SIGTERM, which lets its "
                "requests finish while new ones go to the others, then start it again",
                param="replica",
            )
        if self._draining:
            raise ParameterError("replicas are already being drained; wait for that to finish", param="replica")
        idle = [one for one in todo if one.state is not ReplicaState.SERVING]
        if idle:
            raise ParameterError(
                f"replica {idle[0].index} is {idle[0].state}; only serving replicas can be drained", param="replica"
            )
        self._draining = True
        try:
            for replica in todo:
                await replica.drain(timeout)
        finally:
            self._draining = False

    async def ended(self) -> str:
        while not self.gone:
            await self._changed.wait()
        return self._reasons()

    async def close(self, *, drain: bool) -> None:
        await close_replicas(self.replicas, drain=drain)

    async def _wait_for_replica(self) -> None:
        """Waits until a replica's state changes. Raises `EngineDeadError` if no replica will serve again, and
        `QueueFullError` if too many requests wait."""
        if self.gone:
            raise EngineDeadError(f"no replica is left ({self._reasons()})")
        if self._max_waiting is not None and self._num_waiting >= self._max_waiting:
            raise QueueFullError(
                f"no replica is serving, and {self._num_waiting} requests are queued, the limit is "
                f"{self._max_waiting}; try again later"
            )
        self._num_waiting += 1
        try:
            await self._changed.wait()
        finally:
            self._num_waiting -= 1

    def _reasons(self) -> str:
        return "; ".join(f"{replica.index}: {replica.last_end}" for replica in self.replicas)

    def _pick(self, routed: RoutedRequest, serving: Sequence[Replica[Link]]) -> Link:
        candidates = [
            Candidate(replica.index, self._in_flight[replica.index] + replica.client.external_load)
            for replica in serving
        ]
        request = routed.request
        tokens, key, namespace = request.token_ids.tobytes(), request.input.routing_key, request.namespace
        index = sticky_choice(key, candidates) if key else self._policy.choose(tokens, namespace, candidates)
        self._policy.note_sent(index, tokens, namespace)
        self._note_sent(routed, index)
        return self.replicas[index].client

    def _note_sent(self, routed: RoutedRequest, index: int) -> None:
        self._in_flight[index] += routed.request.sampling.n
        routed.index = index

    def _serving(self) -> list[Replica[Link]]:
        """The serving replicas. `alive` is checked because a replica learns later that its engine is lost."""
        return [one for one in self.replicas if one.state is ReplicaState.SERVING and one.client.alive]

    def _some_serving(self) -> list[Replica[Link]]:
        if not (serving := self._serving()):
            raise ReplicaLostError("no replica is serving; try again later")
        return serving

    def _on_change(self, index: int) -> None:
        replica = self.replicas[index]
        if replica.state is ReplicaState.SERVING:
            self._policy.reset(index, replica.client.max_total_tokens)
        self.wake()

    def _load(self, replica: Replica[Link]) -> ReplicaLoad:
        engine = replica.client if replica.state in (ReplicaState.SERVING, ReplicaState.DRAINING) else None
        return ReplicaLoad(
            index=replica.index,
            state=replica.state,
            max_running_requests=0 if engine is None else engine.max_running_requests,
            max_total_tokens=0 if engine is None else engine.max_total_tokens,
            stats=SchedulerStats() if engine is None else engine.stats,
            address=self._addresses[replica.index],
            in_flight=self._in_flight[replica.index],
            silent_seconds=0.0 if engine is None else engine.silent_seconds,
            restarts=replica.restarts,
            last_end=replica.last_end,
        )


_MEANS: dict[str, Callable[[Sequence[float]], float]] = {"new_token_reserve": lambda values: sum(values) / len(values)}
"""Figures that are combined in another way than by their sum."""


def total_stats(stats: Sequence[SchedulerStats]) -> SchedulerStats:
    """The figures of all replicas together; `weight_version` is empty if they differ in it."""
    values = [msgspec.structs.asdict(one) for one in stats]
    others = ("groups", "experts", "weight_version")
    figures = {name: _MEANS.get(name, sum)([one[name] for one in values]) for name in values[0] if name not in others}
    versions = {one.weight_version for one in stats}
    return SchedulerStats(
        **figures,
        groups=_total_groups(stats),
        experts=_total_experts(stats),
        weight_version=versions.pop() if len(versions) == 1 else "",
    )


def _total_groups(stats: Sequence[SchedulerStats]) -> list[GroupUsage]:
    """Sums the pools of all replicas by name."""
    totals: dict[str, GroupUsage] = {}
    for group in (group for one in stats for group in one.groups):
        so_far = totals.get(group.name, GroupUsage(group.name, 0, 0))
        totals[group.name] = GroupUsage(
            group.name,
            so_far.used_tokens + group.used_tokens,
            so_far.max_tokens + group.max_tokens,
            group.unit,
            so_far.session_tokens + group.session_tokens,
        )
    return list(totals.values())


def _total_experts(stats: Sequence[SchedulerStats]) -> list[ExpertBalance]:
    """Sums the tokens of each layer over all replicas, and averages balancedness weighted by tokens: each replica has
    its own experts, so an imbalance in one is not offset by another."""
    totals: dict[int, ExpertBalance] = {}
    for one in (one for each in stats for one in each.experts):
        so_far = totals.get(one.layer, ExpertBalance(one.layer, 0, 0.0))
        tokens = so_far.tokens + one.tokens
        balanced = so_far.balancedness * so_far.tokens + one.balancedness * one.tokens
        totals[one.layer] = ExpertBalance(one.layer, tokens, balanced / max(tokens, 1))
    return list(totals.values())
