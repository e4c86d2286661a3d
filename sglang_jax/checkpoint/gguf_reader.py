"""Reads tensors of GGUF files under Hugging Face names and in Hugging Face layout."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, dequantize
from numpy.typing import NDArray

from sglang_jax.architectures.manifest import manifest_of
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import family_named
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint.encoding import BLOCKS, Encoding
from sglang_jax.checkpoint.ggml_blocks import BlockType
from sglang_jax.checkpoint.gguf_file import GgufFile, GgufTensor
from sglang_jax.checkpoint.parameters import order_in_halves
from sglang_jax.checkpoint.reader import Array, Index, Role, whole_index
from sglang_jax.errors import CheckpointError

ROPE_FACTORS = "rope_freqs.weight"
"""Llama 3's frequency divisors; read as part of the config."""

_PLAIN_DTYPES: dict[GGMLQuantizationType, np.dtype] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_ENCODINGS = {kind.ggml: BLOCKS[kind] for kind in BlockType}
SUPPORTED_TYPES = frozenset(_PLAIN_DTYPES) | frozenset(_ENCODINGS)

_NAN = 255
"""The exponent of NaN in MXFP4."""

_AT_A_TIME = 2**16
"""Weights dequantised per call: enough to hide the cost of a call, and few enough for a core's cache."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A stored tensor. `permuted_heads`: number of heads whose rows have another order in the file, or 0. `is_row`: the
    file has a vector where the model has a matrix of one row."""

    tensor: GgufTensor
    permuted_heads: int
    is_row: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, *self.tensor.shape) if self.is_row else self.tensor.shape


class GgufReader:
    """Reads F32, F16 and BF16 tensors in their type, and block-quantised ones as float32, dequantising only the rows
    that are read. `read` and `read_array` raise `CheckpointError` for MXFP4 with scales that are not numbers."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        """Raises `CheckpointError` naming the tensors whose type is not in `SUPPORTED_TYPES`."""
        self._file = file
        names = _stored_tensors(config)
        self._entries: dict[str, _Entry] = {}
        for name, tensor in file.tensors.items():
            if name != ROPE_FACTORS:
                known = names.get(name)
                # Unknown names are kept, and reported as extra.
                self._entries[name if known is None else known.name] = (
                    _Entry(tensor, 0)
                    if known is None
                    else _Entry(tensor, known.permuted_heads, known.is_row and len(tensor.shape) == 1)
                )
        unsupported = [
            f"{tensor.name} ({tensor.kind.name if tensor.kind else f'type {tensor.type_id}'})"
            for tensor in file.tensors.values()
            if tensor.kind not in SUPPORTED_TYPES
        ]
        if unsupported:
            supported = ", ".join(sorted(kind.name for kind in SUPPORTED_TYPES))
            raise CheckpointError(
                f"{file.path} holds tensors of types that cannot be read: {', '.join(unsupported)}; "
                f"supported: {supported}"
            )

    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def read(self, name: str, index: Index | None = None) -> Array:
        entry = self._entry(name)
        rows, *rest = whole_index(entry.shape, index)
        raw: Array = self._file.raw(entry.tensor)
        if entry.is_row:
            raw = raw[None]
        if entry.tensor.kind in _PLAIN_DTYPES:
            raw = raw.view(_PLAIN_DTYPES[entry.tensor.kind])
        if entry.permuted_heads:
            raw = raw[_stored_rows(entry.tensor.shape[0], entry.permuted_heads)[rows]]
        elif raw.ndim == 1 and entry.tensor.kind in _ENCODINGS:
            vector: Array = _dequantize(raw[None], entry.tensor)[0]
            return vector[rows]
        else:
            raw = raw[rows]
        self._check_scales(name, raw, entry.tensor)
        if raw.ndim == 3 and entry.tensor.kind in _ENCODINGS:
            raw = raw[:, rest[0]]
            matrices: Array = _dequantize(raw.reshape(-1, raw.shape[-1]), entry.tensor)
            return matrices.reshape(*raw.shape[:2], -1)[..., rest[1]]
        return _dequantize(raw, entry.tensor)[(slice(None), *rest)]

    def encoding(self, name: str) -> Encoding | None:
        tensor = self._entry(name).tensor
        return None if tensor.kind is None or len(tensor.shape) < 2 else _ENCODINGS.get(tensor.kind)

    def in_bfloat16(self, name: str) -> bool:
        return self._entry(name).tensor.kind is GGMLQuantizationType.BF16

    def read_array(self, name: str, role: Role, index: Index | None = None) -> Array:
        """See `TensorReader`: blocks, `[rows, blocks, bytes]`, of experts with one more axis in front."""
        entry, encoding = self._entry(name), self.encoding(name)
        if role is not Role.VALUES or encoding is None or encoding.block is None:
            raise ValueError(f"{name} is stored without {role.value}")
        *rows, columns = whole_index(entry.tensor.shape, index)
        heads, width = entry.permuted_heads, entry.tensor.shape[-1]
        raw: Array = self._file.raw(entry.tensor)
        raw = raw[_stored_rows(entry.tensor.shape[0], heads)[rows[0]] if heads else tuple(rows)]
        self._check_scales(name, raw, entry.tensor)
        first, last, _ = columns.indices(width)
        blocks = raw.reshape(*raw.shape[:-1], width // encoding.block, -1)
        return blocks[..., first // encoding.block : last // encoding.block, :]

    def _check_scales(self, name: str, raw: Array, tensor: GgufTensor) -> None:
        """Raises `CheckpointError` for MXFP4 whose scales, the first byte of each block, are not numbers."""
        if tensor.kind is GGMLQuantizationType.MXFP4 and (raw[..., :: BlockType.MXFP4.nbytes] == _NAN).any():
            raise CheckpointError(f"{name} in {self._file.path} has a scale that is not a number: the file is damaged")

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise CheckpointError(f"no tensor {name} in {self._file.path}")
        return self._entries[name]


@dataclass(frozen=True, slots=True)
class _Known:
    """The Hugging Face name of a tensor; the other fields as in `_Entry`."""

    name: str
    permuted_heads: int
    is_row: bool = False


def _stored_tensors(config: ModelConfig) -> dict[str, _Known]:
    """Known tensors by their GGUF names. In Llama's files, rotary pairs of q and k are neighbouring rows; in Hugging
    Face's layout, they are half a head apart."""
    form = family_named(config.architecture).gguf
    permuted = form is not None and form.interleaved
    known: dict[str, _Known] = {}
    for spec in manifest_of(config).specs.values():
        if spec.gguf is None or spec.places:  # places of experts include the GGUF name
            continue
        heads = 0
        if permuted and spec.name.part in (Part.QUERY, Part.KEY) and spec.name.layer is not None:
            attention = config.layers[spec.name.layer].kv_attention
            assert attention is not None
            heads = attention.num_heads if spec.name.part is Part.QUERY else attention.num_kv_heads
        known.setdefault(spec.gguf, _Known(spec.tensor, heads, spec.name.part is Part.SHARED_ROUTER))
    if config.tie_word_embeddings or config.pooler is not None:
        # An output matrix is allowed even with tied embeddings.
        names = family_named(config.architecture).names
        known.setdefault(f"{names[Part.HEAD].gguf}.weight", _Known(f"{names[Part.HEAD].hf}.weight", 0))
    return known


def _dequantize(raw: Array, tensor: GgufTensor) -> Array:
    """Dequantises rows of blocks, `[rows, bytes]`, to float32; plain types are not changed."""
    if tensor.kind is None or tensor.kind in _PLAIN_DTYPES:
        return raw
    width = tensor.shape[-1]
    values: Array = np.empty((len(raw), width), np.float32)
    rows = max(_AT_A_TIME // width, 1)
    for first in range(0, len(raw), rows):
        some = np.ascontiguousarray(raw[first : first + rows])
        values[first : first + rows] = dequantize(some, tensor.kind)
    return values


def _stored_rows(num_rows: int, heads: int) -> NDArray[np.int64]:
    """For each row in Hugging Face order, its row in the file: `[num_rows]`."""
    head_dim = num_rows // heads
    firsts = np.arange(0, num_rows, head_dim)
    return (firsts[:, None] + order_in_halves(head_dim, head_dim, interleaved=True)).reshape(-1)
