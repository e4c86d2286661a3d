"""Loads checkpoints into models: reads each device's shard of each fused parameter separately. Parameters name their
parts (`layers.parameter`), and the manifest has their places in the checkpoint, so no layer's structure is repeated
here."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.kinds.sections import rows_by_device
from sglang_jax.architectures.manifest import ParameterName, manifest_of
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.checkpoint.parameters import ParameterReader
from sglang_jax.checkpoint.quantization import Quantization
from sglang_jax.checkpoint.reader import Array, Role, TensorReader
from sglang_jax.checkpoint.tensors import check_tensors
from sglang_jax.layers.block_matrix import BLOCK_AXES
from sglang_jax.layers.parameter import Parameter
from sglang_jax.layers.sharding import named_sharding
from sglang_jax.models.parameters import ModelParameter, parameters_of
from sglang_jax.models.transformer import Transformer
from sglang_jax.runner.freed_memory import FreedMemory
from sglang_jax.runner.this_machine import cpu_cores

Index = tuple[slice, ...]
_MAX_HELD = 2 << 30
"""Maximum bytes of parameters that are read at once, or one parameter."""

_MAX_READS = 16

_COLUMNS = 64
"""Columns copied at once."""

_WEIGHTS_AT_ONCE = 2**24
"""Maximum weights of a parameter read at once. Read as float32 and then rounded, it would be in memory three times."""

ReadPart = Callable[[Index], Array]
"""Reads the part of a parameter at an index: one slice per axis."""


def load_weights(
    model: Transformer,
    reader: TensorReader,
    config: ModelConfig,
    mesh: Mesh,
    quantization: Quantization | None = None,
) -> None:
    """Loads every parameter of `model`, in the model's dtype, sharded over `mesh` by its axes. `config`: of the
    checkpoint. A layer with more KV heads than the checkpoint copies each of them, and a larger vocabulary is padded
    with zeros. `quantization`: see `ParameterReader`; the model was built with its encodings.

    It reads several parameters at once if there are enough cores; the host has the parts of one matrix in memory, or of
    several up to 2 GiB. Raises `CheckpointError` naming missing, extra or misshapen tensors.
    """
    check_tensors(reader, config)
    read_parameters(parameters_of(model), ParameterReader(reader, config, quantization), model.config, mesh)


def read_parameters(
    parameters: Iterable[ModelParameter], reader: ParameterReader, built: ModelConfig, mesh: Mesh
) -> None:
    pool = ThreadPoolExecutor(_reads_at_once(), thread_name_prefix="weights")
    under_way: deque[tuple[list[ModelParameter], Future[list[jax.Array]], int]] = deque()
    held, freed = 0, FreedMemory()
    try:
        for matrix in _by_matrix(parameters):
            targets = [each.value.get_value() for each in matrix]
            size = sum(each.size * each.dtype.itemsize for each in targets)
            while under_way and held + size > _MAX_HELD:
                held -= _finish(*under_way.popleft(), freed)
            under_way.append((matrix, pool.submit(_read_matrix, matrix, reader, built, mesh), size))
            held += size
        for each in under_way:
            _finish(*each, freed)
    finally:
        pool.shutdown(cancel_futures=True)
    freed.give_back()


def _reads_at_once() -> int:
    """Half the number of cores, since the others build programs meanwhile."""
    return min(max(len(cpu_cores()) // 2, 1), _MAX_READS)


def _by_matrix(parameters: Iterable[ModelParameter]) -> list[list[ModelParameter]]:
    """Groups parameters: the arrays of a matrix together, values first; others separately."""
    found: dict[object, list[ModelParameter]] = {}
    for each in parameters:
        found.setdefault(each.path if each.value.role is None else each.names, []).append(each)
    return [sorted(group, key=lambda each: each.value.role is not Role.VALUES) for group in found.values()]


def _finish(matrix: list[ModelParameter], arrays: Future[list[jax.Array]], size: int, freed: FreedMemory) -> int:
    for parameter, array in zip(matrix, arrays.result(), strict=True):
        parameter.value.set_value(array)
    freed.add(size)  # copies and read numbers
    return size


def _read_matrix(
    matrix: list[ModelParameter], reader: ParameterReader, built: ModelConfig, mesh: Mesh
) -> list[jax.Array]:
    """The value of a parameter, or of each array of a matrix, each part of which is read once."""
    arrays = _Arrays(reader, [each.value.role for each in matrix if each.value.role is not None])
    first = matrix[0].value
    outputs = Axis.KV_HEADS if Axis.HEAD_PART in first.axes else reader.spec(matrix[0].names[0]).axes[0][0]
    length = dict(zip(first.axes, first.shape, strict=True)).get(outputs, 1)
    pieces = _Pieces(outputs, max(_WEIGHTS_AT_ONCE * length // max(math.prod(first.shape), 1), 1))
    runs = _runs_of(first, mesh)
    found = []
    for each in matrix:
        own = runs if each.value is first else _of_rows(runs, first.axes, each.value, mesh)
        found.append(_read_parts(each.value, _Source(arrays, built, each.value).of(each), pieces, mesh, own))
    return found


def _runs_of(parameter: Parameter, mesh: Mesh) -> list[Index]:
    shape, sharding = parameter.get_value().shape, named_sharding(mesh, parameter.axes)
    return _runs(sharding.addressable_devices_indices_map(shape).values(), shape)


def _of_rows(runs: list[Index], axes: tuple[Axis, ...], other: Parameter, mesh: Mesh) -> list[Index]:
    """The parts of another array of a matrix that belong to the rows of runs of its values: `_Arrays` keeps these."""
    if not set(other.axes) <= set(axes):
        return _runs_of(other, mesh)
    own = (tuple(run[axes.index(axis)] for axis in other.axes) for run in runs)
    return list({tuple((each.start, each.stop) for each in run): run for run in own}.values())


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Reads a parameter in pieces of at most `length` along its axis of outputs, or of experts."""

    axis: Axis
    length: int

    def read(self, read: ReadPart, axes: tuple[Axis, ...], run: Index, dtype: np.dtype) -> Array:
        """The part at `run`, a slice with both ends per axis, joined from its pieces."""
        at = axes.index(self.axis) if self.axis in axes else 0
        if self.axis not in axes or run[at].stop - run[at].start <= self.length:
            return read(run)
        whole: Array = np.empty([each.stop - each.start for each in run], dtype)
        for first in range(run[at].start, run[at].stop, self.length):
            piece = slice(first, min(first + self.length, run[at].stop))
            own = slice(piece.start - run[at].start, piece.stop - run[at].start)
            _copy(read((*run[:at], piece, *run[at + 1 :])), whole[(*[slice(None)] * at, own)])
        return whole


def _read_parts(parameter: Parameter, read: ReadPart, pieces: _Pieces, mesh: Mesh, runs: list[Index]) -> jax.Array:
    """A parameter's value, of which each device of this process has its shard, read in `runs`. Adjacent shards are read
    together: of a matrix divided by its inputs, a remote checkpoint sends whole rows, so they are sent once."""
    shape, dtype = parameter.get_value().shape, parameter.get_value().dtype
    sharding = named_sharding(mesh, parameter.axes)
    found = [(run, pieces.read(read, parameter.axes, run, dtype)) for run in runs]

    def part(index: Index) -> np.ndarray:
        wanted = _bounded(index, shape)
        run, values = next(each for each in found if _contains(each[0], wanted))
        own = tuple(slice(b.start - a.start, b.stop - a.start) for a, b in zip(run, wanted, strict=True))
        # A copy in C order: a view would keep the file open, and reading a transposed one is slow.
        return _in_order(values[own])

    return jax.make_array_from_callback(shape, sharding, part)


def _contains(run: Index, wanted: Index) -> bool:
    return all(a.start <= b.start and b.stop <= a.stop for a, b in zip(run, wanted, strict=True))


def _bounded(index: Index, shape: tuple[int, ...]) -> Index:
    return tuple(slice(*each.indices(length)[:2]) for each, length in zip(index, shape, strict=True))


def _runs(indices: Iterable[Index], shape: tuple[int, ...]) -> list[Index]:
    """The parts that cover all `indices`, which differ along at most one axis; adjacent ones are merged."""
    parts = sorted({tuple((each.start, each.stop) for each in _bounded(index, shape)) for index in indices})
    joined = [parts[0]]
    for part in parts[1:]:
        last = joined[-1]
        differ = [axis for axis, (a, b) in enumerate(zip(last, part, strict=True)) if a != b]
        if len(differ) == 1 and last[differ[0]][1] == part[differ[0]][0]:
            axis = differ[0]
            joined[-1] = (*last[:axis], (last[axis][0], part[axis][1]), *last[axis + 1 :])
        else:
            joined.append(part)
    return [tuple(slice(*ends) for ends in part) for part in joined]


def _in_order(array: Array) -> Array:
    """A copy in C order, by blocks of columns, so that both sides of a transposed matrix stay in a core's cache."""
    copy: Array = np.empty(array.shape, array.dtype)
    _copy(array, copy)
    return copy


def _copy(array: Array, target: Array) -> None:
    for first in range(0, array.shape[-1], _COLUMNS):
        target[..., first : first + _COLUMNS] = array[..., first : first + _COLUMNS]


def stored_channels(name: ParameterName, built: ModelConfig, stored: ModelConfig) -> list[int]:
    """The channels of a `stored` parameter in the order of the `built` model, in which a sharded recurrent layer has
    them by device; empty if each device has a contiguous run of the stored ones."""
    recurrent = None if name.layer is None else built.layers[name.layer].recurrent
    if recurrent is None or recurrent.shards == 1:
        return []
    return rows_by_device(manifest_of(stored).specs[name].sections, recurrent.shards)


class _Arrays:
    """Reads plain numbers, or the arrays of one matrix with these `roles`. It keeps the other arrays of the rows whose
    values are read, so that no part of the matrix is read twice."""

    def __init__(self, reader: ParameterReader, roles: list[Role]) -> None:
        self.reader = reader
        self._roles = roles
        self._kept: dict[object, Array] = {}

    def read(self, name: ParameterName, role: Role | None, index: Index, group: int | None = None) -> Array:
        """Plain numbers at an index; or values at an index, and then other arrays at its rows. `group`: see
        `ParameterReader.read_arrays`."""
        if role is None:
            return self.reader.read(name, index)
        if role is not Role.VALUES:
            return self._kept[_key(name, role, index)]
        found = self.reader.read_arrays(name, self._roles, index, group=group)
        self._kept |= {_key(name, each, index[:-1]): found[each] for each in self._roles if each is not role}
        return found[role]


def _key(name: ParameterName, role: Role, rows: Index) -> object:
    return name, role, tuple((each.start, each.stop) for each in rows)


class _Source:
    """Reads a parameter by its axes in the model; a checkpoint's matrices are [out, in]. Layers of the `built` config
    may have more KV heads than the checkpoint's. Numbers are converted to the parameter's dtype in their stored order,
    since converting a transposed array takes several times as long."""

    def __init__(self, arrays: _Arrays, built: ModelConfig, parameter: Parameter) -> None:
        self._arrays = arrays
        self._reader = arrays.reader
        self._built = built
        self._dtype = parameter.get_value().dtype
        self._role = parameter.role
        sizes = dict(zip(parameter.axes, parameter.shape, strict=True))
        self._blocks = next((sizes[axis] for axis in BLOCK_AXES if axis in sizes), 1)

    def of(self, parameter: ModelParameter) -> ReadPart:
        names, shape = parameter.names, parameter.value.shape
        axes = tuple(Axis.HEADS if axis is Axis.WHOLE_HEADS else axis for axis in parameter.value.axes)
        if Axis.HEAD_PART in axes:
            return self._fused_heads(names, axes, shape)
        if len(names) > 1:
            return self._stacked(names, axes)
        if channels := stored_channels(names[0], self._built, self._reader.config):
            return self._in_runs(names[0], axes, np.array(channels))
        return self._padded(names[0], axes, shape) if Axis.VOCABULARY in axes else self._plain(names[0], axes)

    def _plain(self, name: ParameterName, axes: tuple[Axis, ...]) -> ReadPart:
        return lambda index: self._read(name, axes, index)

    def _in_runs(self, name: ParameterName, axes: tuple[Axis, ...], rows: NDArray[np.int64]) -> ReadPart:
        """Reads one part whose channels are the stored `rows`."""
        at = axes.index(Axis.CHANNELS)

        def read(index: Index) -> Array:
            wanted = rows[index[at]]
            runs = np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1)
            slices = (slice(int(run[0]), int(run[-1]) + 1) for run in runs)
            found = [self._read(name, axes, (*index[:at], run, *index[at + 1 :])) for run in slices]
            return np.concatenate(found, axis=at)

        return read

    def _stacked(self, names: tuple[ParameterName, ...], axes: tuple[Axis, ...]) -> ReadPart:
        """Reads stacked parts: gate and up `[hidden, 2, intermediate]`, their biases `[2, intermediate]`, or scales of
        keys and values `[kv_heads, 2]`."""
        at = next(place for place, axis in enumerate(axes) if axis in (Axis.GATE_OR_UP, Axis.KEY_OR_VALUE))
        rest = (*axes[:at], *axes[at + 1 :])

        def read(index: Index) -> Array:
            others = (*index[:at], *index[at + 1 :])
            return np.stack([self._read(name, rest, others) for name in names[index[at]]], axis=at)

        return read

    def _fused_heads(
        self, names: tuple[ParameterName, ...], axes: tuple[Axis, ...], shape: tuple[int, ...]
    ) -> ReadPart:
        """Reads queries, key and value of each KV head: `[hidden, kv_heads, group + 2, head_dim]`, the bias without
        `hidden`, or the arrays of blocks, with the axes of blocks last."""
        at = axes.index(Axis.KV_HEADS)
        before, behind = axes[:at], axes[at + 3 :]
        model_heads, group = shape[at], shape[at + 1] - 2
        query, *keys_and_values = names

        def read(index: Index) -> Array:
            kv_heads, parts, dims = index[at : at + 3]
            first, last, _ = kv_heads.indices(model_heads)

            def of(name: ParameterName, axis: Axis, heads: slice) -> Array:
                wanted = (*index[:at], heads, slice(None), *index[at + 3 :])
                return self._read(name, (*before, axis, Axis.HEAD_DIM, *behind), wanted)

            queries = of(query, Axis.HEADS, slice(first * group, last * group))
            found = [queries.reshape(*queries.shape[:at], last - first, group, *queries.shape[at + 1 :])]
            found += [np.expand_dims(of(name, Axis.KV_HEADS, slice(first, last)), at + 1) for name in keys_and_values]
            joined: Array = np.concatenate(found, axis=at + 1)
            return joined[(*[slice(None)] * (at + 1), parts, dims)]

        return read

    def _padded(self, name: ParameterName, axes: tuple[Axis, ...], shape: tuple[int, ...]) -> ReadPart:
        axis, length = axes.index(Axis.VOCABULARY), self._reader.config.vocab_size

        def read(index: Index) -> Array:
            first, last, _ = index[axis].indices(shape[axis])
            if last <= length:
                return self._read(name, axes, index)
            start = min(first, length - 1)
            stored = (*index[:axis], slice(start, length), *index[axis + 1 :])
            found = np.moveaxis(self._read(name, axes, stored), axis, 0)
            padded = np.zeros((last - first, *found.shape[1:]), found.dtype)
            kept = max(length - first, 0)
            padded[:kept] = found[:kept]
            return np.moveaxis(padded, 0, axis)

        return read

    def _read(self, name: ParameterName, axes: tuple[Axis, ...], index: Index) -> Array:
        """The part of a parameter at an index over `axes`; indices of KV heads are the model's."""
        wanted = dict(zip(axes, index, strict=True))
        spec = self._reader.spec(name)
        stored_index, shape, flat = [], [], []
        chosen: np.ndarray | None = None
        # Scales per row have no input axis, the last; matrices in blocks have other axes instead.
        blocks = tuple(axis for axis in axes if axis in BLOCK_AXES)
        of_rows = bool(blocks) or self._role in (Role.SCALES, Role.INPUT_SCALE)
        for sizes, group in list(zip(spec.sizes, spec.axes, strict=True))[: -1 if of_rows else None]:
            length, *inner = sizes
            copies = self._kv_copies(name) if group[0] is Axis.KV_HEADS else 1
            first, last, _ = wanted[group[0]].indices(length * copies)
            own = slice(first // copies, (last - 1) // copies + 1)
            if copies > 1:
                chosen = np.arange(first, last) // copies - own.start
            width = math.prod(inner)
            stored_index.append(slice(own.start * width, own.stop * width))
            shape += [own.stop - own.start, *inner]
            flat += group
        whole_heads, rows = Axis.HEAD_DIM in flat and len(flat) > len(stored_index), len(stored_index)
        group = None
        if blocks and self._role is Role.VALUES:
            inputs = math.prod(spec.sizes[-1])
            stored_index.append(self._inputs_of(wanted[blocks[0]], inputs))
            group = inputs // self._blocks
        found = self._arrays.read(name, self._role, tuple(stored_index), group).astype(self._dtype, copy=False)
        found, flat = found.reshape(*shape, *found.shape[rows:]), [*flat, *blocks]
        if chosen is not None:
            found = np.take(found, chosen, axis=flat.index(Axis.KV_HEADS))
        if whole_heads:
            found = found[tuple(wanted[axis] if axis is Axis.HEAD_DIM else slice(None) for axis in flat)]
        return found.transpose([flat.index(axis) for axis in axes])

    def _inputs_of(self, blocks: slice, inputs: int) -> slice:
        """The inputs of a slice of a matrix' blocks."""
        first, last, _ = blocks.indices(self._blocks)
        return slice(first * inputs // self._blocks, last * inputs // self._blocks)

    def _kv_copies(self, name: ParameterName) -> int:
        assert name.layer is not None
        built, stored = (config.layers[name.layer].kv_attention for config in (self._built, self._reader.config))
        assert built is not None
        assert stored is not None
        return built.num_kv_heads // stored.num_kv_heads
