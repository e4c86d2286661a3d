"""Reads safetensors folders with weights in 8 bits and scales.

`X.weight` is int8 or float8 `[out, in]`, `X.weight_scale` one number or `[out, 1]`, `X.input_scale` one number. Instead
of `X.weight` there may be `X.weight_packed`, int32 `[out, ceil(in / 4)]`, with int8 values plus 128, the first of four
in the lowest byte; `X.weight_shape` is then `[out, in]`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sglang_jax.architectures.manifest import manifest_of
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint.encoding import ActivationScales, Encoding, Stored, ValueType
from sglang_jax.checkpoint.reader import Array, Index, Role, whole_index
from sglang_jax.checkpoint.safetensors_reader import SafetensorsReader
from sglang_jax.checkpoint.stored_quantization import Scheme, StoredQuantization
from sglang_jax.checkpoint.tensors import expected_tensors, listed, mtp_prefixes
from sglang_jax.errors import CheckpointError

_MAX_KEPT = 1024
"""The row scales of this many matrices have some tens of MiB at most."""

_WEIGHT, _SCALE, _INPUT_SCALE = ".weight", ".weight_scale", ".input_scale"
_PACKED, _SHAPE = ".weight_packed", ".weight_shape"
_IN_WORD = 4
"""Values per packed word."""

_ZERO_POINTS = (".weight_zero_point", ".input_zero_point", ".output_zero_point")

_DTYPES = {ValueType.INT8: np.dtype(np.int8), ValueType.FLOAT8_E4M3: np.dtype(ml_dtypes.float8_e4m3fn)}


class QuantizedReader:
    """The tensors of a folder. Scales are hidden, and packed weights have the names of plain ones. Weights in 8 bits
    have an encoding, and `read` dequantises them to float32; other tensors are not changed. Raises `CheckpointError`
    naming the tensors (at most 500) that are not as `quantization` says. Scales, and stored shapes of packed weights,
    are checked when they are read."""

    def __init__(self, reader: SafetensorsReader, quantization: StoredQuantization, config: ModelConfig) -> None:
        self._reader = reader
        self._stored = names = reader.names()
        self._cached = KeptArrays(lambda name: reader.read(name) if reader.is_plain(name) else reader.read_raw(name))
        packed = [name.removesuffix(_PACKED) + _WEIGHT for name in names if name.endswith(_PACKED)]
        hidden = (_SCALE, _INPUT_SCALE, _PACKED, _SHAPE)
        self._names = names = frozenset(packed).union(name for name in names if not name.endswith(hidden))
        self._packed = self._shapes_of_packed(packed, expected_tensors(config, names))
        specs = manifest_of(config).specs
        embedding = next(spec.tensor_of(names) for name, spec in specs.items() if name.part is Part.EMBEDDING)
        routers = {spec.tensor_of(names) for name, spec in specs.items() if name.part is Part.ROUTER}
        self._schemes: dict[str, Scheme] = {}
        for name in names:
            if name.endswith(_WEIGHT) and len(self.shape(name)) == 2:
                scheme = quantization.scheme(name.removesuffix(_WEIGHT), "Embedding" if name == embedding else "Linear")
                # Some versions of the tools count a router as a linear layer, and others do not.
                plain = name not in self._packed and reader.is_plain(name)
                if isinstance(scheme, Scheme) and not (plain and name in routers):
                    self._schemes[name] = scheme
        mtp = mtp_prefixes(config)
        checked = [name for name in self._stored if not name.startswith(mtp)]
        faults = sorted(fault for name in checked for fault in self._faults(name))
        if faults:
            raise CheckpointError(
                f"the tensors are not those that {quantization.file} describes as quantised ({len(faults)} faults):"
                + listed(faults)
            )

    def names(self) -> frozenset[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._packed[name] if name in self._packed else self._reader.shape(name)

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

    def in_bfloat16(self, name: str) -> bool:
        return name not in self._schemes and self._reader.in_bfloat16(name)

    def read_array(self, name: str, role: Role, index: Index | None = None) -> Array:
        """See `TensorReader.read_array`. Raises `CheckpointError` for scales that are not positive and finite."""
        scheme = self._schemes.get(name)
        if scheme is None or role not in scheme.encoding.roles:
            raise ValueError(f"{name} is stored without {role.value}")
        if role is Role.VALUES:
            return self._unpack(name, index) if scheme.packed else self._reader.read_raw(name, index)
        rows, _ = whole_index(self.shape(name), index)
        suffix = _SCALE if role is Role.SCALES else _INPUT_SCALE
        return self._scales(_companion(name, suffix), range(*rows.indices(self.shape(name)[0])))

    def _scales(self, tensor: str, rows: range) -> NDArray[np.float32]:
        """The scales of `rows`; the tensor has one per row, or one for all."""
        stored = self._cached.get(tensor).reshape(-1)
        if len(stored) == 1:
            found = np.full(len(rows), stored.item(), np.float32)
        else:
            found = stored[rows.start : rows.stop].astype(np.float32)
        wrong = found[~((found > 0) & np.isfinite(found))]
        if len(wrong):
            raise CheckpointError(
                f"{tensor} has the scale {wrong[0]:g}; scales must be positive and finite: the checkpoint is damaged"
            )
        return found

    def _shapes_of_packed(
        self, names: Iterable[str], expected: Mapping[str, tuple[int, ...]]
    ) -> dict[str, tuple[int, ...]]:
        """The shapes of packed weights, without reading the stored ones: the expected shape if it fits the number of
        words, otherwise all columns that the words can hold."""
        shapes = {}
        for name in names:
            *rows, words = self._reader.shape(_companion(name, _PACKED)) or (0,)
            shape = expected.get(name, (0,))
            fits = -(-shape[-1] // _IN_WORD) == words
            shapes[name] = (*rows, shape[-1] if fits else _IN_WORD * words)
        return shapes

    def _unpack(self, name: str, index: Index | None) -> Array:
        shape, stored = self.shape(name), self._cached.get(_companion(name, _SHAPE))
        if tuple(stored.tolist()) != shape:
            raise CheckpointError(f"{_companion(name, _SHAPE)} is {stored.tolist()}, the config requires {list(shape)}")
        rows, columns = whole_index(shape, index)
        first, last, _ = columns.indices(shape[1])
        start = first // _IN_WORD
        words = self._reader.read_raw(_companion(name, _PACKED), (rows, slice(start, -(-last // _IN_WORD))))
        skipped = start * _IN_WORD
        raised = words.view(np.uint8)[:, first - skipped : max(last, first) - skipped]
        values: Array = (raised ^ np.uint8(128)).view(np.int8)
        return values

    def _faults(self, name: str) -> Iterator[str]:
        if name.endswith(_ZERO_POINTS):
            yield f"unsupported: {name} (quantised weights and inputs may have no zero points)"
            return
        for suffix in (_SCALE, _INPUT_SCALE):
            if name.endswith(suffix):
                if f"{name.removesuffix(suffix)}{_WEIGHT}" not in self._schemes:
                    yield f"extra: {name} is a scale of a weight that is not quantised"
                return
        if name.endswith(_SHAPE):
            if name.removesuffix(_SHAPE) + _WEIGHT not in self._packed:
                yield f"extra: {name} is a shape of a weight that is not packed"
            return
        packed = name.endswith(_PACKED)
        weight = name.removesuffix(_PACKED) + _WEIGHT if packed else name
        stored, scheme = self._reader.raw_dtype(name), self._schemes.get(weight)
        kind = stored or "plain numbers"
        if scheme is None or (packed and not scheme.packed):
            if stored is not None or packed:
                yield f"extra: {name} is stored as {kind}, and is not to be {'packed' if scheme else 'quantised'}"
            return
        if scheme.packed and not packed:
            yield f"mistyped: {name} is stored as {kind}, it is to be in {_companion(name, _PACKED)}"
            return
        wanted, how = (
            (np.dtype(np.int32), "packed in") if packed else (_DTYPES[scheme.encoding.value_type], "quantised to")
        )
        if stored != wanted:
            yield f"mistyped: {name} is stored as {kind}, it is to be {how} {wanted}"
        if packed:
            yield from self._faults_of_shape(_companion(weight, _SHAPE))
        yield from self._faults_of_scales(weight, scheme)

    def _faults_of_shape(self, tensor: str) -> Iterator[str]:
        if tensor not in self._stored:
            yield f"missing: {tensor}"
        elif self._reader.shape(tensor) != (2,) or self._reader.raw_dtype(tensor) not in (np.int32, np.int64):
            yield f"mistyped: {tensor} must be two numbers of int64"

    def _faults_of_scales(self, weight: str, scheme: Scheme) -> Iterator[str]:
        stem, rows = weight.removesuffix(_WEIGHT), self.shape(weight)[0]
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


def _companion(weight: str, suffix: str) -> str:
    return weight.removesuffix(_WEIGHT) + suffix


class KeptArrays:
    """An LRU cache of `read`, whose arrays must not be changed. Thread-safe; if several threads want the same array,
    one reads it and the others wait."""

    def __init__(self, read: Callable[[str], Array], most: int = _MAX_KEPT) -> None:
        self._read = read
        self._most = most
        self._lock = threading.Lock()
        self._arrays: OrderedDict[str, Future[Array]] = OrderedDict()

    def get(self, name: str) -> Array:
        """Returns the array. An exception of `read` goes to all waiting threads, and is not cached."""
        with self._lock:
            wanted = self._arrays.get(name)
            first = wanted is None
            if wanted is None:
                wanted = self._arrays[name] = Future()
                if len(self._arrays) > self._most:
                    self._arrays.popitem(last=False)
            self._arrays.move_to_end(name)
        if first:
            self._fill(name, wanted)
        return wanted.result()

    def _fill(self, name: str, wanted: Future[Array]) -> None:
        try:
            wanted.set_result(self._read(name))
        except BaseException as error:
            with self._lock:
                if self._arrays.get(name) is wanted:
                    del self._arrays[name]
            wanted.set_exception(error)
