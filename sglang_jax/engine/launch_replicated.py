"""Starts what the options ask for: one engine, or several behind one client."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_jax.config import EngineConfig
from sglang_jax.engine.launch import launch_engine
from sglang_jax.engine.replica import LaunchReplica, Replica, ServingEngine, launch_replicas
from sglang_jax.engine.replicated import ReplicatedClient
from sglang_jax.engine.routing import MOST_AHEAD, Balance, create_policy
from sglang_jax.engine.types import EngineClient, ReplicaState, TextTokenizer


async def launch_engines(config: EngineConfig, *, launch: LaunchReplica | None = None) -> EngineClient:
    """One engine in a process of its own, or, for `dp_size` above 1, as many replicas behind one client.

    **Arguments:** `launch`: see `launch_replicas`.

    **Raises:** what `launch_replicas` and `launch_engine` raise.
    """
    if config.dp_size == 1:
        return await launch_engine(config)
    replicas = await launch_replicas(config, config.dp_size, launch=launch)
    return replicated_client(config, replicas, replicas[0].client.tokenizer)


def replicated_client(
    config: EngineConfig,
    replicas: Sequence[Replica[ServingEngine]],
    tokenizer: TextTokenizer,
    addresses: Sequence[str] = (),
) -> ReplicatedClient:
    """Replicas, at least one of which serves, as one engine that routes as `config` says."""
    rows = next(one.client.max_running_requests for one in replicas if one.state is ReplicaState.SERVING)
    # A replica that is ahead of another by all its rows has a queue while the other has room.
    balance = Balance(absolute=min(MOST_AHEAD, rows))
    return ReplicatedClient(
        replicas,
        tokenizer,
        create_policy(config.load_balance_method, config.page_size, balance),
        random_seed=config.random_seed,
        max_waiting=config.max_queued_requests,
        addresses=addresses,
    )
