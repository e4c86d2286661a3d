"""Which device to run on, how much memory it has, and which dtype suits it."""

from __future__ import annotations

import torch

from sglang_jax.config import Device, Dtype
from sglang_jax.errors import ConfigError, how_to_install
from sglang_jax.runner.host_machine import available_host_memory, cpu_multiplies_bfloat16

_LEAST_CAPABILITY = (8, 0)
"""Ampere: the first GPUs with bfloat16 in their matrix units."""


def select_device(wanted: Device, rank: int = 0) -> torch.device:
    """The device of a tensor-parallel rank; `auto` is a CUDA GPU where torch sees one, else the CPU.

    **Raises:** `ConfigError` naming what torch sees.
    """
    if wanted is Device.TPU:
        raise ConfigError("device tpu was asked for, and the torch backend runs on cuda or cpu: choose --backend jax")
    if wanted is Device.CPU or (wanted is Device.AUTO and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device cuda was asked for, but torch {torch.__version__} sees no CUDA GPU. Install a CUDA build of torch "
            f"({how_to_install('cuda')}) and check nvidia-smi, or choose --device cpu"
        )
    if rank >= torch.cuda.device_count():
        raise ConfigError(f"tp_size needs GPU number {rank}, and torch sees {torch.cuda.device_count()}")
    device = torch.device("cuda", rank)
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        name, found = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        raise ConfigError(f"{name} has compute capability {found[0]}.{found[1]}; at least 8.0 (Ampere) is needed")
    return device


def select_dtype(wanted: Dtype, device: torch.device) -> torch.dtype:
    """The type of weights, activations and KV: `auto` is bfloat16, but float32 on a CPU without bfloat16 products."""
    match wanted:
        case Dtype.BFLOAT16:
            return torch.bfloat16
        case Dtype.FLOAT16:
            return torch.float16
        case Dtype.FLOAT32:
            return torch.float32
        case Dtype.AUTO:
            widens = device.type == "cpu" and not cpu_multiplies_bfloat16()
            return torch.float32 if widens else torch.bfloat16


def available_memory(device: torch.device) -> int:
    """Bytes of the device's memory that nothing uses yet; of the host's for a CPU, within a container's limit."""
    if device.type == "cpu":
        return available_host_memory()
    free, _ = torch.cuda.mem_get_info(device)
    # What torch's allocator holds and does not use is as good as free.
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def device_name(device: torch.device) -> str:
    """For reports: `cuda (NVIDIA H100 80GB HBM3)`, `cpu (2 threads)`."""
    if device.type == "cpu":
        return f"cpu ({torch.get_num_threads()} threads)"
    return f"cuda ({torch.cuda.get_device_name(device)})"
