"""Servers elsewhere as the replicas of this one (`--connect`)."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from sglang_jax.config import ServerConfig
from sglang_jax.engine.launch_replicated import replicated_client
from sglang_jax.engine.model_core import load_text_tokenizer
from sglang_jax.engine.replica import Backoff, Replica, close_replicas
from sglang_jax.engine.types import EngineClient, ReplicaState, TextTokenizer
from sglang_jax.errors import ConfigError
from sglang_jax.server.remote_link import RemoteLink

RETRY = Backoff(first=1.0, most=10.0, settled=10.0, give_up=None)
"""A server elsewhere may be away for as long as it takes."""


async def connect_engines(config: ServerConfig, tokenizer: TextTokenizer | None = None) -> EngineClient:
    """A client over the servers that `config.connect` lists, once one of them serves.

    **Arguments:** `tokenizer`: that of their model; None for the one that the options name.

    **Raises:** `ConfigError` for a list that cannot be read, options that start engines here, or a server with another
    tokenizer; `CheckpointError` for a tokenizer that cannot be loaded; `EngineDeadError` if no server answers.
    """
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it has a line for each request, at INFO
    addresses = read_addresses(config.connect or "")
    if config.dp_size > 1 or config.nnodes > 1:
        raise ConfigError(
            f"connect takes other servers' engines and starts none here: dp_size and nnodes must be 1, "
            f"got {config.dp_size} and {config.nnodes}"
        )
    if tokenizer is None:
        tokenizer = await asyncio.to_thread(load_text_tokenizer, config)
    key = config.admin_key() or config.client_key()  # replicas are asked what they have to do, which is an operator's
    replicas = [
        Replica(index, partial(RemoteLink.connect, address, tokenizer, key), backoff=RETRY)
        for index, address in enumerate(addresses)
    ]
    try:
        await _start(replicas)
        return replicated_client(config, replicas, tokenizer, addresses)
    except BaseException:
        await close_replicas(replicas)
        raise


def read_addresses(text: str) -> list[str]:
    """The parts of HOST:PORT,HOST:PORT. Raises `ConfigError` naming the one at fault."""
    addresses = [part.strip() for part in text.split(",")]
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"connect must be a list of HOST:PORT, with commas, got {address!r} in it")
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"connect names a server twice: {text}")
    return addresses


async def _start(replicas: list[Replica[RemoteLink]]) -> None:
    """Starts all; those that do not answer yet are tried again, as long as one serves. Raises what the first raised if
    none does."""
    results = await asyncio.gather(*(replica.start() for replica in replicas), return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    wrong = next((error for error in errors if isinstance(error, ConfigError)), None)
    if wrong is not None:
        raise wrong
    if len(errors) == len(replicas):
        raise errors[0]
    for replica in replicas:
        if replica.state is not ReplicaState.SERVING:
            replica.start_later()
