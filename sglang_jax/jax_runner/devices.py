"""Which device to run on, how much memory it has, and which dtype suits it."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp

from sglang_jax.config import Device, Dtype
from sglang_jax.errors import ConfigError
from sglang_jax.runner.this_machine import available_host_memory, cpu_multiplies_bfloat16


def select_devices(wanted: Device, count: int) -> list[jax.Device]:
    """The first `count` devices of the wanted platform; `auto` leaves the platform to JAX. The first that belongs to
    this process becomes its default.

    **Raises:** `ConfigError` naming what JAX sees.
    """
    # Where libtpu is not installed JAX logs at INFO that it could not be loaded, which reads like a failed start.
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
    if wanted is Device.CPU:
        # Asked for before JAX has looked around, this keeps it from claiming accelerators.
        jax.config.update("jax_platforms", "cpu")
    try:
        devices = jax.devices(None if wanted is Device.AUTO else wanted.value)
    except RuntimeError as error:
        seen = ", ".join(sorted({device.platform for device in jax.devices()}))
        raise ConfigError(
            f"--device {wanted.value} was given, but JAX sees only: {seen}. "
            f"Install JAX for {wanted.value}, or choose another --device"
        ) from error
    if count > len(devices):
        raise ConfigError(f"tp_size {count} needs {count} devices; found {len(devices)} ({devices[0].platform})")
    own = [device for device in devices[:count] if device.process_index == jax.process_index()]
    if not own:
        raise ConfigError(
            f"tp_size {count} leaves the devices of node {jax.process_index()} idle: raise tp_size to {len(devices)}, "
            "or start fewer nodes"
        )
    jax.config.update("jax_default_device", own[0])
    return devices[:count]


def select_device(wanted: Device) -> jax.Device:
    """The first device: see `select_devices`."""
    return select_devices(wanted, 1)[0]


def select_dtype(wanted: Dtype, device: jax.Device) -> jnp.dtype:
    """The type of weights, activations and KV.

    `auto` is bfloat16, but float32 on a CPU that cannot multiply bfloat16: XLA would widen every weight at every step.
    Where a CPU can, decode steps of a 135M model take 40 to 60 % of the time that they take in float32.
    """
    if wanted is Dtype.FLOAT16:
        raise ConfigError("the JAX backend computes in bfloat16 or float32, not in float16: choose --dtype bfloat16")
    if wanted is not Dtype.AUTO:
        return jnp.dtype(wanted.value)
    widens = device.platform == "cpu" and not cpu_multiplies_bfloat16()
    return jnp.dtype(jnp.float32 if widens else jnp.bfloat16)


def available_memory(device: jax.Device) -> int:
    """Bytes of the device's memory that nothing uses yet; of the machine's for a CPU, within a container's limit."""
    stats = device.memory_stats()
    if stats is not None:
        return int(stats["bytes_limit"]) - int(stats["bytes_in_use"])
    return available_host_memory()
