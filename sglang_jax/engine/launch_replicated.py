"""Starts what the options ask for: one engine, or several behind one front end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sglang_jax.config import EngineConfig
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.launch import launch_engine, launch_replica_link
from sglang_jax.engine.link import Link
from sglang_jax.engine.replica import Replica, start_replicas
from sglang_jax.engine.router import Router
from sglang_jax.engine.routing import MOST_AHEAD, Balance, create_policy
from sglang_jax.engine.types import ReplicaState, TextTokenizer


async def launch_engines(config: EngineConfig) -> AsyncEngineClient:
    """One engine in a process of its own, or, for `dp_size` above 1, as many replicas behind one front end.

    **Raises:** what `launch_engine` and `start_replicas` raise.
    """
    if config.dp_size == 1:
        return await launch_engine(config)
    # Here, as the libraries that read tokenizers take longer to import than all the rest.
    from sglang_jax.engine.model_core import load_text_tokenizer

    tokenizer = await asyncio.to_thread(load_text_tokenizer, config)
    return replicated_client(config, await start_replicas(config, config.dp_size, launch_replica_link), tokenizer)


def replicated_client(
    config: EngineConfig, replicas: Sequence[Replica[Link]], tokenizer: TextTokenizer, addresses: Sequence[str] = ()
) -> AsyncEngineClient:
    """Replicas, at least one of which serves, as one engine that routes as `config` says."""
    rows = next(one.client.max_running_requests for one in replicas if one.state is ReplicaState.SERVING)
    # A replica that is ahead of another by all its rows has a queue while the other has room.
    balance = Balance(absolute=min(MOST_AHEAD, rows))
    router = Router(
        replicas,
        create_policy(config.load_balance_method, config.page_size, balance),
        random_seed=config.random_seed,
        max_waiting=config.max_queued_requests,
        addresses=addresses,
    )
    return AsyncEngineClient(router, tokenizer)
