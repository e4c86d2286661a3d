"""An engine over several hosts: an actor on each, and one that holds them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from sglang_jax.batch.answers import Answer
from sglang_jax.batch.lines import BadLine, Line
from sglang_jax.batch.ray.answerer import Answerer, Asking, Launch
from sglang_jax.batch.ray.places import GroupPlacement
from sglang_jax.config import EngineConfig, ServerConfig
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.process import LOG_FORMAT
from sglang_jax.engine.replica import Backoff
from sglang_jax.errors import EngineDeadError
from sglang_jax.runner.backends import load_follower

logger = logging.getLogger(__name__)

WORKER_LABEL = "ray.io/tpu-worker-id"
"""Which host of its TPU slice a node is, as Ray labels it."""


class HostGroup:
    """Has an engine over several hosts answer lines. It is lost as a whole when any of them is, and it ends with the
    process that made it, however that ends.

    **Raises:** what the engine's start raises on any host; `RayActorError` if a host is lost meanwhile.
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
        """See `Answerer`."""
        try:
            answers: list[Answer] = ray.get(self._leader.answer.remote(lines))
        except RayActorError as error:
            raise EngineDeadError(f"a host of the engine is lost: {error}") from error
        return answers


class Presence:
    """An actor that is there as long as whoever made it."""

    def begin(self) -> None:
        """It is there."""

    async def stay(self) -> None:
        """Does not end by itself."""
        await asyncio.Event().wait()


class GroupKeeper:
    """The actor that holds the hosts of an engine, and ends with the first of them, or with whose engine it is.

    Ray would give back what the engine's user reserves only at the end of the job: also what it reserved in a former
    life, so that it would wait for itself once it is started again. What a detached actor reserves goes with that
    actor, so this is one. The hosts' actors, which are its own, go with it too; none of their calls keeps the user from
    leaving.
    """

    def __init__(self, placement: GroupPlacement, user: ActorHandle) -> None:
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
        self._placement = placement
        self._end_after([user.stay.remote()], "whose engine it is has ended")

    def start(self, config: ServerConfig, asking: Asking, launch: Launch) -> ActorHandle:
        """Reserves hosts and starts the engine. Returns the `Host` that answers. Raises what any host raises."""
        placement = self._placement
        group = placement.reserve()
        hosts = in_order([start_host(group, number, placement) for number in range(placement.hosts)])
        update = {"dist_init_addr": ray.get(hosts[0].address.remote())}
        configs = [config.model_copy(update={**update, "node_rank": rank}) for rank in range(placement.hosts)]
        secret = secrets.token_hex(32)
        leading = hosts[0].lead.remote(configs[0], secret, asking, launch)
        following = [
            host.follow.remote(EngineConfig(**one.model_dump(include=set(EngineConfig.model_fields))), secret)
            for host, one in zip(hosts[1:], configs[1:], strict=True)
        ]
        [first], _ = ray.wait([leading, *following])
        ray.get(first)  # raises what it ended with; a host that follows does not end before the leader
        assert first == leading, "a host ended while the engine started"
        self._end_after(following, "a host of the engine has ended")
        return hosts[0]

    def _end_after(self, calls: list[ObjectRef], reason: str) -> None:
        """Ends this actor when one of the calls ends, as each does at the latest with the actor that it is made to."""
        this = ray.get_runtime_context().current_actor

        def wait() -> None:
            ray.wait(calls)
            logger.info("The hosts are given back: %s", reason)
            ray.kill(this)

        threading.Thread(target=wait, daemon=True, name=reason).start()


class Host:
    """The actor on one of the hosts."""

    def __init__(self) -> None:
        self._answerer: Answerer | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="sglang-jax-host-", ignore_cleanup_errors=True)

    def number(self) -> int:
        """Its place in the TPU slice; 0 where there is none."""
        return int(ray.get_runtime_context().get_node_labels().get(WORKER_LABEL, 0))

    def address(self) -> str:
        """HOST:PORT where the hosts can meet."""
        host = get_node_ip_address()
        with socket.create_server((host, 0)) as listener:
            return f"{host}:{listener.getsockname()[1]}"

    def lead(self, config: ServerConfig, secret: str, asking: Asking, launch: Launch) -> None:
        """Starts the engine, with the others' help. `secret`: what the hosts know each other by."""
        config = config.model_copy(update=self._keep(secret, config))
        self._answerer = Answerer(config, asking, launch=_Once(launch), backoff=Backoff(give_up=1))

    def answer(self, lines: Sequence[Line | BadLine]) -> list[Answer]:
        """See `Answerer`."""
        assert self._answerer is not None
        return self._answerer.answer(lines)

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
    """Starts an engine once: one over several hosts does not come back unless all of them start anew."""

    def __init__(self, launch: Launch) -> None:
        self._launch: Launch | None = launch

    async def __call__(self, config: ServerConfig) -> AsyncEngineClient:
        launch, self._launch = self._launch, None
        if launch is None:
            raise EngineDeadError("the engine over several hosts is lost")
        return await launch(config)


def start_host(group: PlacementGroup, number: int, placement: GroupPlacement) -> ActorHandle:
    """A `Host` in one of the reserved places."""
    there = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=number)
    others = {name: amount for name, amount in placement.bundle.items() if name not in ("CPU", "GPU")}
    handle: ActorHandle = (
        ray.remote(Host)
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


def in_order(hosts: list[ActorHandle]) -> list[ActorHandle]:
    """By their places in the TPU slice, which is how libtpu numbers them."""
    numbers = ray.get([host.number.remote() for host in hosts])
    return [host for _, host in sorted(zip(numbers, hosts, strict=True), key=lambda pair: pair[0])]
