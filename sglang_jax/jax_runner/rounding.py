"""Chooses the steps of a TPU that round activations to the 8 bits of a matrix."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from sglang_jax.architectures.manifest import manifest_of
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.checkpoint.encoding import ActivationScales, Encoding, ValueType
from sglang_jax.checkpoint.quantization import Encodings
from sglang_jax.config import EngineConfig, TpuActivations
from sglang_jax.errors import ConfigError
from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import Chip, known_chip
from sglang_jax.layers.rounded_rows import MinRoundedRows, never_rounded

logger = logging.getLogger(__name__)

MIN_ROWS = {
    (Chip.V6E, ValueType.INT8): 512,
    (Chip.TPU7X, ValueType.FLOAT8_E4M3): 512,
}
"""Minimum rows of a step in which products of 8 bits with 8 bits, including rounding, take less time than those with
widened weights: by the compiler's schedules, see `benchmarks/tpu_rounding_estimate.py` and docs/tpu.md. A chip without
a faster product of a type is not in the table."""


@dataclass(frozen=True)
class _Rounding:
    """A `MinRoundedRows` of a chip. `always`: also for matrices whose checkpoint has no rounded activations."""

    chip: Chip | None
    always: bool

    def __call__(self, encoding: Encoding) -> int | None:
        rounds = self.always or encoding.activations is not ActivationScales.NONE
        if self.chip is None or not rounds or not isinstance(encoding.values, ValueType):
            return None
        return MIN_ROWS.get((self.chip, encoding.values))


def rounding_of(config: EngineConfig, device: jax.Device, dtype: jnp.dtype) -> MinRoundedRows:
    """Which steps round activations, by the options, on a device with products in `dtype`. Raises `ConfigError` if the
    options ask for what these do not support."""
    wanted = config.tpu_activations
    if wanted is TpuActivations.ROUNDED:
        if dtype != jnp.bfloat16:
            raise ConfigError(f"tpu_activations rounded needs dtype bfloat16, got {dtype.name}: choose auto")
    elif wanted is TpuActivations.EXACT or device.platform != "tpu" or dtype != jnp.bfloat16 or config.batch_invariant:
        return never_rounded
    return _Rounding(known_chip(device.device_kind), always=wanted is TpuActivations.ROUNDED)


def describe_rounding(config: EngineConfig, model: ModelConfig, encodings: Encodings, rounding: MinRoundedRows) -> None:
    """Logs which steps round activations for matrices of a model. Raises `ConfigError` if the options ask for rounding
    and none does."""
    if rounding is never_rounded:
        return
    specs = manifest_of(model).specs.values()
    kept = {encodings(spec.name) for spec in specs if spec.is_matrix and not spec.places}  # none of experts
    rounded = {(each.value_type, rows) for each in kept if each and (rows := rounding(each)) is not None}
    if not rounded and config.tpu_activations is TpuActivations.ROUNDED:
        known = ", ".join(f"{values.value} on {chip.value}" for chip, values in MIN_ROWS)
        raise ConfigError(
            f"tpu_activations rounded: the model has no matrices with a scale per row that this TPU multiplies in 8 "
            f"bits ({known}): choose auto"
        )
    for values, rows in sorted(rounded, key=str):
        logger.info("Steps of %d tokens or more round activations to %s for matrices of it", rows, values.value)
