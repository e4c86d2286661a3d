"""TPU generations and slices: properties of chips, and names of slices."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum

from sglang_jax.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30


class Generation(StrEnum):
    """Named like libtpu's topologies."""

    V4 = "v4"
    V5E = "v5e"
    V5P = "v5p"
    V6E = "v6e"
    TPU7X = "tpu7x"


@dataclass(frozen=True, slots=True)
class Chip:
    """Properties of one chip. JAX sees `devices` devices in it, which share everything below except `vmem` and `hbm`.

    Peaks, bandwidths and capacities are from Google's pages on each generation
    (https://docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e, tpu7x), in units of 1000.

    - `cores`: TensorCores. Both cores of v4 and v5p chips are one device to JAX ("megacore"); those of tpu7x are two.
    - `hbm`: bytes of one device that programs may use, as libtpu 0.0.51 reports. It is less than on Google's pages.
    - `hbm_bandwidth`: bytes per second. `bf16_flops`, `int8_ops`: peaks per second. If the pages have none for int8, it
      is that of bfloat16.
    - `clock`: cycles per second of a core, to convert the compiler's estimates. v4 to v6e: JAX's peaks over the
      products of a core's matrix units per cycle; tpu7x the same, rounded.
    - `vmem`: bytes of one core's vector memory (`jax.experimental.pallas.tpu.get_tpu_info`).
    - `ici_bandwidth`: bytes per second that a chip sends over all links, half of the pages' figure for both directions.
    - `chips_per_node`: of a slice over several nodes; `one_node`: shapes of slices on a single node.
    - `counts_cores`: names like v5p-8 count cores; others chips. `pci_id`: device number on the PCI bus.
    """

    generation: Generation
    device_kind: str
    cores: int
    devices: int
    hbm: int
    hbm_bandwidth: float
    bf16_flops: float
    int8_ops: float
    clock: float
    vmem: int
    ici_bandwidth: float
    dimensions: int
    chips_per_node: int
    one_node: tuple[tuple[int, ...], ...]
    counts_cores: bool
    pci_id: str
    gke_accelerator: str


_SQUARES = ((1, 1), (2, 2), (2, 4))
_CUBE = ((2, 2, 1),)

CHIPS = {
    chip.generation: chip
    for chip in (
        Chip(
            generation=Generation.V4,
            device_kind="TPU v4",
            cores=2,
            devices=1,
            hbm=int(30.5 * GIB),
            hbm_bandwidth=1228e9,
            bf16_flops=275e12,
            int8_ops=275e12,
            clock=1.05e9,
            vmem=16 * MIB,
            ici_bandwidth=300e9,
            dimensions=3,
            chips_per_node=4,
            one_node=_CUBE,
            counts_cores=True,
            pci_id="0x005e",
            gke_accelerator="tpu-v4-podslice",
        ),
        Chip(
            generation=Generation.V5E,
            device_kind="TPU v5 lite",
            cores=1,
            devices=1,
            hbm=int(15.75 * GIB),
            hbm_bandwidth=819e9,
            bf16_flops=197e12,
            int8_ops=393e12,
            clock=1.5e9,
            vmem=128 * MIB,
            ici_bandwidth=200e9,
            dimensions=2,
            chips_per_node=4,
            one_node=_SQUARES,
            counts_cores=False,
            pci_id="0x0063",
            gke_accelerator="tpu-v5-lite-podslice",
        ),
        Chip(
            generation=Generation.V5P,
            device_kind="TPU v5",
            cores=2,
            devices=1,
            hbm=int(95.73 * GIB),
            hbm_bandwidth=2765e9,
            bf16_flops=459e12,
            int8_ops=918e12,
            clock=1.75e9,
            vmem=64 * MIB,
            ici_bandwidth=600e9,
            dimensions=3,
            chips_per_node=4,
            one_node=_CUBE,
            counts_cores=True,
            pci_id="0x0062",
            gke_accelerator="tpu-v5p-slice",
        ),
        Chip(
            generation=Generation.V6E,
            device_kind="TPU v6 lite",
            cores=1,
            devices=1,
            hbm=int(31.24 * GIB),
            hbm_bandwidth=1638e9,
            bf16_flops=918e12,
            int8_ops=1836e12,
            clock=1.75e9,
            vmem=128 * MIB,
            ici_bandwidth=400e9,
            dimensions=2,
            chips_per_node=4,
            one_node=_SQUARES,
            counts_cores=False,
            pci_id="0x006f",
            gke_accelerator="tpu-v6e-slice",
        ),
        Chip(
            generation=Generation.TPU7X,
            device_kind="TPU7x",
            cores=2,
            devices=2,
            hbm=int(94.74 * GIB),
            hbm_bandwidth=7380e9,
            bf16_flops=2307e12,
            int8_ops=2307e12,
            clock=2.2e9,
            vmem=64 * MIB,
            ici_bandwidth=600e9,
            dimensions=3,
            chips_per_node=4,
            one_node=_CUBE,
            counts_cores=False,
            pci_id="0x0076",
            gke_accelerator="tpu7x",
        ),
    )
}

_ALIASES = {
    "v4": Generation.V4,
    "v5e": Generation.V5E,
    "v5lite": Generation.V5E,
    "v5litepod": Generation.V5E,
    "v5p": Generation.V5P,
    "v6e": Generation.V6E,
    "trillium": Generation.V6E,
    "tpu7x": Generation.TPU7X,
    "v7x": Generation.TPU7X,
    "ironwood": Generation.TPU7X,
}

_LINKS_WITHIN_A_CHIP = 6

_NAME = re.compile(r"(?P<chip>[a-z0-9]+)(?::(?P<shape>\d+(?:x\d+)+)|-(?P<count>\d+))")
_EXAMPLES = "v6e:2x2, v6e-4, v5litepod-16, v5p-8, tpu7x:2x2x1"


@dataclass(frozen=True, slots=True)
class Topology:
    """A slice: chips of one generation in a grid of `shape`, connected by ICI."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        """`jax.device_count()` on the slice."""
        return self.chips * self.chip.devices

    @property
    def ici_bandwidth(self) -> float:
        """Bytes per second that the chip with the fewest neighbours sends: in a 2x2, each has two, not four."""
        return self._link_bandwidth * max(self._links(self.shape), 1)

    def exchange_bandwidth(self, box: tuple[int, ...]) -> float:
        """Bytes per second that each device sends, with ring algorithms, in a group of `box` chips of the slice. Only
        one of the two devices of a tpu7x chip sends to the next chip; the other's hop is within the chip, over a
        connection six times as fast as a link (https://docs.cloud.google.com/tpu/docs/tpu7x)."""
        between = self._link_bandwidth * max(self._links(box), 1)
        if self.chip.devices == 1:
            return between
        within = _LINKS_WITHIN_A_CHIP * self._link_bandwidth
        return within if math.prod(box) == 1 else min(between, within)

    @property
    def _link_bandwidth(self) -> float:
        return self.chip.ici_bandwidth / (2 * self.chip.dimensions)

    def _links(self, box: tuple[int, ...]) -> int:
        """Links of the chip with the fewest neighbours in a box."""
        axes = zip(box, self.shape, strict=True)
        return sum(0 if size == 1 else 2 if size == whole and self._is_ring(whole) else 1 for size, whole in axes)

    def _is_ring(self, size: int) -> bool:
        """Whether an axis is a ring, so that the last chip is the first one's neighbour: in two dimensions that of a
        whole pod; in three all axes of a slice of whole cubes of 4x4x4, and no others."""
        if self.chip.dimensions == 2:
            return size == 16
        return all(axis % 4 == 0 for axis in self.shape)

    @property
    def nodes(self) -> int:
        """TPU VMs of the slice; a shape that fits on one node is assumed to be on one."""
        if self.shape in self.chip.one_node:
            return 1
        return max(self.chips // self.chip.chips_per_node, 1)

    @property
    def shape_name(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def configuration(self) -> dict[str, str]:
        """Options that libtpu needs in addition to the name. Without them, it treats the two cores of a v4 chip as
        devices, each with half of the memory; those of a v5p are one device anyway."""
        return {"chip_config_name": "megacore"} if self.chip.generation is Generation.V4 else {}

    def __str__(self) -> str:
        return f"{self.chip.generation}:{self.shape_name}"


def parse_topology(name: str) -> Topology:
    """Parses a slice's name: chip and grid (`v6e:2x2`), or a Google Cloud accelerator type, which counts chips
    (`v6e-4`, `v5litepod-16`) or, for v4 and v5p, cores (`v5p-8`). Raises `ConfigError` with the known names."""
    found = _NAME.fullmatch(name.strip().lower().removeprefix("tpu-"))
    if found is None or found["chip"] not in _ALIASES:
        raise ConfigError(
            f"unknown topology {name!r}: give chip and grid, or an accelerator type ({_EXAMPLES}); chips are "
            f"{', '.join(CHIPS)}"
        )
    chip = CHIPS[_ALIASES[found["chip"]]]
    if found["shape"]:
        return _of_grid(name, chip, tuple(map(int, found["shape"].split("x"))))
    if chip.generation is Generation.TPU7X:
        raise ConfigError(f"topology {name!r}: give the grid of a tpu7x slice, as in tpu7x:2x2x1")
    return _of_count(name, chip, int(found["count"]))


def _of_grid(name: str, chip: Chip, shape: tuple[int, ...]) -> Topology:
    if len(shape) != chip.dimensions or min(shape) < 1:
        raise ConfigError(
            f"topology {name!r}: the grid of a {chip.generation} slice has {chip.dimensions} dimensions, as in "
            f"{Topology(chip, chip.one_node[-1])}"
        )
    return Topology(chip, shape)


def _of_count(name: str, chip: Chip, count: int) -> Topology:
    """Google Cloud's own grids: as square as a power of two allows, with the last axes longest."""
    chips = count // chip.cores if chip.counts_cores else count
    least = math.prod(chip.one_node[0])
    if chips < least or chips & (chips - 1) or (chip.counts_cores and count % chip.cores):
        counted = "cores, two to a chip" if chip.counts_cores else "chips"
        raise ConfigError(
            f"topology {name!r}: {chip.generation}-N counts {counted}, and N is a power of two from "
            f"{least * (chip.cores if chip.counts_cores else 1)}; give other grids as {chip.generation}:AxB..."
        )
    if chip.dimensions == 2:
        height = 1 << ((chips.bit_length() - 1) // 2)
        shape: tuple[int, ...] = (1, 1) if chips == 1 else (height, chips // height)
    else:
        shape = _near_cube(chips)
    return Topology(chip, shape)


def _near_cube(chips: int) -> tuple[int, ...]:
    """Starts at `(2, 2, 1)` and doubles the last of the shortest axes."""
    shape = [2, 2, 1]
    while math.prod(shape) < chips:
        axis = max(axis for axis in range(3) if shape[axis] == min(shape))
        shape[axis] *= 2
    return tuple(shape)
