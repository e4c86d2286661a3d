"""The sharding of arrays over the device mesh. Arrays name their axes by meaning (`Axis`), and one table maps these to
axes of the mesh. Another way to shard a model is a change of the table; layers do not know the mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.recurrent import StateArray
from sglang_jax.architectures.parallelism import Parallelism

MESH_AXES = ("data", "tensor", "expert")

TENSOR = ("tensor", "expert")
"""The axes of the mesh over which all but experts are sharded, as if they were one."""

MESH_AXIS: dict[Axis, tuple[str, ...]] = {
    Axis.TOKENS: (),
    Axis.HIDDEN: (),
    Axis.VOCABULARY: TENSOR,
    Axis.HEADS: TENSOR,
    Axis.WHOLE_HEADS: (),
    Axis.KV_HEADS: TENSOR,
    Axis.HEAD_PART: (),
    Axis.HEAD_DIM: (),
    Axis.GATE_OR_UP: (),
    Axis.INTERMEDIATE: TENSOR,
    Axis.LATENT: (),
    Axis.EXPERTS: ("expert",),
    Axis.EXPERT_INTERMEDIATE: ("tensor",),
    Axis.ROUTED: (),
    Axis.POSITIONS: (),
    Axis.TOKEN_TYPES: (),
    Axis.POOLED: (),
    Axis.LABELS: (),
    Axis.PAGES: (),
    Axis.PAGE_OFFSET: (),
    Axis.KEY_OR_VALUE: (),
    Axis.CHANNELS: TENSOR,
    Axis.STATE_HEADS: TENSOR,
    Axis.TAPS: (),
    Axis.IN_BLOCKS: (),
    Axis.SHARDED_IN_BLOCKS: TENSOR,
    Axis.EXPERT_IN_BLOCKS: ("tensor",),
    Axis.IN_BLOCK: (),
    Axis.IN_TILES: (),
    Axis.ONE: (),
}
"""Tensor parallelism as in Megatron-LM (Shoeybi et al. 2019): each device computes whole heads and a part of the
feed-forward layer; a sum over devices follows each of the two. Experts: see `Parallelism`."""

KV_AXES = (Axis.PAGES, Axis.KV_HEADS, Axis.KEY_OR_VALUE, Axis.PAGE_OFFSET, Axis.HEAD_DIM)
"""The axes of a layer's KV pages: see `kernels.kv_storage`."""


PAGES_OF_RANKS = PartitionSpec(TENSOR)
"""The sharding of pages of which each device has its own: see `layers.ranks`."""


def partition_spec(axes: Sequence[Axis]) -> PartitionSpec:
    return PartitionSpec(*(MESH_AXIS[axis] or None for axis in axes))


def named_sharding(mesh: Mesh, axes: Sequence[Axis]) -> NamedSharding:
    return NamedSharding(mesh, partition_spec(axes))


def spec_of_state(array: StateArray) -> PartitionSpec:
    """The sharding of the pool `[slots, ...]` of an array of a recurrent state."""
    return PartitionSpec(*[None] * (1 + array.sharded_axis), MESH_AXIS[Axis.STATE_HEADS])


def parallelism_of(mesh: Mesh | AbstractMesh) -> Parallelism:
    """How a mesh divides a model."""
    return Parallelism(mesh.shape["tensor"] * mesh.shape["expert"], mesh.shape["expert"])


def has_first_copy(axes: Sequence[Axis]) -> jax.Array:
    """Whether this device is the first of those that have its part of an array with these axes, bool `[]`. For use on
    each device (`shard_map`)."""
    divided = {name for axis in axes for name in MESH_AXIS[axis]}
    copies = tuple(name for name in TENSOR if name not in divided)
    return jax.lax.axis_index(copies) == 0 if copies else jnp.bool_(True)


def automatic_mesh() -> AbstractMesh | None:
    """The mesh of several devices over which the compiler shards operations; None on one device, without a mesh, and in
    functions of one device (`shard_map`)."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.manual_axes or mesh.size == 1 else mesh


def make_mesh(devices: Sequence[jax.Device], *, data: int = 1, expert: int = 1) -> Mesh:
    """A mesh (data, tensor, expert) of all `devices`; the tensor axis has those that `data` and `expert` leave. TPU
    chips that fill a box are ordered along its links, and back to the first one if possible. Raises `ValueError` if the
    number of devices cannot be divided this way."""
    if len(devices) % (data * expert):
        raise ValueError(f"{len(devices)} devices cannot be divided into data {data} x expert {expert}")
    shape = (data, len(devices) // (data * expert), expert)
    if _has_links(devices):
        devices = _along_links(devices)
    return Mesh(np.array(devices).reshape(shape), MESH_AXES)


def _has_links(devices: Sequence[jax.Device]) -> bool:
    """Whether they are whole TPU chips that fill a box, so that neighbours in the mesh can have links."""
    if devices[0].platform != "tpu":
        return False
    chips = {tuple(device.coords) for device in devices}
    if len(devices) > len(chips) and not devices[0].device_kind.startswith("TPU7"):
        return False  # when compiling for an absent v4, each core is a device
    box = math.prod(max(places) - min(places) + 1 for places in zip(*chips, strict=True))
    return box == len(chips)


def _along_links(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """The devices of a box in the order of `ring_through`, with those of a chip adjacent."""
    chips: dict[tuple[int, ...], list[jax.Device]] = {}
    for device in devices:
        chips.setdefault(tuple(device.coords), []).append(device)
    least = tuple(map(min, zip(*chips, strict=True)))
    sizes = tuple(max(axis) - low + 1 for axis, low in zip(zip(*chips, strict=True), least, strict=True))
    places = (tuple(map(sum, zip(place, least, strict=True))) for place in ring_through(sizes))
    return [device for place in places for device in chips[place]]


def ring_through(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Every place of a box once, each next to the previous one, and the last next to the first if the box has such a
    ring: if one axis is even and another is longer than 1, or if the box has at most two places.

    A path winds through all axes except an even one. The ring ascends along that axis, visiting all of the path except
    its first place at each height, and returns along the line of the first place.
    """
    axes = [axis for axis, size in enumerate(sizes) if size > 1]
    even = next((axis for axis in axes if sizes[axis] % 2 == 0), None)
    if even is None or len(axes) < 2:
        return _winding(sizes)
    path = _winding([1 if axis == even else size for axis, size in enumerate(sizes)])

    def at(place: tuple[int, ...], height: int) -> tuple[int, ...]:
        return (*place[:even], height, *place[even + 1 :])

    there = [
        at(place, height) for height in range(sizes[even]) for place in (path[1:] if height % 2 == 0 else path[:0:-1])
    ]
    back = [at(path[0], height) for height in range(1, sizes[even])]
    return [at(path[0], 0), *there, *reversed(back)]


def _winding(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Every place of a box once, each next to the previous one."""
    places: list[tuple[int, ...]] = [()]
    for size in reversed(sizes):
        ends = [places if number % 2 == 0 else places[::-1] for number in range(size)]
        places = [(number, *place) for number, line in enumerate(ends) for place in line]
    return places
