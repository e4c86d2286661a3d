"""Chooses the device and its dtype, and finds out how much memory it has."""

from __future__ import annotations

import logging
import os

import torch

from sglang_jax.config import Device, Dtype, VisibleDevices
from sglang_jax.errors import ConfigError, how_to_install
from sglang_jax.runner.this_machine import (
    available_host_memory,
    cpu_multiplies_bfloat16,
    cuda_device_files,
    cuda_driver,
    has_cuda_gpu,
)

logger = logging.getLogger(__name__)

_MIN_CAPABILITY = (8, 0)
"""Ampere: the first GPUs with bfloat16 in their matrix units."""


def select_device(wanted: Device, rank: int = 0) -> torch.device:
    """The device of a tensor-parallel rank; `auto` is a CUDA GPU if the machine has one, else the CPU. Raises
    `ConfigError` with the reason if torch cannot use the GPU, without falling back to the CPU: a user with a GPU does
    not expect to serve from the CPU."""
    if wanted is Device.TPU:
        raise ConfigError(
            "--device tpu is not supported by the torch backend, which runs on cuda or cpu: choose --backend jax"
        )
    if wanted is Device.CPU:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if wanted is Device.AUTO and (_hides_gpus() or not has_cuda_gpu()):
            return torch.device("cpu")
        reason = _why_no_gpu()
        if wanted is Device.AUTO and not cuda_device_files():
            # WSL does not report the GPU's vendor.
            logger.warning("Running on the CPU. If this machine has an NVIDIA GPU, torch cannot use it: %s", reason)
            return torch.device("cpu")
        asked = "--device cuda was given" if wanted is Device.CUDA else "this machine has an NVIDIA GPU"
        raise ConfigError(
            f"{asked}, but torch {torch.__version__} sees no CUDA GPU: {reason}; or choose --device cpu, which is slow"
        )
    if rank >= torch.cuda.device_count():
        raise ConfigError(f"tp_size needs GPU number {rank}, but torch sees only {torch.cuda.device_count()} GPUs")
    device = torch.device("cuda", rank)
    if torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        name, found = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        raise ConfigError(f"{name} has compute capability {found[0]}.{found[1]}; at least 8.0 (Ampere) is needed")
    return device


def _hides_gpus() -> bool:
    """Whether `CUDA_VISIBLE_DEVICES` hides all GPUs: if it is empty or starts with -1."""
    listed = VisibleDevices().cuda_visible_devices
    return listed is not None and listed.split(",")[0].strip() in ("", "-1")


def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        return f"it was built without CUDA. Install a CUDA build ({how_to_install('cuda')})"
    if _hides_gpus():
        return "CUDA_VISIBLE_DEVICES hides every GPU. Unset it"
    if not has_cuda_gpu():
        return "no NVIDIA driver is loaded (there is no /dev/nvidia0). Check nvidia-smi"
    files = cuda_device_files()
    denied = [file for file in files if not os.access(file, os.R_OK | os.W_OK)]
    if files and len(denied) == len(files):
        return (
            f"this user may not open {denied[0]}. Run as a user with access, or give the container access to its GPUs"
        )
    driver = cuda_driver() or "unknown"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return (
            f"CUDA {torch.version.cuda} does not work with driver {driver} ({error}). Install a newer "
            "driver, or a torch built for an older CUDA"
        )
    return f"CUDA {torch.version.cuda} finds no device with driver {driver}. Check nvidia-smi"


def select_dtype(wanted: Dtype, device: torch.device) -> torch.dtype:
    """The dtype of activations and KV, and of weights unless they stay as stored: `auto` is bfloat16, but float32 on a
    CPU without bfloat16 products."""
    match wanted:
        case Dtype.BFLOAT16:
            return torch.bfloat16
        case Dtype.FLOAT16:
            return torch.float16
        case Dtype.FLOAT32:
            return torch.float32
        case Dtype.AUTO:
            return torch.float32 if widens_bfloat16(device) else torch.bfloat16


def widens_bfloat16(device: torch.device) -> bool:
    """Whether the device is a CPU that does not multiply bfloat16: torch would widen every weight in every product."""
    return device.type == "cpu" and not cpu_multiplies_bfloat16()


def available_memory(device: torch.device) -> int:
    """Free bytes of the device's memory; of the host's for a CPU, within the container's limit."""
    if device.type == "cpu":
        return available_host_memory()
    free, _ = torch.cuda.mem_get_info(device)
    # Memory that torch's allocator has reserved but not allocated is free, too.
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def device_name(device: torch.device) -> str:
    """For reports: `cuda (NVIDIA H100 80GB HBM3)`, `cpu (2 threads)`."""
    if device.type == "cpu":
        return f"cpu ({torch.get_num_threads()} threads)"
    return f"cuda ({torch.cuda.get_device_name(device)})"
