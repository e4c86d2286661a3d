"""Devices are ordered along the links of their slice, by libtpu's coordinates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from sglang_jax.layers.sharding import ring_through
from tpu.topologies import parse_topology

_CHILD = """
import json, sys, tempfile
from pathlib import Path
from tpu.worker import prepare_compiler

prepare_compiler(Path(tempfile.mkdtemp()))
from jax.experimental import topologies
from sglang_jax.layers.sharding import make_mesh
from tpu.topologies import parse_topology

found = {}
for name, counts in json.loads(sys.argv[1]).items():
    topology = parse_topology(name.removeprefix("halves of "))
    configuration = {} if name.startswith("halves of ") else topology.configuration
    devices = list(topologies.get_topology_desc(str(topology), "tpu", **configuration).devices)
    for count in counts:
        mesh = make_mesh(devices[:count])
        found[f"{name} {count}"] = [(device.id, device.coords) for device in mesh.devices.reshape(-1)]
print(json.dumps(found))
"""
NAMED = [
    *("v6e:1x1", "v6e:2x2", "v6e:2x4", "v6e:4x4", "v6e:4x8", "v6e:16x16"),
    *("v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:8x16"),
    *("v5p:2x2x1", "v5p:2x2x2", "v5p:4x4x4"),
    *("v4:2x2x1", "v4:2x2x4", "v4:2x4x4", "v4:4x4x4"),
    *("tpu7x:2x2x1", "tpu7x:2x2x2"),
]
"""Whole slices."""
COUNTS = {name: [parse_topology(name).devices] for name in NAMED} | {"halves of v4:2x2x1": [8]}
for name, counts in {"v6e:2x2": [1, 2, 3], "v6e:4x4": [8], "tpu7x:2x2x1": [2, 4]}.items():
    COUNTS[name] = [*counts, *COUNTS[name]]

Order = list[tuple[int, list[int]]]


@pytest.fixture(scope="module")
def orders() -> dict[str, Order]:
    folders = [str(Path(__file__).parents[2]), str(Path(sys.prefix) / "libtpu"), os.environ.get("PYTHONPATH", "")]
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps(COUNTS)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))},
        check=True,
    )
    found: dict[str, Order] = json.loads(child.stdout.decode().splitlines()[-1])
    return found


def links(order: Order) -> list[int]:
    """The number of links between each device and the next, around the ring."""
    places = [coords for _, coords in order]
    return [
        sum(abs(one - other) for one, other in zip(*pair, strict=True))
        for pair in zip(places, [*places[1:], places[0]], strict=True)
    ]


def test_every_device_occurs_once(orders: dict[str, Order]) -> None:
    for name, order in orders.items():
        assert sorted(number for number, _ in order) == list(range(int(name.split()[-1]))), name


@pytest.mark.parametrize("name", NAMED)
def test_a_ring_goes_from_neighbour_to_neighbour(orders: dict[str, Order], name: str) -> None:
    topology = parse_topology(name)
    within = {0} if topology.chips == 1 else set()
    between = {0, 1} if topology.chip.devices > 1 else {1}
    assert set(links(orders[f"{name} {topology.devices}"])) == (within or between)


def test_a_ring_of_a_part_of_a_slice_goes_from_neighbour_to_neighbour(orders: dict[str, Order]) -> None:
    assert set(links(orders["v6e:2x2 2"])) == {1}
    assert set(links(orders["v6e:4x4 8"])) == {1}


def test_two_devices_of_a_chip_are_neighbours(orders: dict[str, Order]) -> None:
    assert links(orders["tpu7x:2x2x1 2"]) == [0, 0]
    assert sorted(links(orders["tpu7x:2x2x1 4"])) == [0, 0, 1, 1]


@pytest.mark.parametrize("sizes", [sizes for axes in (1, 2, 3) for sizes in product(range(1, 5), repeat=axes)])
def test_a_path_through_a_box(sizes: tuple[int, ...]) -> None:
    """Each step goes to a neighbour, and the last to the first where a box has such a ring."""
    way = ring_through(sizes)
    assert sorted(way) == list(product(*map(range, sizes)))
    steps = links([(0, list(place)) for place in way])
    longer = [size for size in sizes if size > 1]
    ring = len(way) <= 2 or (len(longer) > 1 and len(way) % 2 == 0)
    assert set(steps if ring else steps[:-1]) <= {0, 1}
    assert way[0] == (0,) * len(sizes)


@pytest.mark.parametrize("name", ["v6e:2x2 3", "halves of v4:2x2x1 8"])
def test_devices_that_fill_no_box_keep_their_order(orders: dict[str, Order], name: str) -> None:
    assert [number for number, _ in orders[name]] == list(range(int(name.split()[-1])))
