"""The inputs of the choice of block sizes: the chip, and the shape of attention on one device."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import jax
import jax.numpy as jnp

from sglang_jax.errors import ConfigError
from sglang_jax.kernels.kv_storage import LANES, page_shape

MIB = 1 << 20


class Chip(StrEnum):
    """TPU generations, and `INTERPRETER`, in which tests run kernels."""

    V4 = "v4"
    V5E = "v5e"
    V5P = "v5p"
    V6E = "v6e"
    TPU7X = "tpu7x"
    INTERPRETER = "interpreter"


_CHIPS = {
    "TPU v4": Chip.V4,
    "TPU v5 lite": Chip.V5E,
    "TPU v5e": Chip.V5E,
    "TPU v5": Chip.V5P,
    "TPU v5p": Chip.V5P,
    "TPU v6 lite": Chip.V6E,
    "TPU v6e": Chip.V6E,
    "TPU7": Chip.TPU7X,
    "TPU7x": Chip.TPU7X,
    "cpu": Chip.INTERPRETER,
}
"""Chips by the device kinds that JAX reports."""

VMEM_LIMITS = {
    Chip.V4: 14 * MIB,
    Chip.V5E: 96 * MIB,
    Chip.V5P: 48 * MIB,
    Chip.V6E: 96 * MIB,
    Chip.TPU7X: 48 * MIB,
    Chip.INTERPRETER: 96 * MIB,
}
"""Bytes of vector memory that a kernel may take: three quarters of a chip's 16, 128 or 64 MiB; XLA has the rest."""


CORES = {Chip.V4: 2, Chip.V5P: 2}
"""Tensor cores per device, for chips with several: they share the programs of a kernel."""


def chip_of(device_kind: str) -> Chip:
    """The chip of a JAX device kind. Raises `ConfigError` for one that the kernels do not support."""
    if device_kind not in _CHIPS:
        known = ", ".join(kind for kind, chip in _CHIPS.items() if chip is not Chip.INTERPRETER)
        raise ConfigError(
            f"the TPU attention kernels support {known}, and the device is {device_kind!r}: "
            "choose --attention-backend xla"
        )
    return _CHIPS[device_kind]


def known_chip(device_kind: str) -> Chip | None:
    """The chip of a JAX device kind, or None if the kernels do not support it."""
    return _CHIPS.get(device_kind)


def current_chip() -> Chip:
    """The compilation's target: the chip of the current mesh, or of the default device. Raises as `chip_of`."""
    return chip_of(_device_kind())


def current_vmem_limit() -> int | None:
    """Bytes of vector memory for a kernel on the target TPU; None if the target is not a known TPU."""
    chip = _CHIPS.get(_device_kind(), Chip.INTERPRETER)
    return None if chip is Chip.INTERPRETER else VMEM_LIMITS[chip]


def _device_kind() -> str:
    described = jax.sharding.get_abstract_mesh().abstract_device
    return described.device_kind if described is not None else jax.devices()[0].device_kind


@dataclass(frozen=True, slots=True)
class Shape:
    """Attention on one device: its numbers of heads, the `parts`, `lanes` and type (`storage`) of its pages."""

    chip: Chip
    heads: int
    kv_heads: int
    parts: int
    lanes: int
    page_size: int
    storage: str

    @classmethod
    def of(cls, chip: Chip, heads: int, kv_heads: int, head_dim: int, page_size: int, storage: str) -> Shape:
        _, _, parts, _, lanes = page_shape(1, kv_heads, page_size, head_dim, tiled=True)
        return cls(chip, heads, kv_heads, parts, lanes, page_size, storage)

    @property
    def head_dim(self) -> int:
        """The largest head size that has pages of this shape."""
        return self.lanes if self.parts == 2 or self.shared else self.lanes // 2

    @property
    def shared(self) -> bool:
        """Whether values are the keys: one part, with more lanes than small heads have."""
        return self.parts == 1 and self.lanes > LANES

    @property
    def bytes_per_key(self) -> int:
        """Bytes of one token in all kv heads."""
        return self.kv_heads * self.parts * self.lanes * jnp.dtype(self.storage).itemsize
