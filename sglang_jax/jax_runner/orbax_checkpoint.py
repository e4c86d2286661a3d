"""Orbax checkpoints: weights in the model's layout, which are restored straight to the devices that use them.

A folder has `weights/` (Orbax), `sglang_jax_orbax.json` (format version, scales of keys and values, encodings of 8-bit
matrices), and the tokenizer and config files of the source checkpoint. What is stored, and in which shapes, follows
from the manifest of the checkpoint's config, and does not depend on platform or devices: copies of KV heads, padding of
the vocabulary and a separate head for tied embeddings are created after restoring.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sglang_jax.architectures.axes import Axis
from sglang_jax.architectures.manifest import ParameterName, manifest_of
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.tensor_names import OPTIONAL
from sglang_jax.checkpoint.bucket import RemoteFolder
from sglang_jax.checkpoint.encoding import Encoding
from sglang_jax.checkpoint.orbax_marker import ENCODINGS, KV_SCALES, encodings_to_json, read_orbax_kv_scales
from sglang_jax.checkpoint.parameters import ParameterReader
from sglang_jax.checkpoint.resolve import ORBAX_MARKER
from sglang_jax.errors import CheckpointError
from sglang_jax.jax_runner.weights import read_parameters, stored_channels
from sglang_jax.layers.parameter import Parameter
from sglang_jax.layers.sharding import MESH_AXES, named_sharding, parallelism_of
from sglang_jax.models.parameters import HEAD, parameters_of
from sglang_jax.models.transformer import Transformer

FORMAT_VERSION = 1
ENCODED_VERSION = 2
"""Format version of folders with 8-bit matrices, which earlier releases cannot read."""
_WEIGHTS = "weights"


def save_orbax(
    folder: Path,
    config: ModelConfig,
    model: Transformer,
    files: Sequence[Path] = (),
    kv_scales: Mapping[str, Any] | None = None,
    encodings: Mapping[ParameterName, Encoding] | None = None,
) -> None:
    """Writes a model's weights to `folder`, which may exist, and copies `files`, also folders, there. `kv_scales`: the
    checkpoint's (see `kv_scales_to_json`); `encodings`: of matrices in 8 bits. Raises `CheckpointError` if the folder
    has Orbax weights."""
    folder = folder.absolute()
    weights = folder / _WEIGHTS
    if weights.exists():
        raise CheckpointError(f"{weights} exists already: remove it, or choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(weights, {each.path: each.parameter.get_value() for each in _stored(model, config)})
    for file in files:
        copy = shutil.copytree if file.is_dir() else shutil.copyfile
        copy(file, folder / file.name)
    # The marker is last, so a folder with it is complete.
    marker: dict[str, Any] = {"format_version": ENCODED_VERSION if encodings else FORMAT_VERSION}
    if encodings:
        marker[ENCODINGS] = encodings_to_json(encodings)
    if kv_scales is not None:
        marker[KV_SCALES] = kv_scales
    (folder / ORBAX_MARKER).write_text(json.dumps(marker, indent=2) + "\n")


def _check_version(folder: Path) -> None:
    path = folder / ORBAX_MARKER
    try:
        marker = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    version = marker.get("format_version") if isinstance(marker, dict) else None
    if version not in (FORMAT_VERSION, ENCODED_VERSION):
        raise CheckpointError(
            f"{path} is of format {version}, this version reads {FORMAT_VERSION} and {ENCODED_VERSION}: convert again"
        )


def restore_orbax(
    folder: Path, model: Transformer, config: ModelConfig, mesh: Mesh, remote: RemoteFolder | None = None
) -> None:
    """Loads every parameter of `model`, in the model's dtype, sharded over `mesh` by its axes. Each device reads its
    shard; the host has no whole tensor.

    `config`: of the checkpoint. `remote`: the bucket of the weights, if there is one; `folder` then has a copy of the
    marker. Raises `CheckpointError` for a marker that is unreadable or of another version, and for missing, extra or
    misshapen tensors, which it names.
    """
    weights = epath.Path(folder.absolute() if remote is None else remote.address) / _WEIGHTS
    if not (weights.is_dir() if remote is None else _WEIGHTS in remote.folders):
        raise CheckpointError(f"{weights} is missing: the conversion did not finish; convert again")
    _check_version(folder)
    stored = _stored(model, config)
    with ocp.StandardCheckpointer() as checkpointer:
        _check_shapes(weights, {each.path: each.shape for each in stored}, checkpointer)
        target = {each.path: _to_restore(each, mesh) for each in stored}
        restored = checkpointer.restore(weights, target, strict=False)
    for each in stored:
        each.parameter.set_value(_built(restored.pop(each.path), each, mesh))
    if config.tie_word_embeddings and model.has_own_head:
        own = next(each.value for each in parameters_of(model) if HEAD in each.names)
        transpose = jax.jit(lambda table: table.T, out_shardings=named_sharding(mesh, own.axes))
        own.set_value(transpose(model.embedding.table.get_value()))
    scales = [each for each in parameters_of(model) if each.value.kind in OPTIONAL]
    read_parameters(scales, ParameterReader(read_orbax_kv_scales(folder, config)[0], config), model.config, mesh)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A parameter of a model, with its path, and its shape in the checkpoint. `channels`: the checkpoint's channels in
    the model's order, which is by device for a sharded recurrent layer; otherwise empty."""

    path: str
    parameter: Parameter
    shape: tuple[int, ...]
    channels: list[int]

    @property
    def kv_heads(self) -> int | None:
        """The checkpoint's KV heads, if the model has more; None if it has the same."""
        axes = self.parameter.axes
        if Axis.KV_HEADS not in axes:
            return None
        axis = axes.index(Axis.KV_HEADS)
        return self.shape[axis] if self.parameter.shape[axis] > self.shape[axis] else None


def _stored(model: Transformer, config: ModelConfig) -> list[_Stored]:
    """All parameters in the manifest of `config`: tied embeddings once, and without optional ones, which are in the
    marker. `model` may be sharded differently."""
    manifest = manifest_of(config)
    return [
        _Stored(
            parameter.path,
            parameter.value,
            manifest.fused_shape(parameter.names, parameter.value.axes),
            stored_channels(parameter.names[0], model.config, config),
        )
        for parameter in parameters_of(model)
        if not (config.tie_word_embeddings and HEAD in parameter.names) and parameter.value.kind not in OPTIONAL
    ]


def _to_restore(stored: _Stored, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """The stored shape, sharded so that every device has at least the data of its own shard."""
    parameter = stored.parameter
    if stored.channels:
        axis = parameter.axes.index(Axis.CHANNELS)
        sharding = named_sharding(mesh, parameter.axes)
        if stored.shape[axis] % parallelism_of(mesh).devices:
            sharding = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(stored.shape, parameter.dtype, sharding=sharding)
    if stored.kv_heads is None:
        # Orbax pads an axis that is longer than stored, the vocabulary, with zeros.
        return jax.ShapeDtypeStruct(parameter.shape, parameter.dtype, sharding=named_sharding(mesh, parameter.axes))
    devices = mesh.devices.reshape(mesh.shape["data"], stored.kv_heads, 1, -1)
    by_heads = Mesh(devices, (*MESH_AXES, "copies"))
    return jax.ShapeDtypeStruct(stored.shape, parameter.dtype, sharding=named_sharding(by_heads, parameter.axes))


def _built(found: jax.Array, stored: _Stored, mesh: Mesh) -> jax.Array:
    parameter = stored.parameter
    if stored.channels:
        order, axis = np.array(stored.channels), parameter.axes.index(Axis.CHANNELS)
        put = jax.jit(lambda rows: jnp.take(rows, order, axis=axis), out_shardings=named_sharding(mesh, parameter.axes))
        return put(found)
    if stored.kv_heads is None:
        return found
    axis = parameter.axes.index(Axis.KV_HEADS)
    copies = parameter.shape[axis] // stored.kv_heads

    def copy_norms(found: jax.Array) -> jax.Array:
        return jnp.repeat(found, copies, axis=axis)

    def copy_heads(fused: jax.Array) -> jax.Array:
        """`[..., kv_heads, group + 2, head_dim]` → `[..., kv_heads * copies, group / copies + 2, head_dim]`."""
        group = fused.shape[axis + 1] - 2
        queries = fused[..., :group, :].reshape(*fused.shape[:axis], -1, group // copies, fused.shape[-1])
        return jnp.concatenate([queries, jnp.repeat(fused[..., group:, :], copies, axis=axis)], axis=axis + 1)

    copy = copy_heads if Axis.HEAD_PART in parameter.axes else copy_norms
    return jax.jit(copy, out_shardings=named_sharding(mesh, parameter.axes))(found)


def _check_shapes(
    weights: epath.Path, wanted: dict[str, tuple[int, ...]], checkpointer: ocp.StandardCheckpointer
) -> None:
    found: dict[str, Any] = dict(checkpointer.metadata(weights).item_metadata)
    faults = [f"missing: {name} {wanted[name]}" for name in sorted(wanted.keys() - found.keys())]
    faults += [f"extra: {name} {tuple(found[name].shape)}" for name in sorted(found.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & found.keys()):
        if tuple(found[name].shape) != wanted[name]:
            shapes = f"is {tuple(found[name].shape)}, the config requires {wanted[name]}"
            faults.append(f"misshapen: {name} {shapes}")
    if faults:
        listed = "\n  ".join(faults)
        raise CheckpointError(f"the tensors in {weights} do not fit the model ({len(faults)} faults):\n  {listed}")
