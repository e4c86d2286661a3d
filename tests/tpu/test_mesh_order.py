"""Devices follow the links of their slice, by the coordinates that libtpu gives them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_CHILD = """
import json, sys, tempfile
from pathlib import Path
from tpu.worker import prepare_compiler

prepare_compiler(Path(tempfile.mkdtemp()))
from jax.experimental import topologies
from sglang_jax.layers.sharding import make_mesh

found = {}
for name, counts in json.loads(sys.argv[1]).items():
    devices = list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    for count in counts:
        mesh = make_mesh(devices[:count])
        found[f"{name} {count}"] = [(device.id, device.coords) for device in mesh.devices.reshape(-1)]
print(json.dumps(found))
"""
SLICES = {"v6e:2x2": [1, 2, 3, 4], "v6e:4x4": [8, 16], "v5e:2x4": [8], "tpu7x:2x2x1": [2, 8], "v4:2x2x1": [8]}

Order = list[tuple[int, list[int]]]


@pytest.fixture(scope="module")
def orders() -> dict[str, Order]:
    folders = [str(Path(__file__).parents[2]), str(Path(sys.prefix) / "libtpu"), os.environ.get("PYTHONPATH", "")]
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps(SLICES)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))},
        check=True,
    )
    found: dict[str, Order] = json.loads(child.stdout.decode().splitlines()[-1])
    return found


def links(order: Order) -> list[int]:
    """How many links lie between each device and the next, round the ring."""
    places = [coords for _, coords in order]
    return [
        sum(abs(one - other) for one, other in zip(*pair, strict=True))
        for pair in zip(places, [*places[1:], places[0]], strict=True)
    ]


def test_every_device_is_there_once(orders: dict[str, Order]) -> None:
    for name, order in orders.items():
        assert sorted(number for number, _ in order) == list(range(int(name.split()[1]))), name


@pytest.mark.parametrize("name", ["v6e:2x2 4", "v6e:4x4 8", "v6e:4x4 16"])
def test_a_ring_goes_from_neighbour_to_neighbour(orders: dict[str, Order], name: str) -> None:
    assert set(links(orders[name])) == {1}


def test_two_devices_of_a_chip_are_neighbours(orders: dict[str, Order]) -> None:
    assert set(links(orders["tpu7x:2x2x1 8"])) == {0, 1}
    assert set(links(orders["tpu7x:2x2x1 2"])) == {0}


@pytest.mark.parametrize("name", ["v6e:2x2 3", "v4:2x2x1 8"])
def test_what_fills_no_box_and_halves_of_chips_stay_as_they_are(orders: dict[str, Order], name: str) -> None:
    assert [number for number, _ in orders[name]] == list(range(int(name.split()[1])))
