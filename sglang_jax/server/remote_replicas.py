"""Other servers as the replicas of this one (`--connect`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from sglang_jax.config import ServerConfig
from sglang_jax.engine.launch import launch_replica_link
from sglang_jax.engine.launch_replicated import LaunchLink, local_replicas, replicated_client
from sglang_jax.engine.link import Link
from sglang_jax.engine.model_core import load_text_tokenizer
from sglang_jax.engine.replica import Backoff, Replica, close_replicas, start_all
from sglang_jax.engine.types import EngineClient, ReplicaState, TextTokenizer
from sglang_jax.errors import ConfigError
from sglang_jax.server.remote_link import RemoteLink

RETRY = Backoff(first_delay=1.0, max_delay=10.0, settled_after=10.0, give_up=None)
"""Connecting to a lost server is retried without an end."""


LOCAL = "local"
"""The entry in the list of `--connect` for the engines of this server."""


async def connect_engines(
    config: ServerConfig, tokenizer: TextTokenizer | None = None, launch: LaunchLink = launch_replica_link
) -> EngineClient:
    """Returns a client of the servers in `config.connect`, once one of them serves; with `local` in the list, also of
    this server's engines, once all of these serve. `tokenizer`: None for that of the options. Raises `ConfigError` for
    an invalid list, options that start engines without `local` in the list, or a server with another tokenizer; errors
    of `launch` and of loading the tokenizer; `EngineDeadError` if no server answers."""
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs each request at INFO
    addresses, with_own = read_addresses(config.connect or "")
    if config.nnodes > 1 or (config.replicas > 1 and not with_own):
        raise ConfigError(
            f"connect uses other servers' engines: nnodes must be 1, and without {LOCAL} in the list dp_size too, got "
            f"nnodes {config.nnodes} and dp_size {config.replicas}"
        )
    if tokenizer is None:
        tokenizer = await asyncio.to_thread(load_text_tokenizer, config)
    key = config.admin_key() or config.client_key()  # only operators may ask for the load
    own = local_replicas(config, launch) if with_own else []
    servers: list[Replica[Link]] = [
        Replica(index, partial(RemoteLink.connect, address, tokenizer, key), backoff=RETRY)
        for index, address in enumerate(addresses, len(own))
    ]
    replicas = [*own, *servers]
    try:
        async with asyncio.TaskGroup() as starts:
            starts.create_task(start_all(own))
            starts.create_task(_start(servers, alone=not own))
        return replicated_client(config, replicas, tokenizer, [*([""] * len(own)), *addresses])
    except BaseException as error:
        await close_replicas(replicas)
        if isinstance(error, ExceptionGroup):
            raise error.exceptions[0] from None
        raise


def read_addresses(text: str) -> tuple[list[str], bool]:
    """Returns the addresses of HOST:PORT,HOST:PORT, and whether `local` is among them. Raises `ConfigError`."""
    parts = [part.strip() for part in text.split(",")]
    addresses = [part for part in parts if part != LOCAL]
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"connect must be a list of HOST:PORT (or {LOCAL}), with commas, got {address!r} in it")
    if len(set(parts)) < len(parts):
        raise ConfigError(f"connect names a server twice: {text}")
    if not addresses:
        raise ConfigError(f"connect has no other server: {text}; remove it to use only this server's engines")
    return addresses, len(addresses) < len(parts)


async def _start(replicas: Sequence[Replica[Link]], *, alone: bool) -> None:
    """Starts all replicas, and retries later if one does not answer. Raises if none does and they are `alone`."""
    results = await asyncio.gather(*(replica.start() for replica in replicas), return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    wrong = next((error for error in errors if isinstance(error, ConfigError)), None)
    if wrong is not None:
        raise wrong
    if alone and len(errors) == len(replicas):
        raise errors[0]
    for replica in replicas:
        if replica.state is not ReplicaState.SERVING:
            replica.start_later()
