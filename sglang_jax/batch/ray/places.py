"""Nodes for an engine over several hosts: reserved all at once or not at all."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import ray
from ray import ObjectRef
from ray.util import placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.tpu import SlicePlacementGroup

logger = logging.getLogger(__name__)

SECONDS_A_TURN = 10.0
"""How long a TPU slice is waited for before another one is tried, and how often it is told what is waited for."""


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

    def __str__(self) -> str:
        each = ", ".join(f"{amount:g} {name}" for name, amount in self.bundle.items())
        where = "" if self.tpu_slice is None else f" in one TPU slice {':'.join(self.tpu_slice)}"
        return f"{self.hosts} nodes with {each} each{where}"

    def reserve(self) -> PlacementGroup:
        """Waits until there are nodes with room, all of them unlike.

        Ray gives back what an actor reserves only when the whole job ends, unless the actor is a detached one: then
        with that actor. So it is a detached one that may call this.
        """
        return self._reserve_anywhere() if self.tpu_slice is None else self._reserve_slice(*self.tpu_slice)

    def _reserve_anywhere(self) -> PlacementGroup:
        group = placement_group([self.bundle] * self.hosts, strategy="STRICT_SPREAD")
        while not group.wait(SECONDS_A_TURN):
            logger.warning("Waiting for %s", self)
        return group

    def _reserve_slice(self, version: str, topology: str) -> PlacementGroup:
        """Ray takes any slice whose first host is free, and then waits for its other hosts, which may be in use for
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
            logger.warning("Waiting for %s; slices that are in use in part: %d", self, len(tried))

    def _try_slice(self, version: str, topology: str) -> SlicePlacementGroup | None:
        """A slice whose first host is free, and which is asked for the others; None if there is none for a turn."""
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
