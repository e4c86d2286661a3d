"""Finds the memory, CPU features and accelerators of this machine, without any framework."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil

_CONTAINER = Path("/sys/fs/cgroup")
_CPU_FEATURES = Path("/proc/cpuinfo")
_CPUS = Path("/sys/devices/system/cpu")
_DEVICES = Path("/dev")
_CUDA_DRIVER = Path("/proc/driver/nvidia/version")
_PCI_DEVICES = Path("/sys/bus/pci/devices")

_BFLOAT16_FEATURES = ("avx512_bf16", "amx_bf16")
_GOOGLE = "0x1ae0"
"""PCI vendor of TPUs, and of a virtual network card of Google, which has another class."""
_NETWORK_CLASS = "0x02"
_CHIPS_OF_TWO_DEVICES = frozenset({"0x0076"})
"""PCI device numbers of TPUs whose chips are two devices each for JAX (tpu7x)."""


def available_host_memory() -> int:
    """Bytes that a process can still allocate, within a container's limit."""
    available = int(psutil.virtual_memory().available)
    limit_file = _CONTAINER / "memory.max"
    if not limit_file.exists() or (limit := limit_file.read_text().strip()) == "max":
        return available
    usage = int((_CONTAINER / "memory.current").read_text())
    statistics = dict(line.split() for line in (_CONTAINER / "memory.stat").read_text().splitlines())
    return min(available, int(limit) - usage + int(statistics["inactive_file"]))


def cpu_multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16 products. Without them, bfloat16 is slower than float32."""
    return any(feature in _cpu_features() for feature in _BFLOAT16_FEATURES)


def cpu_multiplies_bfloat16_tiles() -> bool:
    return "amx_bf16" in _cpu_features()


def _cpu_features() -> frozenset[str]:
    return frozenset(_CPU_FEATURES.read_text().split()) if _CPU_FEATURES.exists() else frozenset()


def cpu_cores() -> list[int]:
    """CPUs that this process may use, ordered by socket and core. Their numbers do not show this order: often the
    second thread of core 0 comes after the first threads of all cores."""
    if sys.platform != "linux":
        return list(range(psutil.cpu_count() or 1))
    return sorted(os.sched_getaffinity(0), key=lambda cpu: (*_place_of(cpu), cpu))


def num_tpu_chips() -> int:
    """TPU chips of this machine, whether or not software for them is installed."""
    return sum(_is_tpu(device) for device in _children(_PCI_DEVICES))


def devices_per_tpu_chip() -> int:
    """JAX devices per TPU chip of this machine."""
    numbers = {(device / "device").read_text().strip() for device in _children(_PCI_DEVICES) if _is_tpu(device)}
    return 2 if numbers & _CHIPS_OF_TWO_DEVICES else 1


def num_cuda_gpus() -> int:
    """NVIDIA GPUs with a loaded driver (`/dev/nvidia0` and so on). In WSL (`/dev/dxg`), which does not show their
    number, 1."""
    return len(cuda_device_files()) or int((_DEVICES / "dxg").exists())


def cuda_device_files() -> list[Path]:
    """`/dev/nvidia0` and so on, one per NVIDIA GPU with a loaded driver; none in WSL."""
    found = (device for device in _children(_DEVICES) if device.name.startswith("nvidia"))
    return sorted(device for device in found if device.name[len("nvidia") :].isdigit())


def cuda_driver() -> str | None:
    """The version of the loaded NVIDIA driver, such as `535.104.05`; None if it is unknown."""
    text = _CUDA_DRIVER.read_text() if _CUDA_DRIVER.exists() else ""
    return next((word for word in text.split() if word[0].isdigit() and "." in word), None)


def has_tpu() -> bool:
    return num_tpu_chips() > 0


def has_cuda_gpu() -> bool:
    return num_cuda_gpus() > 0


def _place_of(cpu: int) -> tuple[int, int]:
    """Socket and core of a CPU. If the kernel does not show them, each CPU is a core."""
    topology = _CPUS / f"cpu{cpu}" / "topology"
    socket, core = topology / "physical_package_id", topology / "core_id"
    if not (socket.exists() and core.exists()):
        return 0, cpu
    return int(socket.read_text()), int(core.read_text())


def _is_tpu(device: Path) -> bool:
    vendor, kind = device / "vendor", device / "class"
    if not (vendor.exists() and kind.exists()):
        return False
    return vendor.read_text().strip() == _GOOGLE and not kind.read_text().startswith(_NETWORK_CLASS)


def _children(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.exists() else []
