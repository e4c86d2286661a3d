"""Which devices each replica gets, on machines simulated by files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_jax.config import Device, EngineConfig
from sglang_jax.engine import placement
from sglang_jax.engine.placement import Placement, place_replicas
from sglang_jax.errors import ConfigError
from sglang_jax.runner import this_machine


class Machine:
    """A machine with the devices it is given, and without accelerators at first."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._devices, self._pci, self._cpus = folder / "dev", folder / "pci", folder / "cpu"
        self._devices.mkdir()
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(this_machine, "_DEVICES", self._devices)
        monkeypatch.setattr(this_machine, "_PCI_DEVICES", self._pci)
        monkeypatch.setattr(this_machine, "_CPUS", self._cpus)
        for name in ("CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS"):
            monkeypatch.delenv(name, raising=False)

    def cpus(self, places: dict[int, tuple[int, int]]) -> None:
        """CPUs by number, each at (socket, core)."""
        self._monkeypatch.setattr(this_machine.os, "sched_getaffinity", lambda _: set(places))
        for number, (socket, core) in places.items():
            topology = self._cpus / f"cpu{number}" / "topology"
            topology.mkdir(parents=True)
            (topology / "physical_package_id").write_text(f"{socket}\n")
            (topology / "core_id").write_text(f"{core}\n")

    def gpus(self, count: int) -> None:
        for number in range(count):
            (self._devices / f"nvidia{number}").touch()
        (self._devices / "nvidiactl").touch()

    def chips(self, count: int, device: str) -> None:
        for number in range(count):
            folder = self._pci / f"0000:00:{number:02x}.0"
            folder.mkdir(parents=True)
            for name, value in (("vendor", "0x1ae0"), ("class", "0x120000"), ("device", device)):
                (folder / name).write_text(f"{value}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def places(count: int, **options: object) -> list[Placement]:
    return place_replicas(EngineConfig(**options), count)


def shown(placements: list[Placement], name: str) -> list[str]:
    return [dict(one.environment)[name] for one in placements]


def test_cores_are_divided_evenly_and_completely(machine: Machine) -> None:
    machine.cpus({number: (0, number) for number in range(8)})
    three = places(3)
    assert sorted(core for one in three for core in one.cores) == list(range(8))
    assert sorted(len(one.cores) for one in three) == [2, 3, 3]
    assert {one.device for one in three} == {Device.CPU}


def test_threads_of_a_core_and_cores_of_a_socket_stay_together(machine: Machine) -> None:
    # Numbered as Linux does it for two sockets of two cores with two threads each.
    machine.cpus({number: (number // 2 % 2, number % 2) for number in range(8)})
    assert [one.cores for one in places(2)] == [(0, 4, 1, 5), (2, 6, 3, 7)]
    assert [one.cores for one in places(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_cpus_without_a_topology_are_cores(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine.os, "sched_getaffinity", lambda _: {3, 1, 2, 0})
    assert [one.cores for one in places(2)] == [(0, 1), (2, 3)]


def test_more_replicas_than_cores_are_refused(machine: Machine) -> None:
    machine.cpus({0: (0, 0), 1: (0, 1)})
    with pytest.raises(ConfigError, match="dp_size 3 needs a CPU core for each replica; this process may use 2"):
        places(3)


def test_replicas_on_a_cpu_share_its_memory(machine: Machine) -> None:
    machine.cpus({number: (0, number) for number in range(4)})
    config = EngineConfig(mem_fraction_static=0.8, dp_size=4)
    options = [one.options(config) for one in place_replicas(config, 4)]
    assert [one.mem_fraction_static for one in options] == [pytest.approx(0.2)] * 4
    assert {(one.dp_size, one.device) for one in options} == {(1, Device.CPU)}


def test_gpus_are_assigned_by_number_each_with_its_own_memory(machine: Machine) -> None:
    machine.gpus(4)
    config = EngineConfig(tp_size=2, mem_fraction_static=0.8)
    placements = place_replicas(config, 2)
    assert shown(placements, "CUDA_VISIBLE_DEVICES") == ["0,1", "2,3"]
    assert {one.device for one in placements} == {Device.CUDA}
    assert [one.options(config).mem_fraction_static for one in placements] == [0.8, 0.8]
    assert [one.options(config).device for one in placements] == [Device.CUDA] * 2


def test_gpus_that_this_process_was_given_are_divided(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.gpus(8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6, GPU-1b2c,3,-1,0")
    assert shown(places(3), "CUDA_VISIBLE_DEVICES") == ["6", "GPU-1b2c", "3"]
    with pytest.raises(ConfigError, match=r"dp_size 2 with tp_size 2 needs 4 GPUs, and CUDA_VISIBLE_DEVICES=6, .* 3"):
        places(2, tp_size=2)


def test_more_replicas_than_gpus_are_refused(machine: Machine) -> None:
    machine.gpus(4)
    with pytest.raises(ConfigError, match="dp_size 5 with tp_size 1 needs 5 GPUs, and this machine has 4"):
        places(5)
    with pytest.raises(ConfigError, match="dp_size 4 with tp_size 2 needs 8 GPUs, and this machine has 4"):
        places(4, tp_size=2)


def test_a_cpu_may_be_requested_on_a_machine_with_gpus(machine: Machine) -> None:
    machine.gpus(4)
    machine.cpus({0: (0, 0), 1: (0, 1)})
    assert [one.cores for one in places(2, device="cpu")] == [(0,), (1,)]


@pytest.mark.parametrize(
    ("count", "tp_size", "chips", "bounds"),
    [
        (4, 1, ["0", "1", "2", "3"], "1,1,1"),
        (2, 2, ["0,1", "2,3"], "1,2,1"),
        (2, 4, ["0,1,2,3", "4,5,6,7"], "2,2,1"),
    ],
)
def test_tpu_chips_are_separate_slices(
    machine: Machine, count: int, tp_size: int, chips: list[str], bounds: str
) -> None:
    machine.chips(8, "0x006f")
    placements = places(count, tp_size=tp_size)
    assert shown(placements, "TPU_VISIBLE_CHIPS") == chips
    assert shown(placements, "TPU_CHIPS_PER_PROCESS_BOUNDS") == [bounds] * count
    assert shown(placements, "TPU_PROCESS_BOUNDS") == ["1,1,1"] * count
    ports = shown(placements, "TPU_PROCESS_PORT")
    assert len(set(ports)) == count
    assert shown(placements, "TPU_PROCESS_ADDRESSES") == [f"localhost:{port}" for port in ports]


def test_a_tpu7x_chip_is_two_devices(machine: Machine) -> None:
    machine.chips(4, "0x0076")
    assert shown(places(4, tp_size=2), "TPU_VISIBLE_CHIPS") == ["0", "1", "2", "3"]
    assert shown(places(2, tp_size=4), "TPU_VISIBLE_CHIPS") == ["0,1", "2,3"]


def test_tpu_chips_that_do_not_divide_are_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.chips(8, "0x006f")
    with pytest.raises(ConfigError, match="tp_size 3 needs 3 TPU chips for each of 2 replicas"):
        places(2, tp_size=3)
    with pytest.raises(ConfigError, match="dp_size 3 with tp_size 4 needs 12 TPU chips, and this machine has 8"):
        places(3, tp_size=4)
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "4,5")
    assert shown(places(2), "TPU_VISIBLE_CHIPS") == ["4", "5"]
    with pytest.raises(ConfigError, match="TPU_VISIBLE_CHIPS=4,5 shows 2"):
        places(3)


def test_several_nodes_are_refused(machine: Machine) -> None:
    with pytest.raises(ConfigError, match="nnodes must be 1, got 2"):
        place_replicas(EngineConfig(nnodes=2), 2)


SCRIPT = """
import os, sys
from sglang_jax.config import Device
from sglang_jax.engine.placement import Placement
Placement(name="replica 0", device=Device.CPU, cores=(CORE,), environment=(("TPU_VISIBLE_CHIPS", "3"),)).apply()
BACKEND
print(sorted(os.sched_getaffinity(0)), os.environ["TPU_VISIBLE_CHIPS"])
"""

BACKENDS = {
    "torch": "import torch\nprint(torch.get_num_threads())",
    "jax": "import jax; jax.config.update('jax_platforms', 'cpu')\n"
    "jax.numpy.ones(8).block_until_ready()\n"
    "print(max(len(os.sched_getaffinity(int(task))) for task in os.listdir('/proc/self/task')))",
}


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_placement_applied_before_a_backend_holds_for_all_of_its_threads(backend: str) -> None:
    core = max(os.sched_getaffinity(0))
    script = SCRIPT.replace("CORE", str(core)).replace("BACKEND", BACKENDS[backend])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["1", f"[{core}] 3"]


def test_every_number_of_chips_has_its_bounds() -> None:
    for chips, bounds in placement._CHIP_BOUNDS.items():
        x, y, z = map(int, bounds.split(","))
        assert x * y * z == chips
