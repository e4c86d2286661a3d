"""What `tpu.launch` finds and chooses, on machines that are folders and tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.small_configs import small_config

import tpu.launch
from sglang_jax.cli.serve import serve
from sglang_jax.config import TpuEnvironment
from sglang_jax.errors import ConfigError
from tpu.choices import Choices, choose, weight_bytes
from tpu.launch import host_arguments, launch, server_arguments
from tpu.machine import Machine, detect_machine
from tpu.shapes import load_shape
from tpu.topologies import parse_topology

V6E, V5E, TPU7X = "0x006f", "0x0063", "0x0076"


def pci_bus(folder: Path, device: str, count: int) -> Path:
    """A bus with `count` TPU chips, a network card of Google's and a disk."""
    others = [("0x1ae0", "0x0042"), ("0x8086", device)]
    for number, (vendor, kind) in enumerate([("0x1ae0", device)] * count + others):
        place = folder / f"0000:00:{number:02x}.0"
        place.mkdir()
        (place / "vendor").write_text(vendor + "\n")
        (place / "device").write_text(kind + "\n")
    return folder


def nothing(attribute: str) -> None:
    return None


NO_ENVIRONMENT = TpuEnvironment.model_construct(accelerator_type=None, topology=None, worker_id=0, worker_hostnames="")


@pytest.mark.parametrize(
    ("device", "count", "topology"),
    [(V6E, 1, "v6e:1x1"), (V6E, 4, "v6e:2x2"), (V6E, 8, "v6e:2x4"), (V5E, 4, "v5e:2x2"), (TPU7X, 4, "tpu7x:2x2x1")],
)
def test_a_host_alone_is_what_its_bus_has(tmp_path: Path, device: str, count: int, topology: str) -> None:
    machine = detect_machine(NO_ENVIRONMENT, nothing, pci_bus(tmp_path, device, count))
    assert machine == Machine(parse_topology(topology), 0, ())


def test_without_a_chip_there_is_no_machine(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no TPU chip on its PCI bus"):
        detect_machine(NO_ENVIRONMENT, nothing, pci_bus(tmp_path, V6E, 0))


def test_metadata_tells_a_host_of_several(tmp_path: Path) -> None:
    attributes = {
        "accelerator-type": "v6e-16",
        "agent-worker-number": "2",
        "worker-network-endpoints": "a:0:10.0.0.1,b:1:10.0.0.2,c:2:10.0.0.3,d:3:10.0.0.4",
    }
    machine = detect_machine(NO_ENVIRONMENT, attributes.get, pci_bus(tmp_path, V6E, 4))
    assert machine == Machine(parse_topology("v6e:4x4"), 2, ("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"))


def test_the_environment_of_gke_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "pod-0.service,pod-1.service")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    monkeypatch.setenv("TPU_TOPOLOGY", "2x4")
    machine = detect_machine(TpuEnvironment(), {"agent-worker-number": "7"}.get, pci_bus(tmp_path, V5E, 4))
    assert machine == Machine(parse_topology("v5e:2x4"), 1, ("pod-0.service", "pod-1.service"))


def test_a_slice_that_is_not_its_hosts_is_refused(tmp_path: Path) -> None:
    attributes = {"accelerator-type": "v6e-16", "worker-network-endpoints": "10.0.0.1,10.0.0.2"}
    with pytest.raises(ConfigError, match=r"v6e-16, with 16 v6e chips; its hosts have 8 v6e chips"):
        detect_machine(NO_ENVIRONMENT, attributes.get, pci_bus(tmp_path, V6E, 4))


def machine_of(topology: str, hosts: int = 0, worker: int = 0) -> Machine:
    return Machine(parse_topology(topology), worker, tuple(f"10.0.0.{number}" for number in range(hosts)))


@pytest.mark.parametrize(
    ("topology", "heads", "tp"), [("v6e:2x2", 4, 4), ("v6e:2x4", 4, 4), ("tpu7x:2x2x1", 8, 8), ("v6e:2x4", 6, 2)]
)
def test_the_model_is_spread_as_far_as_it_divides(topology: str, heads: int, tp: int) -> None:
    model = small_config(num_heads=heads, num_kv_heads=1, intermediate_size=96, vocab_size=96)
    assert choose(machine_of(topology), model).tp == tp


def test_what_was_asked_for_is_taken() -> None:
    assert choose(machine_of("v6e:2x2"), small_config(), tp=2).tp == 2


def test_weights_beyond_the_memory_are_refused() -> None:
    assert weight_bytes(load_shape("qwen3-32b")) == pytest.approx(65.5e9, rel=0.01)  # 32.8 billion parameters
    with pytest.raises(ConfigError, match=r"61\.0 GiB of weights on each of 1 devices do not fit in 28\.1 GiB"):
        choose(machine_of("v6e:1x1"), load_shape("qwen3-32b"))
    assert choose(machine_of("v6e:2x2"), load_shape("qwen3-32b")).tp == 4


def test_nodes_that_would_stand_idle_are_refused() -> None:
    with pytest.raises(ConfigError, match="can be spread over 4"):
        choose(machine_of("v6e:4x4", hosts=4), small_config(vocab_size=96))


def test_every_host_is_told_its_number_and_where_to_meet() -> None:
    assert host_arguments(machine_of("v6e:2x2")) == []
    assert host_arguments(machine_of("v6e:4x4", hosts=4, worker=3)) == [
        *("--nnodes", "4", "--node-rank", "3", "--dist-init-addr", "10.0.0.0:8482")
    ]


def test_the_server_takes_these_flags() -> None:
    arguments = server_arguments(machine_of("v6e:4x4", hosts=4, worker=3), Choices(16, 64, 0.9, ()), "some/model")
    known = {name for parameter in serve.params for name in parameter.opts}
    assert {argument for argument in arguments if argument.startswith("--")} <= known


def test_a_dry_run_prints_the_command_with_the_users_options_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu.launch, "detect_machine", lambda environment: machine_of("v6e:1x1"))
    result = CliRunner().invoke(launch, ["--dry-run", "--port", "31000", "--page-size", "128"], standalone_mode=False)
    assert result.return_value == 0, result.output
    assert result.stdout.strip() == (
        "python -m sglang_jax.launch_server --model-path demo --backend jax --device tpu --tp-size 1 --page-size 64 "
        "--mem-fraction-static 0.9 --port 31000 --page-size 128"
    )
    assert "v6e:1x1 (1 chips, 1 devices)" in result.stderr


def test_the_server_is_started_with_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(tpu.launch, "detect_machine", lambda environment: machine_of("v6e:1x1"))
    monkeypatch.setattr(tpu.launch, "run", lambda command, program, arguments: started.append(arguments) or 7)
    result = CliRunner().invoke(launch, ["--port", "31000"], standalone_mode=False)
    assert result.return_value == 7
    assert started[0][-2:] == ["--port", "31000"]
