"""An engine over several nodes, reserved all at once: one actor per node, and one that holds them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.util import get_node_ip_address, placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
from ray.util.tpu import SlicePlacementGroup

from sglang_jax import logs
from sglang_jax.batch.answers import Answer
from sglang_jax.batch.lines import BadLine, Line
from sglang_jax.batch.ray.engine import Asking, Launch, LocalEngine
from sglang_jax.config import EngineConfig, ServerConfig
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.replica import Backoff
from sglang_jax.errors import EngineDeadError
from sglang_jax.runner.backends import load_follower

logger = logging.getLogger(__name__)

WORKER_LABEL = "ray.io/tpu-worker-id"
"""Ray's label for a node's number in its TPU slice."""

RETRY_SECONDS = 10.0
"""Seconds to wait for a TPU slice before another one is tried, and between two log lines about the wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlacement:
    """The nodes that an engine reserves.

    - `nodes`: their number; `bundle`: resources of each.
    - `tpu_slice`: version and topology of the TPU slice that they form, such as `("v6e", "4x4")`.
    - `calls`: batches that it works on at once.
    """

    nodes: int
    bundle: dict[str, float]
    calls: int
    tpu_slice: tuple[str, str] | None = None

    def __str__(self) -> str:
        each = ", ".join(f"{amount:g} {name}" for name, amount in self.bundle.items())
        where = "" if self.tpu_slice is None else f" in one TPU slice {':'.join(self.tpu_slice)}"
        return f"{self.nodes} nodes with {each} each{where}"

    def reserve(self) -> PlacementGroup:
        """Waits until enough different nodes have room, and reserves them. Only a detached actor may call this. Its
        reservation ends with the actor; any other actor's ends only with the whole job."""
        return self._reserve_anywhere() if self.tpu_slice is None else self._reserve_slice(*self.tpu_slice)

    def _reserve_anywhere(self) -> PlacementGroup:
        group = placement_group([self.bundle] * self.nodes, strategy="STRICT_SPREAD")
        while not group.wait(RETRY_SECONDS):
            logger.warning("Waiting for %s", self)
        return group

    def _reserve_slice(self, version: str, topology: str) -> PlacementGroup:
        """Reserves a TPU slice. Ray chooses one whose first node is free, and then waits for its other nodes, maybe
        forever. So after each wait another slice is tried while the others are held; the first with room is taken."""
        tried: dict[ObjectRef, SlicePlacementGroup] = {}
        while True:
            one = self._try_slice(version, topology)
            if one is not None:
                tried[one.placement_group.ready()] = one
            ready = ray.wait(list(tried), timeout=RETRY_SECONDS)[0] if tried else []
            if ready:
                taken = tried.pop(ready[0])
                for other in tried.values():
                    other.shutdown()
                return taken.placement_group
            logger.warning("Waiting for %s; partly used slices: %d", self, len(tried))

    def _try_slice(self, version: str, topology: str) -> SlicePlacementGroup | None:
        """Requests a slice whose first node is free; None if there is none for `RETRY_SECONDS`."""
        resources = {name: amount for name, amount in self.bundle.items() if name != "TPU"}
        try:
            return SlicePlacementGroup(
                topology,
                version,
                resources_per_bundle=resources,
                strategy="STRICT_SPREAD",
                chips_per_vm=int(self.bundle["TPU"]),
                head_reservation_timeout_s=RETRY_SECONDS,
            )
        except TimeoutError:
            return None


class MultiNodeEngine:
    """Answers lines with an engine over several nodes. The loss of one node ends the whole engine, and so does the end
    of the process that created it. **Raises:** the error with which the engine fails to start on any node;
    `RayActorError` if a node is lost meanwhile."""

    def __init__(self, config: ServerConfig, asking: Asking, launch: Launch, placement: GroupPlacement) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._beacon = ray.remote(OwnerBeacon).options(num_cpus=0, scheduling_strategy=here).remote()
        ray.get(self._beacon.begin.remote())  # it must exist before another actor waits for its end
        keeper = (
            ray.remote(GroupKeeper)
            .options(num_cpus=0, scheduling_strategy=here, lifetime="detached")
            .remote(placement, self._beacon)
        )
        self._leader: ActorHandle = ray.get(keeper.start.remote(config, asking, launch))

    def answer(self, lines: Sequence[Line | BadLine]) -> list[Answer]:
        """See `LocalEngine`."""
        try:
            answers: list[Answer] = ray.get(self._leader.answer.remote(lines))
        except RayActorError as error:
            raise EngineDeadError(f"a node of the engine is lost: {error}") from error
        return answers


class OwnerBeacon:
    """An actor that lives as long as its creator, so that others can wait for the creator's end."""

    def begin(self) -> None:
        """Returns once the actor exists."""

    async def stay(self) -> None:
        """Never returns."""
        await asyncio.Event().wait()


class GroupKeeper:
    """The actor that reserves the nodes of an engine. It ends with the first of them, or with the engine's user. If the
    user itself reserved the nodes, Ray would release them only at the end of the job, so a restarted user would wait
    for its own nodes. A detached actor's reservation ends with the actor, so this one is detached. The actors on the
    nodes are its children and end with it. None of their calls keeps the user alive."""

    def __init__(self, placement: GroupPlacement, user: ActorHandle) -> None:
        logs.configure(logging.INFO)
        self._placement = placement
        self._end_after([user.stay.remote()], "the engine's driver has ended")

    def start(self, config: ServerConfig, asking: Asking, launch: Launch) -> ActorHandle:
        """Reserves nodes and starts the engine. Returns the `NodeActor` that answers. Raises the error of any node."""
        placement = self._placement
        group = placement.reserve()
        nodes = sort_nodes([start_node(group, number, placement) for number in range(placement.nodes)])
        update = {"dist_init_addr": ray.get(nodes[0].address.remote())}
        configs = [config.model_copy(update={**update, "node_rank": rank}) for rank in range(placement.nodes)]
        secret = secrets.token_hex(32)
        leading = nodes[0].lead.remote(configs[0], secret, asking, launch)
        following = [
            node.follow.remote(EngineConfig(**one.model_dump(include=set(EngineConfig.model_fields))), secret)
            for node, one in zip(nodes[1:], configs[1:], strict=True)
        ]
        [first], _ = ray.wait([leading, *following])
        ray.get(first)  # raises the call's error; a following node ends no earlier than the leader
        assert first == leading, "a node ended while the engine started"
        self._end_after(following, "a node of the engine has ended")
        return nodes[0]

    def _end_after(self, calls: list[ObjectRef], reason: str) -> None:
        """Ends this actor when one of the calls ends; a call ends at the latest with its actor."""
        this = ray.get_runtime_context().current_actor

        def wait() -> None:
            ray.wait(calls)
            logger.info("Releasing the nodes: %s", reason)
            ray.kill(this)

        threading.Thread(target=wait, daemon=True, name=reason).start()


class NodeActor:
    """The actor on one of the engine's nodes."""

    def __init__(self) -> None:
        self._engine: LocalEngine | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="sglang-jax-node-", ignore_cleanup_errors=True)

    def number(self) -> int:
        """The node's number in the TPU slice; 0 without a slice."""
        return int(ray.get_runtime_context().get_node_labels().get(WORKER_LABEL, 0))

    def address(self) -> str:
        """Returns HOST:PORT where the nodes can meet."""
        address = get_node_ip_address()
        with socket.create_server((address, 0)) as listener:
            return f"{address}:{listener.getsockname()[1]}"

    def lead(self, config: ServerConfig, secret: str, asking: Asking, launch: Launch) -> None:
        """Starts the engine together with the other nodes. `secret`: authenticates the nodes to each other."""
        config = config.model_copy(update=self._secret_option(secret, config))
        self._engine = LocalEngine(config, asking, launch=_LaunchOnce(launch), backoff=Backoff(give_up=1))

    def answer(self, lines: Sequence[Line | BadLine]) -> list[Answer]:
        """See `LocalEngine`."""
        assert self._engine is not None
        return self._engine.answer(lines)

    def follow(self, config: EngineConfig, secret: str) -> None:
        """Runs a follower until the leader ends."""
        config = config.model_copy(update=self._secret_option(secret, config))
        load_follower(config)(config)

    def _secret_option(self, secret: str, config: EngineConfig) -> dict[str, Path]:
        """Returns the option that passes the secret to the engine, which may be another process; empty if the user has
        set a file. Only this user can read the folder."""
        if config.group_secret_file is not None:
            return {}
        file = Path(self._folder.name) / "secret"
        file.write_text(secret)
        return {"group_secret_file": file}


class _LaunchOnce:
    """Starts an engine only once: an engine over several nodes can only be restarted with all its nodes."""

    def __init__(self, launch: Launch) -> None:
        self._launch: Launch | None = launch

    async def __call__(self, config: ServerConfig) -> AsyncEngineClient:
        launch, self._launch = self._launch, None
        if launch is None:
            raise EngineDeadError("the engine over several nodes is lost")
        return await launch(config)


def start_node(group: PlacementGroup, number: int, placement: GroupPlacement) -> ActorHandle:
    """Creates a `NodeActor` on one of the reserved nodes."""
    there = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=number)
    others = {name: amount for name, amount in placement.bundle.items() if name not in ("CPU", "GPU")}
    handle: ActorHandle = (
        ray.remote(NodeActor)
        .options(
            scheduling_strategy=there,
            num_cpus=placement.bundle["CPU"],
            num_gpus=placement.bundle.get("GPU", 0),
            resources=others,
            max_concurrency=placement.calls,
        )
        .remote()
    )
    return handle


def sort_nodes(nodes: list[ActorHandle]) -> list[ActorHandle]:
    """Sorts nodes by their numbers in the TPU slice, which libtpu uses."""
    numbers = ray.get([node.number.remote() for node in nodes])
    return [node for _, node in sorted(zip(numbers, nodes, strict=True), key=lambda pair: pair[0])]
