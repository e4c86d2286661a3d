"""An engine over several nodes of the cluster, reserved all at once or not at all: an actor on each, and one that holds
them."""

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
"""Which of its TPU slice's nodes one is, as Ray labels it."""

SECONDS_A_TURN = 10.0
"""How long a TPU slice is waited for before another one is tried, and how often it is told what is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlacement:
    """What an engine over several nodes reserves.

    - `nodes`: how many; `bundle`: what of each.
    - `tpu_slice`: the version and topology of the TPU slice that they are to be, such as `("v6e", "4x4")`.
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
        """Waits until there are nodes with room, all of them unlike.

        Ray gives back what an actor reserves only when the whole job ends, unless the actor is a detached one: then
        with that actor. So it is a detached one that may call this.
        """
        return self._reserve_anywhere() if self.tpu_slice is None else self._reserve_slice(*self.tpu_slice)

    def _reserve_anywhere(self) -> PlacementGroup:
        group = placement_group([self.bundle] * self.nodes, strategy="STRICT_SPREAD")
        while not group.wait(SECONDS_A_TURN):
            logger.warning("Waiting for %s", self)
        return group

    def _reserve_slice(self, version: str, topology: str) -> PlacementGroup:
        """Ray takes any slice whose first node is free, and then waits for its other nodes, which may be in use for
        ever. So after a turn a further slice is tried, while those before are held; the first with room is taken."""
        tried: dict[ObjectRef, SlicePlacementGroup] = {}
        while True:
            one = self._try_slice(version, topology)
            if one is not None:
                tried[one.placement_group.ready()] = one
            ready = ray.wait(list(tried), timeout=SECONDS_A_TURN)[0] if tried else []
            if ready:
                taken = tried.pop(ready[0])
                for other in tried.values():
                    other.shutdown()
                return taken.placement_group
            logger.warning("Waiting for %s; partly used slices: %d", self, len(tried))

    def _try_slice(self, version: str, topology: str) -> SlicePlacementGroup | None:
        """A slice whose first node is free, and which is asked for the others; None if there is none for a turn."""
        resources = {name: amount for name, amount in self.bundle.items() if name != "TPU"}
        try:
            return SlicePlacementGroup(
                topology,
                version,
                resources_per_bundle=resources,
                strategy="STRICT_SPREAD",
                chips_per_vm=int(self.bundle["TPU"]),
                head_reservation_timeout_s=SECONDS_A_TURN,
            )
        except TimeoutError:
            return None


class MultiNodeEngine:
    """Has an engine over several nodes answer lines. It is lost as a whole when any of them is, and it ends with the
    process that made it, however that ends.

    **Raises:** what the engine's start raises on any node; `RayActorError` if a node is lost meanwhile.
    """

    def __init__(self, config: ServerConfig, asking: Asking, launch: Launch, placement: GroupPlacement) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._presence = ray.remote(Presence).options(num_cpus=0, scheduling_strategy=here).remote()
        ray.get(self._presence.begin.remote())  # whoever waits for its end must find it
        keeper = (
            ray.remote(GroupKeeper)
            .options(num_cpus=0, scheduling_strategy=here, lifetime="detached")
            .remote(placement, self._presence)
        )
        self._leader: ActorHandle = ray.get(keeper.start.remote(config, asking, launch))

    def answer(self, lines: Sequence[Line | BadLine]) -> list[Answer]:
        """See `LocalEngine`."""
        try:
            answers: list[Answer] = ray.get(self._leader.answer.remote(lines))
        except RayActorError as error:
            raise EngineDeadError(f"a node of the engine is lost: {error}") from error
        return answers


class Presence:
    """An actor that is there as long as whoever made it."""

    def begin(self) -> None:
        """It is there."""

    async def stay(self) -> None:
        """Does not end by itself."""
        await asyncio.Event().wait()


class GroupKeeper:
    """The actor that holds the nodes of an engine, and ends with the first of them, or with whose engine it is.

    Ray would give back what the engine's user reserves only at the end of the job: also what it reserved in a former
    life, so that it would wait for itself once it is started again. What a detached actor reserves goes with that
    actor, so this is one. The nodes' actors, which are its own, go with it too; none of their calls keeps the user from
    leaving.
    """

    def __init__(self, placement: GroupPlacement, user: ActorHandle) -> None:
        logs.configure(logging.INFO)
        self._placement = placement
        self._end_after([user.stay.remote()], "the engine's driver has ended")

    def start(self, config: ServerConfig, asking: Asking, launch: Launch) -> ActorHandle:
        """Reserves nodes and starts the engine. Returns the `NodeActor` that answers. Raises what any node raises."""
        placement = self._placement
        group = placement.reserve()
        nodes = in_order([start_node(group, number, placement) for number in range(placement.nodes)])
        update = {"dist_init_addr": ray.get(nodes[0].address.remote())}
        configs = [config.model_copy(update={**update, "node_rank": rank}) for rank in range(placement.nodes)]
        secret = secrets.token_hex(32)
        leading = nodes[0].lead.remote(configs[0], secret, asking, launch)
        following = [
            node.follow.remote(EngineConfig(**one.model_dump(include=set(EngineConfig.model_fields))), secret)
            for node, one in zip(nodes[1:], configs[1:], strict=True)
        ]
        [first], _ = ray.wait([leading, *following])
        ray.get(first)  # raises what it ended with; a node that follows does not end before the leader
        assert first == leading, "a node ended while the engine started"
        self._end_after(following, "a node of the engine has ended")
        return nodes[0]

    def _end_after(self, calls: list[ObjectRef], reason: str) -> None:
        """Ends this actor when one of the calls ends, as each does at the latest with the actor that it is made to."""
        this = ray.get_runtime_context().current_actor

        def wait() -> None:
            ray.wait(calls)
            logger.info("Releasing the nodes: %s", reason)
            ray.kill(this)

        threading.Thread(target=wait, daemon=True, name=reason).start()


class NodeActor:
    """The actor on one of the nodes."""

    def __init__(self) -> None:
        self._engine: LocalEngine | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="sglang-jax-node-", ignore_cleanup_errors=True)

    def number(self) -> int:
        """Its place in the TPU slice; 0 where there is none."""
        return int(ray.get_runtime_context().get_node_labels().get(WORKER_LABEL, 0))

    def address(self) -> str:
        """HOST:PORT where the nodes can meet."""
        address = get_node_ip_address()
        with socket.create_server((address, 0)) as listener:
            return f"{address}:{listener.getsockname()[1]}"

    def lead(self, config: ServerConfig, secret: str, asking: Asking, launch: Launch) -> None:
        """Starts the engine, with the others' help. `secret`: what the nodes know each other by."""
        config = config.model_copy(update=self._keep(secret, config))
        self._engine = LocalEngine(config, asking, launch=_Once(launch), backoff=Backoff(give_up=1))

    def answer(self, lines: Sequence[Line | BadLine]) -> list[Answer]:
        """See `LocalEngine`."""
        assert self._engine is not None
        return self._engine.answer(lines)

    def follow(self, config: EngineConfig, secret: str) -> None:
        """Helps until the leader ends."""
        config = config.model_copy(update=self._keep(secret, config))
        load_follower(config)(config)

    def _keep(self, secret: str, config: EngineConfig) -> dict[str, Path]:
        """The option that gives the secret to the engine, which may be another process; none where a file of the user's
        does. The folder is this user's alone."""
        if config.group_secret_file is not None:
            return {}
        file = Path(self._folder.name) / "secret"
        file.write_text(secret)
        return {"group_secret_file": file}


class _Once:
    """Starts an engine once: one over several nodes does not come back unless all of them start anew."""

    def __init__(self, launch: Launch) -> None:
        self._launch: Launch | None = launch

    async def __call__(self, config: ServerConfig) -> AsyncEngineClient:
        launch, self._launch = self._launch, None
        if launch is None:
            raise EngineDeadError("the engine over several nodes is lost")
        return await launch(config)


def start_node(group: PlacementGroup, number: int, placement: GroupPlacement) -> ActorHandle:
    """A `NodeActor` in one of the reserved places."""
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


def in_order(nodes: list[ActorHandle]) -> list[ActorHandle]:
    """By their places in the TPU slice, which is how libtpu numbers them."""
    numbers = ray.get([node.number.remote() for node in nodes])
    return [node for _, node in sorted(zip(numbers, nodes, strict=True), key=lambda pair: pair[0])]
