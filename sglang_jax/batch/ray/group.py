"""An engine over several hosts: an actor on each, placed all at once or not at all."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.util import get_node_ip_address, placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray.util.tpu import SlicePlacementGroup

from sglang_jax.batch.answers import Answer
from sglang_jax.batch.lines import BadLine, Line
from sglang_jax.batch.ray.answerer import Answerer, Asking, Launch
from sglang_jax.config import EngineConfig, ServerConfig
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.replica import Backoff
from sglang_jax.errors import EngineDeadError
from sglang_jax.runner.backends import load_follower

WORKER_LABEL = "ray.io/tpu-worker-id"
"""Which host of its TPU slice a node is, as Ray labels it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlacement:
    """What an engine over several hosts reserves.

    - `hosts`: how many nodes; `bundle`: what of each.
    - `tpu_slice`: the version and topology of the TPU slice that they are to be, such as `("v6e", "4x4")`.
    - `calls`: batches that it works on at once.
    """

    hosts: int
    bundle: dict[str, float]
    calls: int
    tpu_slice: tuple[str, str] | None = None

    def reserve(self) -> PlacementGroup:
        """Waits until there are nodes with room, all of them unlike. Held until the calling actor ends."""
        if self.tpu_slice is None:
            group = placement_group([self.bundle] * self.hosts, strategy="STRICT_SPREAD")
        else:
            version, topology = self.tpu_slice
            resources = {name: amount for name, amount in self.bundle.items() if name != "TPU"}
            group = SlicePlacementGroup(
                topology,
                version,
                resources_per_bundle=resources,
                strategy="STRICT_SPREAD",
                chips_per_vm=int(self.bundle["TPU"]),
                head_reservation_timeout_s=None,
            ).placement_group
        ray.get(group.ready())
        return group


class HostGroup:
    """Has an engine over several hosts answer lines. It is lost as a whole when any of them is.

    **Raises:** what the engine's start raises on any host.
    """

    def __init__(self, config: ServerConfig, asking: Asking, launch: Launch, placement: GroupPlacement) -> None:
        group = placement.reserve()
        hosts = in_order([start_host(group, number, placement) for number in range(placement.hosts)])
        self._leader = hosts[0]
        update = {"dist_init_addr": ray.get(self._leader.address.remote())}
        configs = [config.model_copy(update={**update, "node_rank": rank}) for rank in range(placement.hosts)]
        leading = self._leader.lead.remote(configs[0], asking, launch)
        self._following = [
            host.follow.remote(EngineConfig(**one.model_dump(include=set(EngineConfig.model_fields))))
            for host, one in zip(hosts[1:], configs[1:], strict=True)
        ]
        [first], _ = ray.wait([leading, *self._following])
        ray.get(first)  # raises what it ended with; a host that follows does not end before the leader
        assert first == leading, "a host ended while the engine started"

    def answer(self, lines: Sequence[Line | BadLine]) -> list[Answer]:
        """See `Answerer`."""
        try:
            answers: list[Answer] = ray.get(self._leader.answer.remote(lines))
        except RayActorError as error:
            raise EngineDeadError(f"the engine's first host is lost: {error}") from error
        return answers


class Host:
    """The actor on one of the hosts."""

    def __init__(self) -> None:
        self._answerer: Answerer | None = None

    def number(self) -> int:
        """Its place in the TPU slice; 0 where there is none."""
        return int(ray.get_runtime_context().get_node_labels().get(WORKER_LABEL, 0))

    def address(self) -> str:
        """HOST:PORT where the hosts can meet."""
        host = get_node_ip_address()
        with socket.create_server((host, 0)) as listener:
            return f"{host}:{listener.getsockname()[1]}"

    def lead(self, config: ServerConfig, asking: Asking, launch: Launch) -> None:
        """Starts the engine, with the others' help."""
        self._answerer = Answerer(config, asking, launch=_Once(launch), backoff=Backoff(give_up=1))

    def answer(self, lines: Sequence[Line | BadLine]) -> list[Answer]:
        """See `Answerer`."""
        assert self._answerer is not None
        return self._answerer.answer(lines)

    def follow(self, config: EngineConfig) -> None:
        """Helps until the leader ends."""
        load_follower(config)(config)


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
