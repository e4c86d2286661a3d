"""Starts one engine, or several behind one front end, and keeps them running."""

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
from sglang_jax.engine.replica import Backoff, Replica, create_replicas, start_all
from sglang_jax.engine.router import Router
from sglang_jax.engine.routing import MAX_AHEAD, Balance, create_policy
from sglang_jax.engine.types import ReplicaState, TextTokenizer

LaunchLink = Callable[[EngineConfig, Placement | None], Awaitable[CoreLink]]


async def launch_engines(
    config: EngineConfig,
    *,
    launch: LaunchLink = launch_replica_link,
    load_tokenizer: TokenizerLoader | None = None,
) -> AsyncEngineClient:
    """Starts `dp_size` engines behind one front end, each in a separate process. Lost engines are restarted: see
    `restart_policy`. `launch`: starts an engine on its part of the machine (None for all of it); `load_tokenizer`: None
    for the tokenizer that `config` names. Raises as `launch_core` does."""
    load_tokenizer = load_tokenizer or tokenizer_of_model
    replicas = local_replicas(config, launch)
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


def local_replicas(config: EngineConfig, launch: LaunchLink = launch_replica_link) -> list[Replica[Link]]:
    """Creates this server's `dp_size` replicas without starting them. A single one gets the whole machine. Raises
    `ConfigError` if the machine is too small for them."""
    if config.replicas > 1:
        return list(create_replicas(config, config.replicas, launch, backoff=restart_policy(config)))
    return [Replica(0, partial(launch, config, None), backoff=restart_policy(config))]


def restart_policy(config: EngineConfig) -> Backoff:
    """Returns the limit of restarts. An engine over several nodes is never restarted: its other nodes end with it."""
    limit = config.max_engine_restarts if config.nnodes == 1 else 0
    return Backoff(give_up=None, max_restarts=limit)


def replicated_client(
    config: EngineConfig, replicas: Sequence[Replica[Link]], tokenizer: TextTokenizer, addresses: Sequence[str] = ()
) -> AsyncEngineClient:
    """Returns a client that routes to replicas as `config` says. At least one replica serves."""
    rows = next(one.client.max_running_requests for one in replicas if one.state is ReplicaState.SERVING)
    # A replica whose load exceeds another's by all its rows has a queue while the other has room.
    balance = Balance(absolute=min(MAX_AHEAD, rows))
    method = config.load_balance_method if len(replicas) > 1 else LoadBalanceMethod.ROUND_ROBIN
    router = Router(
        replicas,
        create_policy(method, config.page_size, balance),
        random_seed=config.random_seed,
        max_waiting=config.max_queued_requests,
        addresses=addresses,
    )
    return AsyncEngineClient(router, tokenizer)
