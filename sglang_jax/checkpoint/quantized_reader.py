"""Safetensors folders whose weights are stored in 8 bits with scales beside them.

`X.weight` is int8 or float8 `[out, in]`, `X.weight_scale` one number or `[out, 1]`, and `X.input_scale` one number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sglang_jax.architectures.manifest import manifest_of
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint.encoding import ActivationScales, Encoding, Stored, ValueType
from sglang_jax.checkpoint.hf_quantization import Quantization, Scheme
from sglang_jax.checkpoint.reader import Array, Index, Role, whole_index
from sglang_jax.checkpoint.safetensors_reader import SafetensorsReader
from sglang_jax.checkpoint.tensors import HARMLESS_PREFIX, listed
from sglang_jax.errors import CheckpointError

_WEIGHT, _SCALE, _INPUT_SCALE = ".weight", ".weight_scale", ".input_scale"
_ZERO_POINTS = (".weight_zero_point", ".input_zero_point", ".output_zero_point")

_DTYPES = {ValueType.INT8: np.dtype(np.int8), ValueType.FLOAT8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn)}


class QuantizedReader:
    """The tensors of a folder, without scales of weights and inputs. Weights in 8 bits have an encoding, and are read
    as float32; others stay as they are.

    **Raises:** `CheckpointError` naming the tensors, all or the first 500 of them, that are not as `quantization` says.
    Values of scales are checked when they are read.
    """

    def __init__(self, reader: SafetensorsReader, quantization: Quantization, config: ModelConfig) -> None:
        self._reader = reader
        self._stored = names = reader.names()
        self._names = frozenset(name for name in names if not name.endswith((_SCALE, _INPUT_SCALE)))
        specs = manifest_of(config).specs
        embedding = next(spec.tensor_of(names) for name, spec in specs.items() if name.part is Part.EMBEDDING)
        routers = {spec.tensor_of(names) for name, spec in specs.items() if name.part is Part.ROUTER}
        self._schemes: dict[str, Scheme] = {}
        for name in names:
            if name.endswith(_WEIGHT) and len(reader.shape(name)) == 2:
                scheme = quantization.scheme(name.removesuffix(_WEIGHT), "Embedding" if name == embedding else "Linear")
                # A router is a linear layer to some versions of the tools, and to others none.
                if scheme is not None and not (name in routers and reader.is_plain(name)):
                    self._schemes[name] = scheme
        faults = sorted(fault for name in names if not name.startswith(HARMLESS_PREFIX) for fault in self._faults(name))
        if faults:
            raise CheckpointError(
                f"the tensors are not those that {quantization.file} describes as quantised ({len(faults)} faults):"
                + listed(faults)
            )

    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._reader.shape(name)

    def read(self, name: str, index: Index | None = None) -> Array:
        """See `TensorReader.read`. Raises `CheckpointError` for scales that are not positive and finite."""
        if name not in self._schemes:
            return self._reader.read(name, index)
        roles = (Role.VALUES, Role.SCALES)
        arrays = {role: self.read_array(name, role, index) for role in roles}
        return Stored(self._schemes[name].encoding, arrays).widened()

    def encoding(self, name: str) -> Encoding | None:
        scheme = self._schemes.get(name)
        return None if scheme is None else scheme.encoding

    def read_array(self, name: str, role: Role, index: Index | None = None) -> Array:
        """See `TensorReader.read_array`. Raises `CheckpointError` for scales that are not positive and finite."""
        scheme = self._schemes.get(name)
        if scheme is None or role not in scheme.encoding.roles:
            raise ValueError(f"{name} is stored without {role.value}")
        if role is Role.VALUES:
            return self._reader.read_8_bits(name, index)
        rows, _ = whole_index(self.shape(name), index)
        suffix = _SCALE if role is Role.SCALES else _INPUT_SCALE
        return self._scales(f"{name.removesuffix(_WEIGHT)}{suffix}", range(*rows.indices(self.shape(name)[0])))

    def _scales(self, tensor: str, rows: range) -> NDArray[np.float32]:
        """The scales of these rows, of which a tensor has one for each, or one for all."""
        if math.prod(self._reader.shape(tensor)) == 1:
            found = np.full(len(rows), self._reader.read(tensor).item(), np.float32)
        else:
            part = self._reader.read(tensor, (slice(rows.start, rows.stop),))
            found = part.reshape(-1).astype(np.float32)
        wrong = found[~((found > 0) & np.isfinite(found))]
        if len(wrong):
            raise CheckpointError(
                f"{tensor} has the scale {wrong[0]:g}; scales must be positive and finite: the checkpoint is damaged"
            )
        return found

    def _faults(self, name: str) -> Iterator[str]:
        """What is wrong with a tensor, or with what belongs to it."""
        if name.endswith(_ZERO_POINTS):
            yield f"unsupported: {name} (quantised weights and inputs may have no zero points)"
            return
        for suffix in (_SCALE, _INPUT_SCALE):
            if name.endswith(suffix):
                if f"{name.removesuffix(suffix)}{_WEIGHT}" not in self._schemes:
                    yield f"extra: {name} is a scale of a weight that is not quantised"
                return
        stored, scheme = self._reader.dtype_of_8_bits(name), self._schemes.get(name)
        if scheme is None:
            if stored is not None:
                yield f"extra: {name} is stored as {stored}, and is not to be quantised"
            return
        wanted = _DTYPES[scheme.encoding.values]
        if stored != wanted:
            yield f"mistyped: {name} is stored as {stored or 'plain numbers'}, it is to be quantised to {wanted}"
        stem, rows = name.removesuffix(_WEIGHT), self.shape(name)[0]
        yield from self._faults_of_scale(f"{stem}{_SCALE}", rows if scheme.per_row else 1)
        if scheme.encoding.activations is ActivationScales.TENSOR:
            yield from self._faults_of_scale(f"{stem}{_INPUT_SCALE}", 1)
        elif f"{stem}{_INPUT_SCALE}" in self._stored:
            yield f"extra: {stem}{_INPUT_SCALE} is a scale of an input that is not to have one"

    def _faults_of_scale(self, tensor: str, count: int) -> Iterator[str]:
        if tensor not in self._stored:
            yield f"missing: {tensor}"
        elif self._reader.shape(tensor) not in ([(), (1,), (1, 1)] if count == 1 else [(count,), (count, 1)]):
            wanted = "one number" if count == 1 else f"({count}, 1)"
            yield f"misshapen: {tensor} is {self._reader.shape(tensor)}, it must be {wanted}"
        elif not self._reader.is_plain(tensor):
            yield f"mistyped: {tensor} must be float32, bfloat16 or float16"
