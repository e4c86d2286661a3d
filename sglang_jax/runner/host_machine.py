"""What this machine has, told without any framework: memory, the CPU's features, accelerators."""

from __future__ import annotations

from pathlib import Path

import psutil

_CONTAINER = Path("/sys/fs/cgroup")
_CPU_FEATURES = Path("/proc/cpuinfo")
_DEVICES = Path("/dev")
_PCI_DEVICES = Path("/sys/bus/pci/devices")

_BFLOAT16_FEATURES = ("avx512_bf16", "amx_bf16")
_GOOGLE = "0x1ae0"
"""PCI vendor of TPUs, and of a virtual network card of Google's, which is of another class."""
_NETWORK_CLASS = "0x02"


def available_host_memory() -> int:
    """Bytes that a process can still take, within a container's limit."""
    available = int(psutil.virtual_memory().available)
    limit_file = _CONTAINER / "memory.max"
    if not limit_file.exists() or (limit := limit_file.read_text().strip()) == "max":
        return available
    usage = int((_CONTAINER / "memory.current").read_text())
    statistics = dict(line.split() for line in (_CONTAINER / "memory.stat").read_text().splitlines())
    return min(available, int(limit) - usage + int(statistics["inactive_file"]))


def cpu_multiplies_bfloat16() -> bool:
    """The CPU has instructions for products of bfloat16; without them bfloat16 is slower than float32."""
    if not _CPU_FEATURES.exists():
        return False
    features = _CPU_FEATURES.read_text().split()
    return any(feature in features for feature in _BFLOAT16_FEATURES)


def has_tpu() -> bool:
    """The machine has a TPU chip, whether or not software for it is installed."""
    return any(_is_tpu(device) for device in _children(_PCI_DEVICES))


def has_cuda_gpu() -> bool:
    """The machine has an NVIDIA GPU whose driver is loaded (`/dev/nvidia0` and so on; `/dev/dxg` in WSL)."""
    names = {device.name for device in _children(_DEVICES)}
    return "dxg" in names or any(name.startswith("nvidia") and name[6:].isdigit() for name in names)


def _is_tpu(device: Path) -> bool:
    vendor, kind = device / "vendor", device / "class"
    if not (vendor.exists() and kind.exists()):
        return False
    return vendor.read_text().strip() == _GOOGLE and not kind.read_text().startswith(_NETWORK_CLASS)


def _children(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.exists() else []
