"""Chooses devices and their dtype, and finds their memory."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp

from sglang_jax.config import Device, Dtype
from sglang_jax.errors import ConfigError
from sglang_jax.runner.this_machine import available_host_memory, cpu_multiplies_bfloat16


def select_devices(wanted: Device, count: int) -> list[jax.Device]:
    """The first `count` devices of the wanted platform (with `auto`, JAX chooses it), the first of which in this
    process becomes its default device. Raises `ConfigError` naming the devices that JAX finds."""
    # Without libtpu, JAX logs at INFO that it could not be loaded, which looks like a failed start.
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
    if wanted is Device.CPU:
        # Set before JAX initialises, this keeps it from claiming accelerators.
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
    return select_devices(wanted, 1)[0]


def select_dtype(wanted: Dtype, device: jax.Device) -> jnp.dtype:
    """The dtype of weights, activations and KV. `auto` is bfloat16, but float32 on a CPU without bfloat16 products,
    where XLA would widen every weight in every step. On a CPU with them, bfloat16 decode steps of a 135M model take 40
    to 60 % of their time in float32. Raises `ConfigError` for float16."""
    if wanted is Dtype.FLOAT16:
        raise ConfigError("the JAX backend computes in bfloat16 or float32, not in float16: choose --dtype bfloat16")
    if wanted is not Dtype.AUTO:
        return jnp.dtype(wanted.value)
    widens = device.platform == "cpu" and not cpu_multiplies_bfloat16()
    return jnp.dtype(jnp.float32 if widens else jnp.bfloat16)


def available_memory(device: jax.Device) -> int:
    """Free bytes of the device's memory; for a CPU, of the machine's memory, within a container's limit."""
    stats = device.memory_stats()
    if stats is not None:
        return int(stats["bytes_limit"]) - int(stats["bytes_in_use"])
    return available_host_memory()
