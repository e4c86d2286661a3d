"""Scales for int8 that JAX calibrates on a model; imports no torch, for processes of several devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.checkpoint import Checkpoint, open_checkpoint
from sglang_jax.checkpoint.reader import Array, Index, PlainReader
from sglang_jax.jax_runner.kv_scales import calibrate_kv_scales
from sglang_jax.jax_runner.parallel import TensorParallel
from sglang_jax.jax_runner.weights import load_weights
from sglang_jax.layers.sharding import make_mesh
from sglang_jax.models import AttentionImplementation, build_model


class Replaced(PlainReader):
    """A checkpoint's reader, with other numbers in one tensor."""

    def __init__(self, checkpoint: Checkpoint, name: str, rows: slice, number: float) -> None:
        assert checkpoint.reader is not None
        self._reader = checkpoint.reader
        self._name = name
        self._value = np.array(self._reader.read(name))
        self._value[rows] = number

    def names(self) -> frozenset[str]:
        return self._reader.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._reader.shape(name)

    def read(self, name: str, index: Index | None = None) -> Array:
        return self._value[index or ()] if name == self._name else self._reader.read(name, index)


def calibrated(
    folder: Path, devices: int = 1, *, page_size: int = 16, dtype: str = "float32", change: Sequence[Any] = ()
) -> NDArray[np.float32]:
    """Scales `[layers, kv_heads, 2]` of the model's kv heads; `change`: arguments of `Replaced`."""
    checkpoint = open_checkpoint(str(folder))
    reader = Replaced(checkpoint, *change) if change else checkpoint.reader
    assert reader is not None
    parallel = TensorParallel.of(checkpoint.config, Parallelism(devices))
    mesh = make_mesh(jax.devices()[:devices])
    kind = jnp.dtype(dtype)
    attention = AttentionImplementation.XLA
    model = build_model(parallel.config, dtype=kind, attention=attention, kv_dtype=jnp.dtype(jnp.int8))
    load_weights(model, reader, checkpoint.config, mesh)
    if devices == 1:
        model.repack()
    calibrate_kv_scales(model, parallel, mesh, dtype=kind, page_size=page_size)
    found = [layer.attention.kv_scales.get_value() for layer in model.layers if layer.attention is not None]
    assert all(scales.dtype == jnp.float32 for scales in found)
    return np.stack([np.asarray(scales) for scales in found])
