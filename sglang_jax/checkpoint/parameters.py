"""Reads a model's parameters from the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.part import FusedHeads
from sglang_jax.architectures.manifest import ParameterName, ParameterSpec, manifest_of
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.tensor_names import OPTIONAL, ParameterKind, Part
from sglang_jax.checkpoint.encoding import Encoding, Stored
from sglang_jax.checkpoint.group_blocks import GroupType
from sglang_jax.checkpoint.quantization import Quantization
from sglang_jax.checkpoint.reader import Array, Index, Role, TensorReader, whole_index
from sglang_jax.errors import CheckpointError

T = TypeVar("T")


class ParameterReader:
    """Reads parameters as the manifest describes them: slices of fused tensors, rows in the model's order, norm weights
    with their offset added."""

    def __init__(self, reader: TensorReader, config: ModelConfig, quantization: Quantization | None = None) -> None:
        """`quantization`: quantises matrices when they are read."""
        self.config = config
        self._quantization = quantization
        self._reader = reader
        self._manifest = manifest_of(config)
        self._names = reader.names()

    def spec(self, name: ParameterName) -> ParameterSpec:
        """The manifest's entry. Raises `KeyError` for a parameter that the model does not have."""
        return self._manifest.spec(name)

    def has(self, kind: ParameterKind) -> bool:
        return any(spec.tensor_of(self._names) in self._names for spec in self._optional(kind))

    def check(self, kind: ParameterKind) -> None:
        """Checks that the optional parameters of a kind are finite, and scales also positive: at least the smallest
        normal float32, because devices flush smaller numbers to 0. Raises `CheckpointError` naming every tensor with
        other numbers, and these."""
        minimum = np.finfo(np.float32).tiny if kind is ParameterKind.SCALE else -np.inf
        faults: dict[str, None] = {}
        for spec in self._optional(kind):
            found = self.read(spec.name)
            wrong = found[~(np.isfinite(found) & (found >= minimum))]
            if wrong.size:
                numbers = ", ".join(dict.fromkeys(f"{number:g}" for number in wrong))
                faults[f"\n  {spec.tensor_of(self._names)}: {numbers}"] = None
        if faults:
            wanted = "positive and finite" if kind is ParameterKind.SCALE else "finite"
            raise CheckpointError(f"{OPTIONAL[kind]} must be {wanted}; these are not:{''.join(faults)}")

    def _optional(self, kind: ParameterKind) -> list[ParameterSpec]:
        return [spec for name, spec in self._manifest.optional.items() if name.kind is kind]

    def read(self, name: ParameterName, index: Index | None = None) -> Array:
        """Reads a parameter, or its part at `index`, in the stored dtype; matrices are [out, in]. Rows that form heads
        must be whole heads. Optional parameters are float32: the default if the checkpoint lacks one; a single number
        is repeated for all heads. Matrices that are quantised when they are read are float32, after rounding."""
        spec = self.spec(name)
        quantization = self._quantized(spec)
        if quantization is None:
            return self._numbers(spec, index)
        *others, columns = whole_index(spec.shape, index)
        widened: Array = self._rounded(spec, quantization.widened, tuple(others))[..., columns]
        return widened

    def _numbers(self, spec: ParameterSpec, index: Index | None) -> Array:
        """A parameter before it is quantised."""
        if spec.places:
            return self._read_experts(spec, index, self._reader.read)
        if spec.default is not None:
            tensor = spec.tensor_of(self._names)
            whole = self._reader.read(tensor) if tensor in self._names else np.float32(spec.default)
            sizes = spec.shape if whole.size > 1 else [1] * len(spec.shape)
            optional: Array = np.broadcast_to(whole.astype(np.float32).reshape(sizes), spec.shape)[index or ()]
            return optional
        part = _Part.of(spec, index)
        found = part.rows_in_order(self._reader.read(spec.tensor_of(self._names), part.stored))
        if spec.factors:
            found = part.multiplied(found)
        if spec.offset:
            found = found.astype(np.float32) + np.float32(spec.offset)
        return found

    def encoding(self, name: ParameterName, index: Index | None = None) -> Encoding | None:
        """How a matrix, the matrices of experts, or their part at `index`, are stored, or are quantised when read.
        Reads no values.

        None for plain numbers, for a part that cuts through blocks, for matrices that are not used as stored (blocks
        that are multiplied by `ParameterSpec.factors`, embeddings with a scale per row, and a head tied to these), and
        for experts that have different encodings.
        """
        spec = self.spec(name)
        quantization = self._quantized(spec)
        if quantization is None:
            found = self._stored_encoding(spec, index)
        else:
            cut = not quantization.encoding.allows(whole_index(spec.shape, index)[-1], spec.shape[-1])
            found = None if cut else quantization.encoding
        looked_up = name.part is Part.EMBEDDING or (name.part is Part.HEAD and self.config.tie_word_embeddings)
        return None if looked_up and found is not None and found.block is None else found

    def in_bfloat16(self, name: ParameterName) -> bool:
        """Whether a matrix, or all those of experts, are stored in bfloat16, and used as stored. Reads no values."""
        spec = self.spec(name)
        if not spec.is_matrix or spec.offset or spec.factors or self._quantized(spec) is not None:
            return False
        tensors = self._tensors_of(spec, None)
        return all(tensor in self._names and self._reader.in_bfloat16(tensor) for tensor in tensors)

    def _quantized(self, spec: ParameterSpec) -> Quantization | None:
        return None if self._quantization is None else self._quantization.of(spec)

    def _rounded(self, spec: ParameterSpec, change: Callable[[Array], T], index: Index) -> T:
        """Applies a quantisation to whole rows. Raises `CheckpointError` for numbers that are not finite."""
        try:
            return change(self._numbers(spec, index))
        except ValueError as error:
            raise CheckpointError(f"{spec.tensor}: {error}: remove --quantization") from error

    def _stored_encoding(self, spec: ParameterSpec, index: Index | None) -> Encoding | None:
        if spec.offset or len(spec.shape) != (3 if spec.places else 2):
            return None
        tensors = self._tensors_of(spec, index)
        encodings = {self._reader.encoding(tensor) for tensor in tensors}
        found = encodings.pop() if len(encodings) == 1 else None
        if found is None or (spec.factors and found.block is not None):
            return None
        columns = whole_index(spec.shape, index)[-1]
        return found if found.allows(columns, spec.shape[-1]) else None

    def read_arrays(
        self, name: ParameterName, roles: Collection[Role], index: Index | None = None, *, group: int | None = None
    ) -> dict[Role, Array]:
        """Arrays of a matrix with an encoding, or of its part at `index`; for experts `[experts, ...]`. A matrix that
        is quantised when read is read once for all roles. `group`: weights of a group, which must divide those of the
        matrix' own groups; the part is then of whole groups of this size, and scales are repeated."""
        spec = self.spec(name)
        if group is not None and (kind := self._larger_groups(name, index, group)) is not None:
            *others, columns = whole_index(spec.shape, index)
            first, last, _ = columns.indices(spec.shape[-1])
            start = first // kind.weights * kind.weights
            whole = slice(start, -(-last // kind.weights) * kind.weights)
            found = self.read_arrays(name, roles, (*others, whole))
            own = slice((first - start) // group, (last - start) // group)
            return found | {Role.VALUES: kind.divided(found[Role.VALUES], group)[..., own, :]}
        quantization = self._quantized(spec)
        if quantization is None:
            return {role: self._stored_array(spec, role, index) for role in roles}
        *others, columns = whole_index(spec.shape, index)
        found = self._rounded(spec, lambda numbers: quantization.arrays(numbers, roles), tuple(others))
        if Role.VALUES in found:
            places = quantization.encoding.places(columns, spec.shape[-1])
            values = found[Role.VALUES]
            found[Role.VALUES] = values[..., places, :] if quantization.encoding.block else values[..., places]
        return found

    def _larger_groups(self, name: ParameterName, index: Index | None, group: int) -> GroupType | None:
        """The groups of a matrix, or of its part at `index`, if they have more weights than `group`."""
        *others, _ = whole_index(self.spec(name).shape, index)
        encoding = self.encoding(name, tuple(others))
        kind = None if encoding is None else encoding.values
        return kind if isinstance(kind, GroupType) and kind.weights > group else None

    def _stored_array(self, spec: ParameterSpec, role: Role, index: Index | None) -> Array:
        if spec.places:
            return self._read_experts(spec, index, lambda tensor, part: self._reader.read_array(tensor, role, part))
        part = _Part.of(spec, index)
        found = part.rows_in_order(self._reader.read_array(spec.tensor_of(self._names), role, part.stored))
        return part.multiplied(found) if spec.factors and role is Role.SCALES else found

    def read_stored(self, name: ParameterName, index: Index | None = None) -> Stored:
        """Reads a matrix or experts with an encoding, or their part at `index`; rows are in the model's order."""
        encoding = self.encoding(name, index)
        assert encoding is not None, name
        return Stored(encoding, self.read_arrays(name, encoding.roles, index))

    def _tensors_of(self, spec: ParameterSpec, index: Index | None) -> list[str]:
        """The tensor of a parameter, or those of the experts at `index`."""
        if not spec.places:
            return [spec.tensor_of(self._names)]
        place = spec.place(self._names)
        experts, *_ = whole_index(spec.shape, index)
        numbers = range(*experts.indices(spec.shape[0]))
        return [place.tensor_of(each) for each in numbers] if place.tensor_per_expert else [place.tensor]

    def _read_experts(self, spec: ParameterSpec, index: Index | None, read: Callable[[str, Index], Array]) -> Array:
        """Reads `[experts, rows, ...]` by `read` from one tensor per expert, or from a part of a tensor of all experts,
        which is not transposed unless it has plain numbers."""
        place = spec.place(self._names)
        experts, rows, *rest = whole_index(spec.shape, index)
        if place.tensor_per_expert:
            numbers = range(*experts.indices(spec.shape[0]))
            return np.stack([read(place.tensor_of(each), (rows, *rest)) for each in numbers])
        first, last, _ = rows.indices(spec.shape[1])
        if place.alternating:
            stored = slice(first * place.parts, last * place.parts)
        else:
            start = place.part * spec.shape[1]
            stored = slice(start + first, start + last)
        sides = (*rest, stored) if place.transposed else (stored, *rest)
        found = read(place.tensor, (experts, *sides))
        if place.transposed:
            found = np.swapaxes(found, 1, 2)
        return found[:, place.part :: place.parts] if place.alternating else found


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows `[first, last)` of a parameter, and where its tensor has them.

    - `stored`: the slices of the tensor that hold them.
    - `places`: the rows of that part of the tensor which are the parameter's; None for all.
    """

    spec: ParameterSpec
    first: int
    last: int
    stored: Index
    places: NDArray[np.intp] | None

    @classmethod
    def of(cls, spec: ParameterSpec, index: Index | None) -> _Part:
        rows, *rest = whole_index(spec.shape, index)
        first, last, _ = rows.indices(spec.shape[0])
        start, stop, places = first, last, None
        if spec.fused_heads is not None:
            places = stored_places(spec.fused_heads, spec.stored_rows)[first:last]
            start, stop = int(places.min()), int(places.max()) + 1
            places = places - start
        stored = (slice(spec.first_row + start, spec.first_row + stop), *rest)
        return cls(spec, first, last, (slice(1), *stored) if spec.as_row else stored, places)

    def rows_in_order(self, found: Array) -> Array:
        """The parameter's rows out of those of a fused tensor, and the rows of heads in the model's order."""
        spec = self.spec
        if spec.as_row:
            (found,) = found
        if self.places is not None:
            found = found[self.places]
        if spec.interleaved or spec.rotated_rows:
            head_dim = spec.lengths[Axis.HEAD_DIM]
            order = order_in_halves(head_dim, spec.rotated_rows or head_dim, interleaved=spec.interleaved)
            found = found.reshape(-1, head_dim, *found.shape[1:])[:, order].reshape(found.shape)
        return found

    def multiplied(self, found: Array) -> Array:
        """Multiplies rows, or their scales, by the factors of the rows: float32."""
        rows_of_runs, factors = zip(*self.spec.factors, strict=True)
        by = np.repeat(np.array(factors, np.float32), rows_of_runs)[self.first : self.last]
        multiplied: Array = found.astype(np.float32) * by.reshape(-1, *[1] * (found.ndim - 1))
        return multiplied


def stored_places(fused: FusedHeads, stored_rows: int) -> NDArray[np.intp]:
    """The row of a tensor of `stored_rows` rows for each row of the parameter."""
    heads = np.arange(0, stored_rows, fused.stored).reshape(-1, 1)
    runs = ((heads + np.arange(first, first + count)).reshape(-1) for first, count in fused.runs)
    return np.concatenate(list(runs))


def order_in_halves(head_dim: int, rotated: int, *, interleaved: bool) -> NDArray[np.intp]:
    """The stored position of each row of a head in the model's order, which is: the first of each rotated pair, half of
    the rows that do not rotate, the second of each pair, the rest. Pairs are in the first `rotated` stored rows, as
    neighbours (`interleaved`) or `rotated` / 2 apart."""
    pairs = np.arange(rotated).reshape(-1, 2).T if interleaved else np.arange(rotated).reshape(2, -1)
    rest = np.arange(rotated, head_dim).reshape(2, -1)
    return np.concatenate((pairs, rest), axis=1).reshape(-1)
