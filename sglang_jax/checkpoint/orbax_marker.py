"""What the marker of an Orbax checkpoint says beside its version, read without Orbax.

That is the scales of keys and values, and how matrices are stored that are not plain numbers.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_jax.architectures.manifest import ParameterName, manifest_of
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint.encoding import ActivationScales, Encoding, ValueType
from sglang_jax.checkpoint.kv_scales import KVScales
from sglang_jax.checkpoint.resolve import ORBAX_MARKER
from sglang_jax.errors import CheckpointError

KV_SCALES = "kv_scales"
ENCODINGS = "encodings"
"""Fields of the marker."""


def read_orbax_kv_scales(folder: Path, config: ModelConfig) -> KVScales | None:
    """The scales that were converted with the weights; None if there were none.

    **Raises:** `CheckpointError` for a marker that cannot be read, or that holds other things.
    """
    path = folder / ORBAX_MARKER
    try:
        stored = json.loads(path.read_bytes()).get(KV_SCALES)
        return None if stored is None else KVScales.from_json(stored, config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error


def read_orbax_encodings(folder: Path, config: ModelConfig) -> dict[ParameterName, Encoding]:
    """How the matrices are stored that are not plain numbers: those with a scale of each row.

    **Raises:** `CheckpointError` for a marker that cannot be read, or that holds other things.
    """
    path, specs = folder / ORBAX_MARKER, manifest_of(config).specs
    found: dict[ParameterName, Encoding] = {}
    try:
        for group in json.loads(path.read_bytes()).get(ENCODINGS, ()):
            encoding = Encoding(
                ValueType(group["values"]), None, "float32", activations=ActivationScales(group["activations"])
            )
            for part, layer in group["matrices"]:
                name = ParameterName(Part(part), layer=layer)
                if name not in specs:
                    raise KeyError(f"{part} of layer {layer}, which the model has not")
                found[name] = encoding
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}") from error
    return found


def encodings_to_json(encodings: Mapping[ParameterName, Encoding]) -> list[dict[str, Any]]:
    """What `read_orbax_encodings` reads."""
    matrices: dict[Encoding, list[tuple[str, int | None]]] = defaultdict(list)
    for name, encoding in encodings.items():
        matrices[encoding].append((name.part.value, name.layer))
    return [
        {"values": encoding.values.value, "activations": encoding.activations.value, "matrices": names}
        for encoding, names in matrices.items()
    ]
