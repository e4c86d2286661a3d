"""Replicas whose engines do what a test tells them, and replicas of real schedulers over `FakeRunner`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import numpy as np
from helpers.engine_fakes import MODEL_INFO, load_fake_model, load_tokenizer

from sglang_jax.config import EngineConfig, LoadBalanceMethod
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.launch import launch_core
from sglang_jax.engine.launch_replicated import replicated_client
from sglang_jax.engine.replica import Backoff, Replica
from sglang_jax.engine.replicated import ReplicatedClient
from sglang_jax.engine.routing import Balance, create_policy
from sglang_jax.engine.types import FinishKind, FinishReason, GenerateInput, ModelInfo, OutputDelta
from sglang_jax.errors import EngineDeadError, RequestError
from sglang_jax.scheduler.messages import SchedulerStats

AT_ONCE = Backoff(first=0.0, most=0.0)


class ToldEngine:
    """A `ServingEngine` whose requests wait until they are answered, or until it dies.

    - `asked`: requests that it has, by the id that they came with; `closed`, `flushed`: what it was told.
    """

    model_info: ModelInfo = MODEL_INFO
    max_running_requests = 4
    max_total_tokens = 1024

    def __init__(self) -> None:
        self.asked: dict[str, GenerateInput] = {}
        self.started: set[str] = set()
        self.aborted: list[str] = []
        self.closed: list[bool] = []
        self.flushed = 0
        self.busy = False
        self.foreign_load = 0
        self.stats = SchedulerStats(num_running=1, prompt_tokens=10, cached_tokens=4)
        self._inbox: dict[str, asyncio.Queue[OutputDelta | RequestError]] = {}
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        return not self._over.done()

    async def generate(self, request: GenerateInput) -> AsyncGenerator[OutputDelta, None]:
        if not self.alive:
            raise EngineDeadError("gone")
        assert request.request_id is not None
        name = request.request_id
        self.asked[name] = request
        inbox = self._inbox[name] = asyncio.Queue()
        try:
            for _ in range(request.sampling.n):
                item = await inbox.get()
                if isinstance(item, RequestError):
                    raise item
                yield item
        finally:
            del self.asked[name], self._inbox[name]

    def answer(self, name: str, index: int = 0, *, error: RequestError | None = None) -> None:
        """One finished output; with `error` one that ended in it."""
        request = self.asked[name]
        reason = FinishReason(FinishKind.STOP) if error is None else FinishReason(FinishKind.ERROR, error=error)
        self._inbox[name].put_nowait(
            OutputDelta(
                index=index,
                text="done",
                token_ids=[1],
                prompt_tokens=len(request.prompt),
                completion_tokens=1,
                cached_tokens=0,
                finish=reason,
            )
        )

    def answer_all(self) -> None:
        for name, request in list(self.asked.items()):
            for index in range(request.sampling.n):
                self.answer(name, index)

    def die(self, reason: str = "killed") -> None:
        self._over.set_result(reason)
        for name, inbox in self._inbox.items():
            inbox.put_nowait(EngineDeadError(reason, started=name in self.started))

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def abort_all(self) -> None:
        self.aborted.extend(self.asked)

    async def flush_cache(self) -> bool:
        self.flushed += 1
        return not self.busy

    async def state(self) -> dict[str, object]:
        return {"steps": 3}

    async def ended(self) -> str:
        return await asyncio.shield(self._over)

    async def close(self, *, drain: bool = False) -> None:
        self.closed.append(drain)
        while drain and self.asked:
            await asyncio.sleep(0)
        if self.alive:
            self.die("shut down")


class ToldReplicas:
    """Replicas of `ToldEngine`, and the client over them. `gates[i]` holds back the next start of replica i."""

    def __init__(self, count: int) -> None:
        self.engines: list[list[ToldEngine]] = [[] for _ in range(count)]
        self.gates = [asyncio.Event() for _ in range(count)]
        for gate in self.gates:
            gate.set()
        self.failures: list[EngineDeadError | None] = [None] * count
        self.replicas = [
            Replica(index, self._start(index), backoff=Backoff(first=0.0, most=0.0, give_up=1))
            for index in range(count)
        ]

    def _start(self, index: int) -> Callable[[], Awaitable[ToldEngine]]:
        async def start() -> ToldEngine:
            await self.gates[index].wait()
            failure = self.failures[index]
            if failure is not None:
                raise failure
            self.engines[index].append(ToldEngine())
            return self.engines[index][-1]

        return start

    def engine(self, index: int) -> ToldEngine:
        return self.engines[index][-1]

    async def client(
        self, method: LoadBalanceMethod = LoadBalanceMethod.ROUND_ROBIN, *, max_waiting: int | None = None
    ) -> ReplicatedClient:
        await asyncio.gather(*(replica.start() for replica in self.replicas))
        policy = create_policy(method, 4, Balance(absolute=4))
        return ReplicatedClient(self.replicas, load_tokenizer(EngineConfig()), policy, max_waiting=max_waiting)


async def fake_replicas(count: int, method: LoadBalanceMethod, config: EngineConfig) -> ReplicatedClient:
    """Real schedulers over `FakeRunner`, each in a thread of this process."""

    async def start() -> AsyncEngineClient:
        return await launch_core(config, in_process=True, load=load_fake_model, load_tokenizer=load_tokenizer)

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
