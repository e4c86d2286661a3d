"""Detects this machine's TPU: chips on the PCI bus, and Google Cloud's data about their slice."""

from __future__ import annotations

import ipaddress
import math
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sglang_jax.config import TpuEnvironment
from sglang_jax.errors import ConfigError
from tpu.topologies import CHIPS, Chip, Topology, parse_topology

PCI_DEVICES = Path("/sys/bus/pci/devices")

_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"
_METADATA_SECONDS = 2.0
_GOOGLE = "0x1ae0"

Metadata = Callable[[str], str | None]
"""Returns the value of an attribute of this VM; None if it does not exist."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A node of a slice, its number, and the addresses of all nodes, by number; empty if there is one."""

    topology: Topology
    worker: int
    nodes: tuple[str, ...]


def detect_machine(
    environment: TpuEnvironment, metadata: Metadata | None = None, pci_devices: Path = PCI_DEVICES
) -> Machine:
    """Detects the machine's slice. The environment (of GKE) takes precedence over the metadata server (of TPU VMs).
    Raises `ConfigError` if there is no TPU, or an unknown one."""
    found = metadata or read_metadata
    chip, count = _chips(pci_devices)
    nodes = _nodes(environment.worker_hostnames or found("worker-network-endpoints") or "")
    if len(nodes) < 2:
        return Machine(_own_slice(chip, count), 0, ())
    worker = environment.worker_id if environment.worker_hostnames else int(found("agent-worker-number") or 0)
    return Machine(_whole_slice(environment, found, chip, count * len(nodes)), worker, nodes)


def read_metadata(attribute: str) -> str | None:
    """Reads an attribute from Google Cloud's metadata server; None if there is no such server or attribute."""
    request = urllib.request.Request(_METADATA + attribute, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=_METADATA_SECONDS) as answer:
            return str(answer.read().decode()).strip()
    except (urllib.error.URLError, TimeoutError):
        return None


def _chips(pci_devices: Path) -> tuple[Chip, int]:
    devices = [device for device in pci_devices.iterdir() if _read(device / "vendor") == _GOOGLE]
    by_id = {chip.pci_id: chip for chip in CHIPS.values()}
    chips = [by_id[number] for device in devices if (number := _read(device / "device")) in by_id]
    if not chips:
        raise ConfigError(
            "this machine has no TPU chip on its PCI bus: run tpu.launch on a TPU VM, in a container on one with "
            "--privileged, or start the server by hand with python -m sglang_jax.launch_server"
        )
    return chips[0], len(chips)


def _read(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""


def _nodes(listed: str) -> tuple[str, ...]:
    """Parses names or addresses, or `name:number:address` as on older VMs. An IPv6 address contains colons: it is in
    brackets, by itself, or after the two others."""
    return tuple(_node(node.strip()) for node in listed.split(",") if node.strip())


def _node(listed: str) -> str:
    address = listed if is_ipv6(listed) else listed.split(":", 2)[-1].strip()
    return address.removeprefix("[").removesuffix("]")


def is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text.removeprefix("[").removesuffix("]"))
    except ipaddress.AddressValueError:
        return False
    return True


def _own_slice(chip: Chip, count: int) -> Topology:
    """The chips of one node: in the shape for a single node with this many chips, or in a row."""
    for shape in chip.one_node:
        if math.prod(shape) == count:
            return Topology(chip, shape)
    return Topology(chip, (1, count) if chip.dimensions == 2 else (1, count, 1))


def _whole_slice(environment: TpuEnvironment, metadata: Metadata, chip: Chip, count: int) -> Topology:
    """The slice of several nodes with `count` chips in total. Raises `ConfigError` if this contradicts its name."""
    name = f"{chip.generation}:{environment.topology}" if environment.topology else None
    name = name or environment.accelerator_type or metadata("accelerator-type")
    if name is None:
        raise ConfigError(
            f"found several nodes with {count} chips, but neither TPU_TOPOLOGY nor the metadata names the slice: set "
            "TPU_TOPOLOGY"
        )
    topology = parse_topology(name)
    if topology.chips != count or topology.chip is not chip:
        raise ConfigError(
            f"the slice should be {name}, with {topology.chips} {topology.chip.generation} chips, but its nodes have "
            f"{count} {chip.generation} chips"
        )
    return topology
