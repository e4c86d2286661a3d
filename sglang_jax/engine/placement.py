"""Assigns CPU cores, GPUs or TPU chips to replicas."""

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
"""libtpu's grid of a node's TPU chips, by their number."""

_LIBTPU_PORT = 8476
"""The port of replica 0's libtpu; each further replica uses the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A replica's part of the machine, to be applied in its process before a backend is imported.

    - `name`: its name in log lines; `device`: the kind of device, never auto.
    - `cores`: CPUs that its threads run on; empty: any.
    - `environment`: variables that restrict the driver to its devices.
    - `memory_share`: its share of memory, below 1 only for replicas on one CPU.
    """

    name: str
    device: Device
    cores: tuple[int, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    memory_share: float = 1.0

    def apply(self) -> None:
        os.environ.update(self.environment)
        if self.cores and sys.platform == "linux":
            # New threads inherit the affinity; numpy's BLAS threads have existed since its import.
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), self.cores)

    def options(self, config: EngineConfig) -> EngineConfig:
        """Returns the replica's options: one engine, on its device, with its share of memory."""
        share = config.mem_fraction_static * self.memory_share
        return config.model_copy(update={"device": self.device, "mem_fraction_static": share, "dp_size": 1})

    def __str__(self) -> str:
        if self.environment:
            return f"{self.name}: {' '.join('='.join(pair) for pair in self.environment)}"
        return f"{self.name}: CPU cores {','.join(map(str, self.cores)) or 'any'}"


def place_replicas(config: EngineConfig, count: int) -> list[Placement]:
    """Assigns `tp_size` GPUs or TPU chips, by number, or equal numbers of CPU cores to each of `count` replicas. Raises
    `ConfigError` for too few devices, an impossible number of TPU chips, or several nodes."""
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
    gpus = _parse_devices(listed) if listed is not None else [str(number) for number in range(num_cuda_gpus())]
    if count * tp_size > len(gpus):
        where = "this machine has" if listed is None else f"CUDA_VISIBLE_DEVICES={listed} shows"
        raise ConfigError(
            f"dp_size {count} with tp_size {tp_size} needs {count * tp_size} GPUs, and {where} {len(gpus)}"
        )
    return [
        Placement(
            name=f"replica {number}",
            device=Device.CUDA,
            environment=(("CUDA_VISIBLE_DEVICES", ",".join(_slice_of(gpus, number, tp_size))),),
        )
        for number in range(count)
    ]


def _on_chips(tp_size: int, count: int) -> list[Placement]:
    listed = VisibleDevices().tpu_visible_chips
    chips = _parse_devices(listed) if listed is not None else [str(number) for number in range(num_tpu_chips())]
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
            environment=_chip_environment(_slice_of(chips, number, each), _LIBTPU_PORT + number),
        )
        for number in range(count)
    ]


def separate_slice(chips: int) -> Placement:
    """Places one replica on all chips of a node of a larger slice, which libtpu then treats as a separate slice. Raises
    `ConfigError` for a number of chips that no node has."""
    if chips not in _CHIP_BOUNDS:
        raise ConfigError(f"a node has {', '.join(map(str, _CHIP_BOUNDS))} TPU chips, got {chips}")
    environment = _chip_environment([str(number) for number in range(chips)], _LIBTPU_PORT)
    return Placement(name="this node", device=Device.TPU, environment=environment)


def _chip_environment(chips: Sequence[str], port: int) -> tuple[tuple[str, str], ...]:
    return (
        ("TPU_VISIBLE_CHIPS", ",".join(chips)),
        ("TPU_CHIPS_PER_PROCESS_BOUNDS", _CHIP_BOUNDS[len(chips)]),
        ("TPU_PROCESS_BOUNDS", "1,1,1"),
        ("TPU_PROCESS_ADDRESSES", f"localhost:{port}"),
        ("TPU_PROCESS_PORT", str(port)),
        ("CLOUD_TPU_TASK_ID", "0"),
        # GKE's values name the other nodes of the slice.
        ("TPU_WORKER_ID", "0"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
    )


def _slice_of(devices: Sequence[str], number: int, size: int) -> Sequence[str]:
    return devices[number * size : (number + 1) * size]


def _parse_devices(text: str) -> list[str]:
    """Splits a list of devices at commas. Like CUDA, ignores -1 and everything after it."""
    names = [name.strip() for name in text.split(",")]
    if "-1" in names:
        names = names[: names.index("-1")]
    return [name for name in names if name]
