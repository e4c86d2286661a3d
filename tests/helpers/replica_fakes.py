"""Replicas with scripted engines, and replicas of real schedulers over `FakeRunner`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from helpers.engine_fakes import MODEL_INFO, load_fake_model, load_tokenizer

from sglang_jax.config import EngineConfig, LoadBalanceMethod
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.core import CoreLoader
from sglang_jax.engine.core_link import CoreLink
from sglang_jax.engine.launch import launch_link
from sglang_jax.engine.launch_replicated import replicated_client
from sglang_jax.engine.output import RequestOutputs
from sglang_jax.engine.replica import Backoff, Replica
from sglang_jax.engine.router import Router
from sglang_jax.engine.routing import Balance, create_policy
from sglang_jax.engine.types import FinishKind, FinishReason, ModelInfo, OutputDelta, TokenizedRequest
from sglang_jax.errors import EngineDeadError, ParameterError, RequestError
from sglang_jax.scheduler.commands import (
    CloseSession,
    FlushCache,
    GetCacheReport,
    GetCacheSummary,
    GetState,
    OpenSession,
    StartProfile,
    StopProfile,
)
from sglang_jax.scheduler.messages import Command, SchedulerStats

AT_ONCE = Backoff(first_delay=0.0, max_delay=0.0)

_names = itertools.count()


class ScriptedLink:
    """A `Link` whose requests wait until the test answers them, or until it dies.

    - `asked`: its requests, by the names that it gave them; `started`: names of those that it started; `closed`,
      `flushed`: the calls it got.
    - `profiles`: folders that it records to; `profile_error`: raised when a profile is requested.
    """

    model_info: ModelInfo = MODEL_INFO
    max_running_requests = 4
    max_total_tokens = 1024

    def __init__(self) -> None:
        self.asked: dict[str, TokenizedRequest] = {}
        self.started: set[str] = set()
        self.aborted: list[str] = []
        self.closed: list[bool] = []
        self.flushed = 0
        self.opened: list[str] = []
        self.profiles: list[str] = []
        self.profile_error: RequestError | None = None
        self.busy = False
        self.external_load = 0
        self.silent_seconds = 0.0
        self.stats = SchedulerStats(num_running=1, prompt_tokens=10, cached_tokens=4)
        self._outputs: dict[str, RequestOutputs] = {}
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        return not self._over.done()

    def submit(self, outputs: RequestOutputs) -> None:
        if not self.alive:
            raise EngineDeadError("gone")
        name = f"told-{next(_names)}"
        self.asked[name], self._outputs[name] = outputs.request, outputs

    def answer(self, name: str, index: int = 0, *, error: RequestError | None = None) -> None:
        """Sends one finished output; with `error` one that ended with it."""
        request = self.asked[name]
        reason = FinishReason(FinishKind.STOP) if error is None else FinishReason(FinishKind.ERROR, error=error)
        self._outputs[name].completions[index].add(
            OutputDelta(
                index=index,
                text="done",
                token_ids=[1],
                prompt_tokens=len(request.token_ids),
                completion_tokens=1,
                cached_tokens=0,
                finish=reason,
            )
        )

    def answer_all(self) -> None:
        for name, request in self.asked.items():
            for index in range(request.sampling.n):
                self.answer(name, index)

    def fail(self, name: str, error: RequestError) -> None:
        """Ends a request with an error."""
        self._outputs[name].fail(error)

    def die(self, reason: str = "killed") -> None:
        self._over.set_result(reason)
        for name in self.asked:
            self.fail(name, EngineDeadError(reason, started=name in self.started))

    def abort(self, outputs: RequestOutputs) -> None:
        self.aborted += [name for name, one in self._outputs.items() if one is outputs]

    def release(self, outputs: RequestOutputs) -> None:
        for name in [name for name, one in self._outputs.items() if one is outputs]:
            del self.asked[name], self._outputs[name]

    async def call(self, command: Command[Any]) -> Any:
        match command:
            case OpenSession():
                self.opened.append(command.id)
                return command.id
            case CloseSession():
                return self.opened.remove(command.id)
            case FlushCache():
                self.flushed += 1
                return not self.busy
            case StartProfile():
                if self.profile_error is not None:
                    raise self.profile_error
                self.profiles.append(command.folder)
                return [command.folder]
            case StopProfile():
                if not self.profiles:
                    raise ParameterError("no profile is being recorded")
                return [self.profiles.pop()]
            case GetCacheReport() | GetCacheSummary():
                return [{"num_nodes": 3}]
            case GetState():
                return [{"steps": 3}]

    async def ended(self) -> str:
        return await asyncio.shield(self._over)

    async def close(self, *, drain: bool = False) -> None:
        self.closed.append(drain)
        while drain and self.asked:
            await asyncio.sleep(0)
        if self.alive:
            self.die("shut down")


class ScriptedReplicas:
    """Replicas of `ScriptedLink`, and the front end over them. `gates[i]` holds back the next start of replica i."""

    def __init__(self, count: int) -> None:
        self.engines: list[list[ScriptedLink]] = [[] for _ in range(count)]
        self.gates = [asyncio.Event() for _ in range(count)]
        for gate in self.gates:
            gate.set()
        self.failures: list[EngineDeadError | None] = [None] * count
        self.replicas = [
            Replica(index, self._start(index), backoff=Backoff(first_delay=0.0, max_delay=0.0, give_up=1))
            for index in range(count)
        ]

    def _start(self, index: int) -> Callable[[], Awaitable[ScriptedLink]]:
        async def start() -> ScriptedLink:
            await self.gates[index].wait()
            failure = self.failures[index]
            if failure is not None:
                raise failure
            self.engines[index].append(ScriptedLink())
            return self.engines[index][-1]

        return start

    def engine(self, index: int) -> ScriptedLink:
        return self.engines[index][-1]

    async def client(
        self, method: LoadBalanceMethod = LoadBalanceMethod.ROUND_ROBIN, *, max_waiting: int | None = None
    ) -> AsyncEngineClient:
        await asyncio.gather(*(replica.start() for replica in self.replicas))
        policy = create_policy(method, 4, Balance(absolute=4))
        self.router = Router(self.replicas, policy, max_waiting=max_waiting)
        return AsyncEngineClient(self.router, load_tokenizer(EngineConfig()))


async def fake_replicas(
    count: int, method: LoadBalanceMethod, config: EngineConfig, load: CoreLoader = load_fake_model
) -> AsyncEngineClient:
    """Real schedulers over `FakeRunner`, each in a thread of this process."""

    async def start() -> CoreLink:
        return await launch_link(config, in_process=True, load=load)

    replicas = [Replica(index, start, backoff=AT_ONCE) for index in range(count)]
    await asyncio.gather(*(replica.start() for replica in replicas))
    options = config.model_copy(update={"load_balance_method": method})
    return replicated_client(options, replicas, load_tokenizer(config))


def shared_prefix_prompts(
    groups: int, each: int, prefix: int, question: int, vocab: int, seed: int = 0
) -> Sequence[list[int]]:
    """Prompts of token ids from 1 up: groups that share a prefix, shuffled."""
    rng = np.random.default_rng(seed)
    heads = rng.integers(1, vocab, (groups, prefix))
    prompts = [
        [*heads[group].tolist(), *rng.integers(1, vocab, question).tolist()]
        for group, _ in itertools.product(range(groups), range(each))
    ]
    return [prompts[place] for place in rng.permutation(len(prompts)).tolist()]
