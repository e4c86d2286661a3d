"""Matrices quantised in groups, as the tensors of Hugging Face folders have them: one class per layout.

Values of a few bits are packed in int32 words, the first in the lowest bits:

- compressed-tensors: `weight_packed [out, in / values of a word]`, each value with half of its range added;
  `weight_scale [out, groups]`; perhaps `weight_zero_point`, packed along the outputs.
- GPTQ: `qweight [in / values of a word, out]`, `scales [groups, out]`, `qzeros [groups, out / values of a word]`, which
  are zeros less 1 in the first version of the format; perhaps `g_idx [in]`, the group of each input; perhaps a `bias`
  of zeros, which some tools write for every layer.
- AWQ: `qweight [in, out / 8]` and `qzeros [groups, out / 8]`, the outputs of a word in the order 0, 2, 4, 6, 1, 3, 5,
  7; `scales [groups, out]`.
- blocks of float8: `weight [out, in]`, and `weight_scale_inv`, a scale for each square of outputs and inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from sglang_jax.checkpoint.group_blocks import GroupType, Levels, Scales, group_size
from sglang_jax.checkpoint.packed_words import WORD, cut, signed_levels, unpacked_words
from sglang_jax.checkpoint.reader import Array, Index, whole_index
from sglang_jax.checkpoint.safetensors_reader import SafetensorsReader
from sglang_jax.errors import CheckpointError

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where a word has its first output, its second, and so on."""


class GroupLayout(Enum):
    """Which tensors have a matrix: see the module's documentation. The second version of GPTQ stores zeros as they
    are."""

    COMPRESSED = "compressed-tensors"
    GPTQ = "gptq"
    GPTQ_V2 = "gptq_v2"
    AWQ = "awq"
    FLOAT8 = "float8 with weight_scale"
    FLOAT8_INVERSE = "float8 with weight_scale_inv"
    MXFP4_EXPERTS = "mxfp4 of experts"
    """See `grouped_experts`."""
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    NVFP4_MODELOPT = "nvfp4 of ModelOpt"
    """See `float4_tensors`."""


@dataclass(frozen=True, slots=True)
class GroupScheme:
    """How some layers of a folder are quantised in groups.

    - `size`: inputs of a group; None if a row is one.
    - `zeros`: whether groups have zeros; otherwise `Levels.zero` is subtracted.
    - `packed`: whether values are in words.
    - `ordered`: whether the inputs of a group are neighbours; otherwise a tensor has the group of each input, and the
      matrix is dequantised when it is read.
    """

    layout: GroupLayout
    levels: Levels
    size: int | None
    zeros: bool
    packed: bool = True
    ordered: bool = True

    def blocks(self, inputs: int, scales: Scales) -> GroupType | None:
        """The blocks of a matrix with this many inputs; None if it is to be dequantised."""
        size = group_size(inputs, self.size or inputs)
        return GroupType(self.levels, size, scales, self.zeros) if size is not None and self.ordered else None

    @property
    def in_word(self) -> int:
        return WORD // self.levels.bits


class GroupedMatrix(ABC):
    """A matrix `[out, in]`, the weight of the layer `stem` of a `folder`. `endings`: ends of the names of tensors of
    which it may consist."""

    endings: tuple[str, ...]

    def __init__(
        self, folder: SafetensorsReader, stem: str, scheme: GroupScheme, expected: Mapping[str, tuple[int, ...]]
    ) -> None:
        """`expected`: shapes of the tensors that the model requires. Raises `CheckpointError` if the values are
        missing, or not a matrix."""
        self.folder, self.stem, self.scheme = folder, stem, scheme
        self._expected = expected
        self._stored = folder.names()

    @property
    def name(self) -> str:
        return f"{self.stem}.weight"

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]: ...

    @property
    def tensors(self) -> frozenset[str]:
        """The tensors of which it may consist."""
        return frozenset(f"{self.stem}{ending}" for ending in self.endings)

    @property
    def kind(self) -> GroupType | None:
        """The blocks in which `blocks` gives the matrix; None if it can only be dequantised."""
        return self.scheme.blocks(self.shape[1], Scales(self.folder.stored_as(self._scale_name)))

    def blocks(self, index: Index | None = None) -> Array:
        """The part at `index`, of whole blocks: uint8 `[rows, blocks, bytes]`."""
        kind, (rows, columns) = self.kind, self._slices(index)
        assert kind is not None
        first, last = columns.start // self._size, -(-columns.stop // self._size)
        groups = np.arange(columns.start, columns.stop, kind.weights) // self._size - first
        scales, zeros = self._checked(rows, slice(first, last))
        return kind.join(self._levels(rows, columns), scales[:, groups], None if zeros is None else zeros[:, groups])

    def widened(self, index: Index | None = None) -> NDArray[np.float32]:
        """The part at `index`, dequantised: float32 `[rows, columns]`."""
        rows, columns = self._slices(index)
        groups = self._groups(columns)
        first, last = (int(groups.min()), int(groups.max()) + 1) if len(groups) else (0, 0)
        scales, zeros = self._checked(rows, slice(first, last))
        found = self.scheme.levels.numbers(self._levels(rows, columns))
        found -= np.float32(self.scheme.levels.zero) if zeros is None else zeros[:, groups - first].astype(np.float32)
        found *= scales.astype(np.float32)[:, groups - first]
        return found

    def faults(self) -> Iterator[str]:
        """Describes tensors that are missing, misshapen or of another type; reads no values."""
        yield from ()

    def _sides(self, ending: str) -> tuple[int, int]:
        """The shape of a tensor. Raises `CheckpointError` if it is missing or not a matrix."""
        sides = self.folder.shape(f"{self.stem}{ending}")
        if len(sides) != 2:
            raise CheckpointError(f"{self.stem}{ending} is {sides}, it must be a matrix")
        return sides[0], sides[1]

    @property
    def _size(self) -> int:
        return self.scheme.size or self.shape[1]

    @property
    def _num_groups(self) -> int:
        return -(-self.shape[1] // self._size)

    @property
    @abstractmethod
    def _scale_name(self) -> str: ...

    @abstractmethod
    def _levels(self, rows: slice, columns: slice) -> Array:
        """Levels of a part, `[rows, columns]` in the dtype of `GroupType`."""

    @abstractmethod
    def _scales(self, rows: slice, groups: slice) -> Array:
        """Scales of a part, `[rows, groups]`."""

    @abstractmethod
    def _zeros(self, rows: slice, groups: slice) -> Array | None:
        """Zeros of a part, `[rows, groups]` in the dtype of levels; None for the usual one."""

    def _groups(self, columns: slice) -> NDArray[np.intp]:
        """The group of each of some columns."""
        return np.arange(columns.start, columns.stop) // self._size

    def _slices(self, index: Index | None) -> tuple[slice, slice]:
        rows, columns = (
            slice(*each.indices(size)[:2])
            for each, size in zip(whole_index(self.shape, index), self.shape, strict=True)
        )
        return rows, columns

    def _checked(self, rows: slice, groups: slice) -> tuple[Array, Array | None]:
        """Scales and zeros of a part; no zeros if all are the usual one. Raises `CheckpointError` for scales that are
        not finite, and for other zeros where the scheme has none."""
        scales, zeros = self._scales(rows, groups), self._zeros(rows, groups)
        wide = scales.astype(np.float32)
        if not np.isfinite(wide).all():
            wrong = wide[~np.isfinite(wide)][0]
            raise CheckpointError(f"{self._scale_name} has the scale {wrong:g}: the checkpoint is damaged")
        if zeros is None or self.scheme.zeros:
            return scales, zeros
        usual = self.scheme.levels.zero
        if (zeros != usual).any():
            raise CheckpointError(
                f"{self.stem} has the zero {zeros[zeros != usual][0]}, and its quantization_config says that groups "
                f"are symmetric, with the zero {usual}: set sym to false"
            )
        return scales, None

    def _fault_of(self, ending: str, shapes: tuple[tuple[int, ...], ...], *dtypes: str) -> Iterator[str]:
        """Describes what is wrong with a tensor that must have one of `shapes` and of `dtypes`."""
        name = f"{self.stem}{ending}"
        if name not in self._stored:
            yield f"missing: {name}"
        elif self.folder.shape(name) not in shapes:
            yield f"misshapen: {name} is {self.folder.shape(name)}, it must be {shapes[0]}"
        elif self.folder.stored_as(name) not in dtypes:
            yield f"mistyped: {name} is stored as {self.folder.stored_as(name)}, it must be {' or '.join(dtypes)}"

    def _extra(self, *endings: str) -> Iterator[str]:
        """Describes tensors that the scheme has no use for."""
        for ending in endings:
            if f"{self.stem}{ending}" in self._stored:
                yield f"extra: {self.stem}{ending} of a matrix that is stored in another way"


_FLOATS = tuple(each.value for each in Scales)


class CompressedTensorsMatrix(GroupedMatrix):
    endings = (".weight_packed", ".weight", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx")

    @property
    def shape(self) -> tuple[int, int]:
        if not self.scheme.packed:
            return self._sides(".weight")
        rows, words = self._sides(".weight_packed")
        columns = self._expected.get(f"{self.stem}.weight", (0,))[-1]
        return rows, columns if -(-columns // self.scheme.in_word) == words else words * self.scheme.in_word

    def faults(self) -> Iterator[str]:
        (rows, columns), groups, in_word = self.shape, self._num_groups, self.scheme.in_word
        if self.scheme.packed:
            yield from self._fault_of(".weight_packed", ((rows, -(-columns // in_word)),), "int32")
            yield from self._fault_of(".weight_shape", ((2,),), "int64", "int32")
            yield from self._extra(".weight")
        else:
            yield from self._fault_of(".weight", ((rows, columns),), self.scheme.levels.value)
        yield from self._fault_of(".weight_scale", ((rows, groups),), *_FLOATS)
        if self.scheme.zeros and self.scheme.packed:
            yield from self._fault_of(".weight_zero_point", ((-(-rows // in_word), groups),), "int32")
        elif self.scheme.zeros:
            yield from self._fault_of(".weight_zero_point", ((rows, groups),), "int8")
        else:
            yield from self._extra(".weight_zero_point")
        if self.scheme.ordered:
            yield from self._extra(".weight_g_idx")
        else:
            yield from self._fault_of(".weight_g_idx", ((columns,),), "int32", "int64")

    @property
    def _scale_name(self) -> str:
        return f"{self.stem}.weight_scale"

    def _levels(self, rows: slice, columns: slice) -> Array:
        if not self.scheme.packed:
            return self.folder.read_raw(f"{self.stem}.weight", (rows, columns))
        stored = tuple(self.folder.read_raw(f"{self.stem}.weight_shape").tolist())
        if stored != self.shape:
            raise CheckpointError(f"{self.stem}.weight_shape is {list(stored)}, the config requires {list(self.shape)}")
        bits, first = self.scheme.levels.bits, columns.start // self.scheme.in_word
        last = -(-columns.stop // self.scheme.in_word)
        words = self.folder.read_raw(f"{self.stem}.weight_packed", (rows, slice(first, last)))
        found = unpacked_words(words, bits)
        return signed_levels(cut(found, columns, first * self.scheme.in_word), bits)

    def _scales(self, rows: slice, groups: slice) -> Array:
        return self.folder.read(self._scale_name, (rows, groups))

    def _zeros(self, rows: slice, groups: slice) -> Array | None:
        if not self.scheme.zeros:
            return None
        name = f"{self.stem}.weight_zero_point"
        if not self.scheme.packed:
            return self.folder.read_raw(name, (rows, groups))
        bits, first = self.scheme.levels.bits, rows.start // self.scheme.in_word
        words = self.folder.read_raw(name, (slice(first, -(-rows.stop // self.scheme.in_word)), groups))
        found = unpacked_words(np.ascontiguousarray(words.T), bits)
        return signed_levels(np.ascontiguousarray(cut(found, rows, first * self.scheme.in_word).T), bits)

    def _groups(self, columns: slice) -> NDArray[np.intp]:
        if self.scheme.ordered:
            return super()._groups(columns)
        return _group_of_inputs(self.folder, f"{self.stem}.weight_g_idx", self._num_groups)[columns]


class GptqMatrix(GroupedMatrix):
    endings = (".qweight", ".qzeros", ".scales", ".g_idx")

    @property
    def shape(self) -> tuple[int, int]:
        words, rows = self._sides(".qweight")
        return rows, words * self.scheme.in_word

    def faults(self) -> Iterator[str]:
        (rows, columns), groups, in_word = self.shape, self._num_groups, self.scheme.in_word
        yield from self._fault_of(".qweight", ((columns // in_word, rows),), "int32")
        yield from self._fault_of(".scales", ((groups, rows),), *_FLOATS)
        yield from self._fault_of(".qzeros", ((groups, -(-rows // in_word)),), "int32")
        if not self.scheme.ordered or f"{self.stem}.g_idx" in self._stored:
            yield from self._fault_of(".g_idx", ((columns,),), "int32", "int64")
        if self._has_useless_bias:
            yield from self._fault_of(".bias", ((rows,),), *_FLOATS)
        yield from self._extra(".weight")

    @property
    def tensors(self) -> frozenset[str]:
        return super().tensors | ({self._bias} if self._has_useless_bias else frozenset())

    @property
    def _bias(self) -> str:
        return f"{self.stem}.bias"

    @property
    def _has_useless_bias(self) -> bool:
        """Whether there is a bias that the model has not; it must be zeros."""
        return self._bias in self._stored and self._bias not in self._expected

    def _checked(self, rows: slice, groups: slice) -> tuple[Array, Array | None]:
        """See `GroupedMatrix`. Raises `CheckpointError` for a bias that the model has not, unless it is zeros."""
        if self._has_useless_bias and (bias := self.folder.read(self._bias, (rows,))).any():
            wrong = float(bias[bias != 0][0])
            raise CheckpointError(f"{self._bias} has the number {wrong:g}, and the model has no bias there")
        return super()._checked(rows, groups)

    @property
    def _scale_name(self) -> str:
        return f"{self.stem}.scales"

    def _levels(self, rows: slice, columns: slice) -> Array:
        bits, first = self.scheme.levels.bits, columns.start // self.scheme.in_word
        last = -(-columns.stop // self.scheme.in_word)
        words = self.folder.read_raw(f"{self.stem}.qweight", (slice(first, last), rows))
        found = unpacked_words(np.ascontiguousarray(words.T), bits)
        return signed_levels(cut(found, columns, first * self.scheme.in_word), bits)

    def _scales(self, rows: slice, groups: slice) -> Array:
        return self.folder.read(self._scale_name, (groups, rows)).T

    def _zeros(self, rows: slice, groups: slice) -> Array:
        bits, first = self.scheme.levels.bits, rows.start // self.scheme.in_word
        name = f"{self.stem}.qzeros"
        words = self.folder.read_raw(name, (groups, slice(first, -(-rows.stop // self.scheme.in_word))))
        found = cut(unpacked_words(np.ascontiguousarray(words), bits), rows, first * self.scheme.in_word)
        # Stored zeros wrap around: of a zero of 0, the first version stores ones.
        less = np.uint8(self.scheme.layout is GroupLayout.GPTQ)
        return signed_levels(np.ascontiguousarray(found.T) + less, bits)

    def _groups(self, columns: slice) -> NDArray[np.intp]:
        name, usual = f"{self.stem}.g_idx", super()._groups(columns)
        if name not in self._stored:
            return usual
        found = _group_of_inputs(self.folder, name, self._num_groups)[columns]
        if self.scheme.ordered and not np.array_equal(found, usual):
            raise CheckpointError(
                f"{name} has inputs in another order, and the quantization_config says desc_act false: set it to true"
            )
        return found

    def blocks(self, index: Index | None = None) -> Array:
        self._groups(self._slices(index)[1])  # checks the order
        return super().blocks(index)


class AwqMatrix(GroupedMatrix):
    endings = (".qweight", ".qzeros", ".scales")

    @property
    def shape(self) -> tuple[int, int]:
        columns, words = self._sides(".qweight")
        return words * self.scheme.in_word, columns

    def faults(self) -> Iterator[str]:
        (rows, columns), groups, in_word = self.shape, self._num_groups, self.scheme.in_word
        yield from self._fault_of(".qweight", ((columns, rows // in_word),), "int32")
        yield from self._fault_of(".scales", ((groups, rows),), *_FLOATS)
        yield from self._fault_of(".qzeros", ((groups, rows // in_word),), "int32")
        yield from self._extra(".weight")

    @property
    def _scale_name(self) -> str:
        return f"{self.stem}.scales"

    def _levels(self, rows: slice, columns: slice) -> Array:
        return self._outputs(".qweight", columns, rows)

    def _scales(self, rows: slice, groups: slice) -> Array:
        return self.folder.read(self._scale_name, (groups, rows)).T

    def _zeros(self, rows: slice, groups: slice) -> Array:
        return self._outputs(".qzeros", groups, rows)

    def _outputs(self, ending: str, inner: slice, rows: slice) -> Array:
        """The values of some rows, `[rows, inner]`, of a tensor `[inner, words of outputs]`."""
        first, last = rows.start // self.scheme.in_word, -(-rows.stop // self.scheme.in_word)
        words = self.folder.read_raw(f"{self.stem}{ending}", (inner, slice(first, last)))
        found = unpacked_words(np.ascontiguousarray(words), self.scheme.levels.bits)
        in_order = found.reshape(len(found), -1, self.scheme.in_word)[..., _AWQ_PLACES].reshape(found.shape)
        return np.ascontiguousarray(cut(in_order, rows, first * self.scheme.in_word).T)


class Float8Matrix(GroupedMatrix):
    """Squares of `scheme.size` outputs and inputs share a scale."""

    endings = (".weight", ".weight_scale", ".weight_scale_inv")

    @property
    def shape(self) -> tuple[int, int]:
        return self._sides(".weight")

    def faults(self) -> Iterator[str]:
        yield from self._fault_of(".weight", (self.shape,), "float8_e4m3fn")
        squares = -(-self.shape[0] // self._size), self._num_groups
        yield from self._fault_of(self._scale_name.removeprefix(self.stem), (squares,), *_FLOATS)

    @property
    def _scale_name(self) -> str:
        inverse = self.scheme.layout is GroupLayout.FLOAT8_INVERSE
        return f"{self.stem}.weight_scale{'_inv' if inverse else ''}"

    def _levels(self, rows: slice, columns: slice) -> Array:
        return self.folder.read_raw(f"{self.stem}.weight", (rows, columns))

    def _scales(self, rows: slice, groups: slice) -> Array:
        own = np.arange(rows.start, rows.stop) // self._size
        first, last = (int(own[0]), int(own[-1]) + 1) if len(own) else (0, 0)
        found: Array = self.folder.read(self._scale_name, (slice(first, last), groups))[own - first]
        return found

    def _zeros(self, rows: slice, groups: slice) -> None:
        return None


def _group_of_inputs(folder: SafetensorsReader, name: str, groups: int) -> NDArray[np.intp]:
    """The group of each input. Raises `CheckpointError` for groups that the matrix has not."""
    found = folder.read_raw(name).astype(np.intp)
    if len(found) and not 0 <= found.min() <= found.max() < groups:
        raise CheckpointError(f"{name} has groups from {found.min()} to {found.max()}, the matrix has {groups}")
    return found
