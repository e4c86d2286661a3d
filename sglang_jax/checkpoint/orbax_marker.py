"""Reads KV scales and encodings of matrices from the marker of an Orbax checkpoint, without Orbax."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sglang_jax.architectures.manifest import ParameterName, manifest_of
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.tensor_names import ParameterKind, Part
from sglang_jax.checkpoint.encoding import ActivationScales, Encoding, ValueType
from sglang_jax.checkpoint.parameters import ParameterReader
from sglang_jax.checkpoint.reader import TensorsInMemory
from sglang_jax.checkpoint.resolve import ORBAX_MARKER
from sglang_jax.config import KVCacheDtype
from sglang_jax.errors import CheckpointError

KV_SCALES = "kv_scales"
ENCODINGS = "encodings"
"""Fields of the marker."""

_SIDES = (Part.KEY, Part.VALUE)


def read_orbax_kv_scales(folder: Path, config: ModelConfig) -> tuple[TensorsInMemory, KVCacheDtype | None]:
    """Returns the KV scales that were converted with the weights, if any, and the KV cache type for which they were
    made, if known. Raises `CheckpointError` for a damaged marker."""
    path, tensors = folder / ORBAX_MARKER, {}
    try:
        stored = json.loads(path.read_bytes()).get(KV_SCALES)
        if stored is None:
            return TensorsInMemory({}), None
        for name, spec in manifest_of(config).optional.items():
            if name.kind is ParameterKind.SCALE:
                numbers = np.array(stored["numbers"][name.layer], np.float32)
                if numbers.shape != (*spec.shape, len(_SIDES)):
                    raise ValueError(f"KV scales of layer {name.layer} are {numbers.shape}, they do not fit the model")
                tensors[spec.tensor] = numbers[:, _SIDES.index(name.part)]
        made_for = stored["made_for"]
        return TensorsInMemory(tensors), None if made_for is None else KVCacheDtype(made_for)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error


def kv_scales_to_json(reader: ParameterReader, made_for: KVCacheDtype | None) -> dict[str, Any]:
    """The inverse of `read_orbax_kv_scales`: `[kv_heads, 2]` per layer, with exact float32 values."""
    numbers: list[list[Any]] = []
    for number, layer in enumerate(reader.config.layers):
        sides = [] if layer.attention is None else [ParameterName(side, ParameterKind.SCALE, number) for side in _SIDES]
        numbers.append(np.transpose([reader.read(side) for side in sides]).tolist())
    return {"made_for": made_for, "numbers": numbers}


def read_orbax_encodings(folder: Path, config: ModelConfig) -> dict[ParameterName, Encoding]:
    """The encodings of matrices with a scale per row; others are plain. Raises `CheckpointError` for a damaged
    marker."""
    path, specs = folder / ORBAX_MARKER, manifest_of(config).specs
    found: dict[ParameterName, Encoding] = {}
    try:
        for group in json.loads(path.read_bytes()).get(ENCODINGS, ()):
            encoding = Encoding(ValueType(group["values"]), activations=ActivationScales(group["activations"]))
            for part, layer in group["matrices"]:
                name = ParameterName(Part(part), layer=layer)
                if name not in specs:
                    raise KeyError(f"{part} of layer {layer}, which the model has not")
                found[name] = encoding
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error
    return found


def encodings_to_json(encodings: Mapping[ParameterName, Encoding]) -> list[dict[str, Any]]:
    """The inverse of `read_orbax_encodings`."""
    matrices: dict[Encoding, list[tuple[str, int | None]]] = defaultdict(list)
    for name, encoding in encodings.items():
        matrices[encoding].append((name.part.value, name.layer))
    return [
        {"values": encoding.values.value, "activations": encoding.activations.value, "matrices": names}
        for encoding, names in matrices.items()
    ]
