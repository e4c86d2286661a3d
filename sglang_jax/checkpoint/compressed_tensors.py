"""Matrices as compressed-tensors stores them, and their `quantization_config`: the reverse of `hf_quantization` and of
the readers of quantised folders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from sglang_jax.checkpoint.encoding import ActivationScales, Encoding, Stored, ValueType
from sglang_jax.checkpoint.group_blocks import GroupType, Levels
from sglang_jax.checkpoint.packed_words import packed_words
from sglang_jax.checkpoint.reader import Array, Role
from sglang_jax.config import KVCacheDtype

_PACKED, _FLOATS = "pack-quantized", "float-quantized"
_EXPERTS = r"re:.*\.experts\..*"
_KV_TYPES = {KVCacheDtype.FLOAT8_E4M3: "float", KVCacheDtype.INT8: "int"}


def tensors_of(stored: Stored) -> dict[str, Array]:
    """The tensors of a matrix `[out, in]`, by the end of their names. Integers are packed in int32 words; their scales
    have the dtype of the blocks, or float32 for a scale per row. Raises `ValueError` for an encoding that only readers
    have (zeros, blocks of GGUF files, stored input scales)."""
    _check(stored.encoding)
    values = stored.arrays[Role.VALUES]
    if stored.encoding.values is ValueType.FLOAT8_E4M3:
        return {"weight": values, "weight_scale": stored.arrays[Role.SCALES][:, None]}
    if isinstance(stored.encoding.values, GroupType):
        levels, scales, _ = stored.encoding.values.split(values)
        words = packed_words(levels.reshape(len(levels), -1), stored.encoding.values.levels.bits)
    else:
        words, scales = packed_words(values, 8), stored.arrays[Role.SCALES][:, None]
    return {"weight_packed": words, "weight_scale": scales, "weight_shape": np.array(stored.shape, np.int64)}


def quantization_config(
    encodings: Mapping[str, Encoding], ignored: Iterable[str], kv_type: KVCacheDtype | None = None
) -> dict[str, Any]:
    """The field `quantization_config` of config.json. `encodings`: of quantised layers, by name, at least one;
    `ignored`: names of plain layers; `kv_type`: the type that the stored scales of keys and values are for. The most
    frequent encoding is that of all linear layers; the layers of others are named before, because some readers take the
    first match. Raises `ValueError` as `tensors_of`."""
    layers: dict[Encoding, list[str]] = defaultdict(list)
    for layer, encoding in encodings.items():
        layers[encoding].append(layer)
    usual, *others = sorted(layers, key=lambda encoding: -len(layers[encoding]))
    targets = ["Linear"]
    if any(map(_is_expert, layers[usual])) and not any(_is_expert(name) for each in others for name in layers[each]):
        # transformers reads all experts by the first group that names some in a pattern, or else by the first of all.
        targets.append(_EXPERTS)
    groups = [*(_group(each, layers[each]) for each in others), _group(usual, targets)]
    return {
        "quant_method": "compressed-tensors",
        "format": _format(usual),
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": list(ignored),
        "kv_cache_scheme": None if kv_type is None else _numbers(_KV_TYPES[kv_type], 8, "tensor"),
    }


def _is_expert(layer: str) -> bool:
    return ".experts." in layer


def _group(encoding: Encoding, targets: list[str]) -> dict[str, Any]:
    _check(encoding)
    values, inputs = encoding.values, None
    if isinstance(values, GroupType):
        weights = _numbers("int", values.levels.bits, "group") | {"group_size": values.weights}
    else:
        weights = _numbers("float" if values is ValueType.FLOAT8_E4M3 else "int", 8, "channel")
    if encoding.activations is ActivationScales.TOKEN:
        inputs = weights | {"strategy": "token", "dynamic": True}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "format": _format(encoding),
    }


def _numbers(kind: str, bits: int, strategy: str) -> dict[str, Any]:
    return {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": True, "dynamic": False}


def _format(encoding: Encoding) -> str:
    return _FLOATS if encoding.values is ValueType.FLOAT8_E4M3 else _PACKED


def _check(encoding: Encoding) -> None:
    values = encoding.values
    wanted = (
        values.levels is not Levels.FLOAT8_E4M3 and not values.zeros
        if isinstance(values, GroupType)
        else isinstance(values, ValueType)
    )
    rounds = encoding.activations is not ActivationScales.NONE
    known = (values is ValueType.FLOAT8_E4M3 and encoding.activations is ActivationScales.TOKEN) or not rounds
    if not wanted or not known:
        raise ValueError(f"{values.value} with input scales per {encoding.activations.value} is not written")
