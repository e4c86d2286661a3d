"""Starts what the options ask for: one engine, or several behind one front end, all of them kept running."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from sglang_jax.config import EngineConfig, LoadBalanceMethod
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.core_link import CoreLink
from sglang_jax.engine.launch import TokenizerLoader, launch_replica_link, tokenizer_of_model
from sglang_jax.engine.link import Link
from sglang_jax.engine.placement import Placement
from sglang_jax.engine.replica import Backoff, Replica, placed_replicas, start_all
from sglang_jax.engine.router import Router
from sglang_jax.engine.routing import MOST_AHEAD, Balance, create_policy
from sglang_jax.engine.types import ReplicaState, TextTokenizer

LaunchLink = Callable[[EngineConfig, Placement | None], Awaitable[CoreLink]]


async def launch_engines(
    config: EngineConfig,
    *,
    launch: LaunchLink = launch_replica_link,
    load_tokenizer: TokenizerLoader | None = None,
) -> AsyncEngineClient:
    """As many engines as `dp_size` says behind one front end, each in a process of its own, and each started again when
    it is lost: see `restarts`.

    **Arguments:** for tests and other cores: `launch` starts an engine in its part of the machine (None for all of it);
    `load_tokenizer`: None for the tokenizer that `config` names.

    **Raises:** `ConfigError`, `CheckpointError`; `EngineDeadError` if an engine failed for another reason.
    """
    load_tokenizer = load_tokenizer or tokenizer_of_model
    replicas = own_replicas(config, launch)
    if len(replicas) > 1:
        tokenizer = await asyncio.to_thread(load_tokenizer, config)
        await start_all(replicas)
        return replicated_client(config, replicas, tokenizer)
    (replica,) = replicas
    starting = asyncio.create_task(replica.start())
    try:
        tokenizer = await asyncio.to_thread(load_tokenizer, config)
        await starting
    except BaseException:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await replica.close()
        raise
    return replicated_client(config, [replica], tokenizer)


def own_replicas(config: EngineConfig, launch: LaunchLink = launch_replica_link) -> list[Replica[Link]]:
    """The engines of this server, as many as `dp_size` says, not started yet; one has all of the machine.

    **Raises:** `ConfigError` if the machine has no room for so many.
    """
    if config.dp_size > 1:
        return list(placed_replicas(config, config.dp_size, launch, backoff=restarts(config)))
    return [Replica(0, partial(launch, config, None), backoff=restarts(config))]


def restarts(config: EngineConfig) -> Backoff:
    """How often a lost engine is started again. One of several nodes never is: the others end with it."""
    limit = config.max_engine_restarts if config.nnodes == 1 else 0
    return Backoff(give_up=None, max_restarts=limit)


def replicated_client(
    config: EngineConfig, replicas: Sequence[Replica[Link]], tokenizer: TextTokenizer, addresses: Sequence[str] = ()
) -> AsyncEngineClient:
    """Replicas, at least one of which serves, as one engine that routes as `config` says."""
    rows = next(one.client.max_running_requests for one in replicas if one.state is ReplicaState.SERVING)
    # A replica that is ahead of another by all its rows has a queue while the other has room.
    balance = Balance(absolute=min(MOST_AHEAD, rows))
    # One has nothing to choose, and so nothing to remember.
    method = config.load_balance_method if len(replicas) > 1 else LoadBalanceMethod.ROUND_ROBIN
    router = Router(
        replicas,
        create_policy(method, config.page_size, balance),
        random_seed=config.random_seed,
        max_waiting=config.max_queued_requests,
        addresses=addresses,
    )
    return AsyncEngineClient(router, tokenizer)
