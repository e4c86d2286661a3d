"""Random weights for a config, to measure and test without a download."""

from __future__ import annotations

import zlib

import ml_dtypes
import numpy as np

from sglang_jax.architectures.manifest import manifest_of
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint.encoding import Encoding
from sglang_jax.checkpoint.group_blocks import Scales
from sglang_jax.checkpoint.grouped_experts import MXFP4, blocks_of_experts
from sglang_jax.checkpoint.grouped_tensors import GroupLayout, GroupScheme
from sglang_jax.checkpoint.quantization import Quantization
from sglang_jax.checkpoint.reader import Array, Index, Role, whole_index
from sglang_jax.checkpoint.stored_quantization import StoredQuantization
from sglang_jax.errors import CheckpointError

_POOL_SIZE = 1_048_573
"""A prime, so that no row length divides it and the rows of a matrix differ."""

_WEIGHT = ".weight"
_SCALES_OF = {
    GroupLayout.MXFP4: Scales.POWER_OF_TWO,
    GroupLayout.NVFP4: Scales.FLOAT32,
    GroupLayout.NVFP4_MODELOPT: Scales.FLOAT32,
}
_SCALE = 0.02
"""Standard deviation of matrices and biases, the usual initialisation of these models."""


class DummyReader:
    """Random tensors for `config`: norms multiply by 1, the others are normal with standard deviation 0.02.

    A tensor depends only on `(seed, name, shape)`. Its values repeat one pool of noise, from a start that depends on
    the name: drawing billions of values would take minutes. They are float32, or bfloat16 if the config says so.
    Matrices that `stored` describes as quantised have an encoding.
    """

    def __init__(self, config: ModelConfig, seed: int, stored: StoredQuantization | None = None) -> None:
        manifest = manifest_of(config)
        self._stored = stored
        tensors = {name.part: spec.tensor for name, spec in manifest.specs.items() if name.layer is None}
        self._embedding = tensors[Part.EMBEDDING]
        self._routers = {spec.tensor for name, spec in manifest.specs.items() if name.part is Part.ROUTER}
        by_tensors = None if stored is None else stored.by_tensors
        self._experts: frozenset[str] = frozenset()
        if by_tensors is not None and by_tensors.layout is GroupLayout.MXFP4_EXPERTS:
            self._experts = blocks_of_experts(manifest)
        self._shapes = manifest.tensors(self._experts)
        self._scales = {spec.tensor: 1.0 - spec.offset for spec in manifest.specs.values() if spec.is_scale}
        self._seed = seed
        noise = np.random.default_rng(seed).standard_normal(_POOL_SIZE, dtype=np.float32) * np.float32(_SCALE)
        self._pool: Array = noise.astype(ml_dtypes.bfloat16) if config.dtype == "bfloat16" else noise

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise CheckpointError(f"the model has no tensor {name}")
        return self._shapes[name]

    def read(self, name: str, index: Index | None = None) -> Array:
        shape = self.shape(name)
        selected = whole_index(shape, index)
        if name in self._scales:
            return np.full(shape, self._scales[name], dtype=self._pool.dtype)[selected]
        start = zlib.crc32(f"{self._seed}/{name}".encode()) % _POOL_SIZE
        columns = int(np.prod(shape[1:]))
        first, last, _ = selected[0].indices(shape[0])
        # Only the selected rows are filled, from their position in the repeated pool.
        begin = (start + first * columns) % _POOL_SIZE
        rows = max(last - first, 0)
        values = self._repeat(begin, rows * columns).reshape(rows, *shape[1:])
        return values[(slice(None), *selected[1:])]

    def encoding(self, name: str) -> Encoding | None:
        if name in self._experts:
            return Encoding(MXFP4)
        if self._stored is None or not name.endswith(_WEIGHT) or len(self.shape(name)) != 2:
            return None
        if name in self._routers:
            return None
        scheme = self._stored.scheme(name.removesuffix(_WEIGHT), "Embedding" if name == self._embedding else "Linear")
        if isinstance(scheme, GroupScheme):
            kind = scheme.blocks(self.shape(name)[1], _SCALES_OF.get(scheme.layout, Scales.BFLOAT16))
            return None if kind is None else Encoding(kind)
        return None if scheme is None else scheme.encoding

    def in_bfloat16(self, name: str) -> bool:
        return bool(self._pool.dtype == ml_dtypes.bfloat16)

    def read_array(self, name: str, role: Role, index: Index | None = None) -> Array:
        encoding = self.encoding(name)
        if encoding is None or role not in encoding.roles:
            raise ValueError(f"{name} is stored without {role.value}")
        *rows, columns = whole_index(self.shape(name), index)
        if role is Role.INPUT_SCALE:
            return np.ones(len(range(*rows[0].indices(self.shape(name)[0]))), np.float32)
        found = Quantization(encoding).arrays(self.read(name, tuple(rows)), (role,))[role]
        if role is not Role.VALUES:
            return found
        places = (*[slice(None)] * len(rows), encoding.places(columns, self.shape(name)[-1]))
        return found[places]

    def _repeat(self, begin: int, count: int) -> Array:
        """`count` values of the repeated pool from `begin` on, by plain copies: 16 GB in seconds."""
        values = np.empty(count, dtype=self._pool.dtype)
        filled = min(count, _POOL_SIZE - begin)
        values[:filled] = self._pool[begin : begin + filled]
        while filled < count:
            length = min(count - filled, _POOL_SIZE)
            values[filled : filled + length] = self._pool[:length]
            filled += length
        return values
