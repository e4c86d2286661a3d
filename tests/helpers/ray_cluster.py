"""A Ray cluster of several node processes on this machine's loopback addresses, and engines for its actors."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import signal
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from helpers.engine_fakes import load_echo, load_tokenizer
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from sglang_jax.batch.ray.engine import Launch
from sglang_jax.config import ServerConfig
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.launch import launch_core
from sglang_jax.engine.types import SCRIPT, GenerateInput, Origin, OutputDelta

FATAL = "kill the actor"
"""A prompt with this prefix ends the process that runs it, with its engine."""

PATIENT = "for two engines: "
"""A prompt with this prefix is sent once two engines were started."""

QUICK_TO_NOTICE = {"health_check_period_ms": 1000, "health_check_failure_threshold": 5}
STORE_BYTES = 80 * 2**20
SECONDS_TO_GIVE_BACK = 20.0
SECONDS_OF_PATIENCE = 120.0


class Nodes:
    """Nodes, each with its own loopback address; the head has no CPU for engines."""

    def __init__(self) -> None:
        self._addresses = (f"127.0.0.{last}" for last in itertools.count(2))
        head = next(self._addresses)
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "include_dashboard": False,
                "node_ip_address": head,
                "object_store_memory": STORE_BYTES,
                "_system_config": QUICK_TO_NOTICE,
            },
        )
        self._nodes: dict[str, object] = {}
        ray.init(address=self._cluster.address, _node_ip_address=head, log_to_driver=False, logging_level="WARNING")

    @property
    def address(self) -> str:
        """Where other drivers find the cluster."""
        return str(self._cluster.address)

    def add(self, **resources: float) -> str:
        """A further node's id."""
        node = self._cluster.add_node(
            node_ip_address=next(self._addresses), object_store_memory=STORE_BYTES, **resources
        )
        self._nodes[node.node_id] = node
        return str(node.node_id)

    def kill(self, node_id: str) -> None:
        """Kills it abruptly, as when a machine loses its power."""
        self._cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)

    def clear(self) -> None:
        """Removes all but the head, and waits until the cluster has noticed."""
        for node_id in list(self._nodes):
            self.kill(node_id)
        while sum(node["Alive"] for node in ray.nodes()) > 1:
            time.sleep(0.1)

    def groups_come_and_gone(self) -> bool:
        """Waits a while until every placement group has been released. False if one was not."""
        deadline = time.monotonic() + SECONDS_TO_GIVE_BACK
        while any(group["state"] != "REMOVED" for group in placement_group_table().values()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def close(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


def until(condition: Callable[[], bool]) -> None:
    """Fails if it takes too long."""
    deadline = time.monotonic() + SECONDS_OF_PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def meanwhile(condition: Callable[[], bool], act: Callable[[], object]) -> Iterator[None]:
    """Acts in a thread as soon as the condition holds, however long the block takes until then. Fails if the block
    ended before."""
    over, acted = threading.Event(), threading.Event()

    def watch() -> None:
        while not condition():
            if over.wait(0.05):
                return
        act()
        acted.set()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert acted.is_set(), "it ended before there was anything to act on"


@contextmanager
def cluster_of_nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    try:
        yield nodes
    finally:
        nodes.close()


@dataclass(frozen=True)
class Start:
    """An engine's start, recorded on its node."""

    node_id: str
    pid: int
    devices: str


def starts(folder: Path) -> list[Start]:
    """The engines that were started, in any order."""
    return [Start(**json.loads(path.read_text())) for path in folder.glob("*.json")]


def launcher(folder: Path) -> Launch:
    """Starts engines that echo prompts, with cores in separate processes, and records each start in a folder."""
    return functools.partial(_launch, folder)


async def _launch(folder: Path, config: ServerConfig) -> AsyncEngineClient:
    start = Start(ray.get_runtime_context().get_node_id(), os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    draft = folder / f"{uuid.uuid4()}.draft"
    draft.write_text(json.dumps(start.__dict__))
    draft.replace(draft.with_suffix(".json"))
    client = await launch_core(config, in_process=False, load=load_echo, load_tokenizer=load_tokenizer)
    return _Client(client, folder)  # type: ignore[return-value]


async def launch_and_die(config: ServerConfig) -> AsyncEngineClient:
    """Ends the process that starts an engine, as when it runs out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


class _Client:
    """A client that handles `FATAL` and `PATIENT` prompts specially."""

    def __init__(self, client: AsyncEngineClient, folder: Path) -> None:
        self._client = client
        self._folder = folder

    def __getattr__(self, name: str) -> object:
        return getattr(self._client, name)

    async def generate(self, request: GenerateInput, origin: Origin = SCRIPT) -> AsyncGenerator[OutputDelta, None]:
        if str(request.prompt).startswith(FATAL):
            os.kill(os.getpid(), signal.SIGKILL)
        while str(request.prompt).startswith(PATIENT) and len(starts(self._folder)) < 2:
            await asyncio.sleep(0.05)
        async with aclosing(self._client.generate(request, origin)) as outputs:
            async for output in outputs:
                yield output
