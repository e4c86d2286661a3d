"""Which part of the machine each replica has: CPU cores, GPUs or TPU chips."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_jax.config import Device, EngineConfig, VisibleDevices
from sglang_jax.errors import ConfigError
from sglang_jax.runner.this_machine import (
    cpu_cores,
    devices_per_tpu_chip,
    has_cuda_gpu,
    has_tpu,
    num_cuda_gpus,
    num_tpu_chips,
)

_CHIP_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""How as many TPU chips of one node lie, as libtpu is told."""

_LIBTPU_PORT = 8476
"""Where libtpu of replica 0 listens; each further replica one port up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What one replica has, to be applied in its own process before a backend is imported.

    - `name`: how log lines call it.
    - `device`: what it runs on, where the options said auto.
    - `cores`: CPUs that its threads run on; none: any.
    - `environment`: variables that show its devices, and no others, to their driver.
    - `memory_share`: of what memory the device has, where replicas share one: all of them on a CPU.
    """

    name: str
    device: Device
    cores: tuple[int, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    memory_share: float = 1.0

    def apply(self) -> None:
        """Gives this process what the replica has."""
        os.environ.update(self.environment)
        if self.cores and sys.platform == "linux":
            # Later threads inherit it; those of numpy's BLAS have been there since its import.
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), self.cores)

    def options(self, config: EngineConfig) -> EngineConfig:
        """The replica's own options: one engine, on its device, with its share of memory."""
        share = config.mem_fraction_static * self.memory_share
        return config.model_copy(update={"device": self.device, "mem_fraction_static": share, "dp_size": 1})

    def __str__(self) -> str:
        if self.environment:
            return f"{self.name}: {' '.join('='.join(pair) for pair in self.environment)}"
        return f"{self.name}: CPU cores {','.join(map(str, self.cores)) or 'any'}"


def place_replicas(config: EngineConfig, count: int) -> list[Placement]:
    """Where each of `count` replicas runs: GPUs and TPU chips by number, `tp_size` to a replica; CPU cores in equal
    parts.

    **Raises:** `ConfigError` for more replicas than the machine has devices for, naming both.
    """
    if config.nnodes > 1:
        raise ConfigError(
            f"dp_size {count} starts replicas on this machine only, so nnodes must be 1, got {config.nnodes}: start a "
            "server for each replica, and one with --connect in front of them"
        )
    match _device(config.device):
        case Device.CUDA:
            return _on_gpus(config.tp_size, count)
        case Device.TPU:
            return _on_chips(config.tp_size, count)
    return _on_cores(count)


def _device(wanted: Device) -> Device:
    if wanted is not Device.AUTO:
        return wanted
    return Device.TPU if has_tpu() else Device.CUDA if has_cuda_gpu() else Device.CPU


def _on_cores(count: int) -> list[Placement]:
    cores = cpu_cores()
    if count > len(cores):
        raise ConfigError(f"dp_size {count} needs a CPU core for each replica; this process may use {len(cores)}")
    bounds = [len(cores) * number // count for number in range(count + 1)]
    return [
        Placement(
            name=f"replica {number}",
            device=Device.CPU,
            cores=tuple(cores[bounds[number] : bounds[number + 1]]),
            memory_share=1 / count,
        )
        for number in range(count)
    ]


def _on_gpus(tp_size: int, count: int) -> list[Placement]:
    listed = VisibleDevices().cuda_visible_devices
    gpus = _listed(listed) if listed is not None else [str(number) for number in range(num_cuda_gpus())]
    if count * tp_size > len(gpus):
        where = "this machine has" if listed is None else f"CUDA_VISIBLE_DEVICES={listed} shows"
        raise ConfigError(
            f"dp_size {count} with tp_size {tp_size} needs {count * tp_size} GPUs, and {where} {len(gpus)}"
        )
    return [
        Placement(
            name=f"replica {number}",
            device=Device.CUDA,
            environment=(("CUDA_VISIBLE_DEVICES", ",".join(_part(gpus, number, tp_size))),),
        )
        for number in range(count)
    ]


def _on_chips(tp_size: int, count: int) -> list[Placement]:
    listed = VisibleDevices().tpu_visible_chips
    chips = _listed(listed) if listed is not None else [str(number) for number in range(num_tpu_chips())]
    each = -(-tp_size // devices_per_tpu_chip())
    if each not in _CHIP_BOUNDS:
        raise ConfigError(
            f"tp_size {tp_size} needs {each} TPU chips for each of {count} replicas; "
            f"a replica may have {', '.join(map(str, _CHIP_BOUNDS))} of a node's chips"
        )
    if count * each > len(chips):
        where = "this machine has" if listed is None else f"TPU_VISIBLE_CHIPS={listed} shows"
        raise ConfigError(
            f"dp_size {count} with tp_size {tp_size} needs {count * each} TPU chips, and {where} {len(chips)}"
        )
    return [
        Placement(
            name=f"replica {number}",
            device=Device.TPU,
            environment=_chip_environment(_part(chips, number, each), _LIBTPU_PORT + number),
        )
        for number in range(count)
    ]


def separate_slice(chips: int) -> Placement:
    """One replica on all chips of a node whose slice has other nodes: to libtpu the node is a slice by itself.

    **Raises:** `ConfigError` for a number of chips that no node has.
    """
    if chips not in _CHIP_BOUNDS:
        raise ConfigError(f"a node has {', '.join(map(str, _CHIP_BOUNDS))} TPU chips, got {chips}")
    environment = _chip_environment([str(number) for number in range(chips)], _LIBTPU_PORT)
    return Placement(name="this node", device=Device.TPU, environment=environment)


def _chip_environment(chips: Sequence[str], port: int) -> tuple[tuple[str, str], ...]:
    """libtpu in this process is a slice of its own, of these chips alone."""
    return (
        ("TPU_VISIBLE_CHIPS", ",".join(chips)),
        ("TPU_CHIPS_PER_PROCESS_BOUNDS", _CHIP_BOUNDS[len(chips)]),
        ("TPU_PROCESS_BOUNDS", "1,1,1"),
        ("TPU_PROCESS_ADDRESSES", f"localhost:{port}"),
        ("TPU_PROCESS_PORT", str(port)),
        ("CLOUD_TPU_TASK_ID", "0"),
        # Those of GKE name the other nodes of the slice.
        ("TPU_WORKER_ID", "0"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
    )


def _part(devices: Sequence[str], number: int, size: int) -> Sequence[str]:
    return devices[number * size : (number + 1) * size]


def _listed(text: str) -> list[str]:
    """Devices of a list with commas. As CUDA reads it, -1 and what comes after it do not count."""
    names = [name.strip() for name in text.split(",")]
    if "-1" in names:
        names = names[: names.index("-1")]
    return [name for name in names if name]
