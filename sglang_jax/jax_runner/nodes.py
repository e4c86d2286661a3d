"""Runs one model on several nodes with JAX: every process runs the same programs on its devices. Node 0 has the
scheduler, and sends its plans to the others (see `runner.remote_group`). If a node is gone, the others wait in a
collective that only ends with the process, so they exit."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import numpy as np
from jax.experimental import multihost_utils

from sglang_jax.checkpoint.opening import Checkpoint, open_served
from sglang_jax.config import Device, EngineConfig
from sglang_jax.errors import ConfigError
from sglang_jax.jax_runner.loading import load_rank
from sglang_jax.runner.claimed_address import claim_address
from sglang_jax.runner.group import ORDERS, Followers, GroupRunner, follow
from sglang_jax.runner.group_listener import FollowerListener
from sglang_jax.runner.protocol import Runner
from sglang_jax.runner.remote_group import LeaderLink, RemoteFollowers

logger = logging.getLogger(__name__)

_SECONDS_TO_CONNECT = 60.0
_SECONDS_TO_MEET = 300
_SECONDS_TO_FAIL = 3.0
_SECONDS_TO_PART = 15


class NodeGroupRunner(GroupRunner):
    """The runner of a node, which leaves the group when closed. `meeting`: the claim of node 0's address."""

    def __init__(self, runner: Runner, followers: Followers, meeting: socket.socket | None) -> None:
        super().__init__(runner, followers)
        self._meeting = meeting

    def close(self) -> None:
        super().close()
        jax.distributed.shutdown()
        if self._meeting is not None:
            self._meeting.close()


def launch_nodes(config: EngineConfig, checkpoint: Checkpoint) -> NodeGroupRunner:
    """The runner of node 0, over the devices of all nodes. Raises `ConfigError` and `CheckpointError` as for one node,
    and `ConfigError` if the others do not join."""
    secret = config.group_secret()
    if not secret:
        logger.warning(
            "The nodes have no shared secret: any machine that can connect to this one can join as a node. Give each "
            "node "
            "the same --group-secret-file, unless the network is private"
        )
    meeting = _claim_meeting_address(config)
    listener = FollowerListener(_without_brackets(config.dist_bind_host or _address(config)[0]), secret, ORDERS.form)
    meet(config, listener.host)
    _broadcast_port(listener.port)
    followers = RemoteFollowers(listener, config.nnodes - 1, _SECONDS_TO_CONNECT, _leave_the_process)
    with _reporting_failure(followers.give_up):
        return NodeGroupRunner(load_rank(config, checkpoint), followers, meeting)


def _claim_meeting_address(config: EngineConfig) -> socket.socket | None:
    """Claims node 0's address, since gRPC lets another group listen there, too, and nodes would join either."""
    host, port = _address(config)
    try:
        return claim_address(host, port)
    except OSError as error:
        raise ConfigError(
            f"another group uses dist_init_addr {config.dist_init_addr}: give each group a port of its own"
        ) from error


def follow_node(config: EngineConfig) -> None:
    """Runs the plans of node 0 until that ends. The process exits with status 1 if node 0 is lost. Raises
    `ConfigError`, `CheckpointError`."""
    secret = config.group_secret()
    checkpoint = open_served(config)
    meet(config)
    host = _without_brackets(_address(config)[0])
    link = LeaderLink((host, _broadcast_port(0)), secret, config.node_rank, _leave_the_process)
    with _reporting_failure(link.give_up):
        follow(load_rank(config, checkpoint), link.next_order, link.progress)
    link.close()
    jax.distributed.shutdown()


@contextmanager
def _reporting_failure(give_up: Callable[[str], None]) -> Iterator[None]:
    """Notifies the other nodes if this one fails within the context, since they wait for it in collectives."""
    try:
        yield
    except BaseException as error:
        give_up(str(error) or type(error).__name__)
        raise


def meet(config: EngineConfig, listen_on: str | None = None) -> None:
    """Joins the group of nodes when all are there. `listen_on`: the address at which node 0 listens. Raises
    `ConfigError` for options that do not fit together, or if the nodes do not meet."""
    host, port = _address(config)
    if config.node_rank >= config.nnodes:
        raise ConfigError(f"node_rank ({config.node_rank}) must be below nnodes ({config.nnodes})")
    if config.device is Device.CPU:
        jax.config.update("jax_platforms", "cpu")
    logger.info("Node %d of %d connects to the others at %s:%d", config.node_rank, config.nnodes, host, port)
    try:
        jax.distributed.initialize(
            f"{host}:{port}",
            config.nnodes,
            config.node_rank,
            initialization_timeout=_SECONDS_TO_MEET,
            shutdown_timeout_seconds=_SECONDS_TO_PART,
            coordinator_bind_address=None if listen_on is None else _with_port(listen_on, port),
        )
    except RuntimeError as error:
        raise ConfigError(
            f"the {config.nnodes} nodes did not meet at {host}:{port}: {error}. Run the same command on each, "
            "with its own node_rank, and open the port"
        ) from error


def _address(config: EngineConfig) -> tuple[str, int]:
    host, _, port = (config.dist_init_addr or "").rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(
            f"nnodes {config.nnodes} needs dist_init_addr, the HOST:PORT of node 0, got {config.dist_init_addr!r}"
        )
    return host, int(port)


def _without_brackets(host: str) -> str:
    """A host without the brackets that an IPv6 address has before a port."""
    return host.removeprefix("[").removesuffix("]")


def _with_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _broadcast_port(port: int) -> int:
    """Node 0's `port`, on every node. It must not be secret, since anyone may ask the coordinator for it."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(port)))


def _leave_the_process(reason: str) -> None:
    """Exits with status 1, after a moment in which the process may fail by itself with a better message."""
    logger.error("%s; this process cannot continue", reason)
    time.sleep(_SECONDS_TO_FAIL)
    sys.stderr.flush()
    os._exit(1)
