"""Which axis of an array goes over which axis of the device mesh.

Arrays name their axes by meaning (`Axis`); one table says where each meaning goes. A new way to spread a model is a
change of the table, and no layer knows the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sglang_jax.architectures.axes import Axis

MESH_AXES = ("data", "tensor", "expert")


MESH_AXIS: dict[Axis, str | None] = {
    Axis.TOKENS: None,
    Axis.HIDDEN: None,
    Axis.VOCABULARY: "tensor",
    Axis.HEADS: "tensor",
    Axis.KV_HEADS: "tensor",
    Axis.HEAD_PART: None,
    Axis.HEAD_DIM: None,
    Axis.GATE_OR_UP: None,
    Axis.INTERMEDIATE: "tensor",
    Axis.PAGES: None,
    Axis.PAGE_OFFSET: None,
    Axis.KEY_OR_VALUE: None,
    Axis.CHANNELS: "tensor",
    Axis.STATE_HEADS: "tensor",
    Axis.TAPS: None,
    Axis.IN_BLOCKS: None,
    Axis.ONE: None,
}
"""Tensor parallelism after Megatron-LM (Shoeybi et al. 2019): each device computes whole heads and a part of the
feed-forward layer; one sum over devices follows each of the two."""

KV_AXES = (Axis.PAGES, Axis.KV_HEADS, Axis.KEY_OR_VALUE, Axis.PAGE_OFFSET, Axis.HEAD_DIM)
"""Of a layer's KV pages: see `kernels.kv_storage`."""


def partition_spec(axes: Sequence[Axis]) -> PartitionSpec:
    """Where an array of these axes goes, by the table."""
    return PartitionSpec(*(MESH_AXIS[axis] for axis in axes))


def named_sharding(mesh: Mesh, axes: Sequence[Axis]) -> NamedSharding:
    """`partition_spec` on a mesh."""
    return NamedSharding(mesh, partition_spec(axes))


def make_mesh(devices: Sequence[jax.Device], *, data: int = 1, expert: int = 1) -> Mesh:
    """A mesh (data, tensor, expert) of all `devices`; what `data` and `expert` leave is tensor parallel. On a TPU they
    are in an order that goes along its links, as far as they have one.

    **Raises:** `ValueError` if the devices cannot be divided so.
    """
    if len(devices) % (data * expert):
        raise ValueError(f"{len(devices)} devices cannot be divided into data {data} x expert {expert}")
    shape = (data, len(devices) // (data * expert), expert)
    if _has_links(devices):
        return Mesh(mesh_utils.create_device_mesh(shape, devices), MESH_AXES)
    return Mesh(np.array(devices).reshape(shape), MESH_AXES)


def _has_links(devices: Sequence[jax.Device]) -> bool:
    """They are whole chips of a TPU that fill a box: neighbours in the mesh can be neighbours by their links."""
    if devices[0].platform != "tpu":
        return False
    chips = {tuple(device.coords) for device in devices}
    if len(devices) > len(chips) and not devices[0].device_kind.startswith("TPU7"):
        return False  # of a v4 that is compiled for, and not there, each core is a device
    box = math.prod(max(places) - min(places) + 1 for places in zip(*chips, strict=True))
    return box == len(chips)
