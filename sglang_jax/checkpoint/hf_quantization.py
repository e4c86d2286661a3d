"""Reads how a Hugging Face folder quantises weights, keys and values: from `quantization_config` of config.json, or
from hf_quant_config.json.

Supported formats: compressed-tensors (as llm-compressor writes it) and ModelOpt's FP8. Both store weights in 8 bits
with a scale per row or per matrix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.checkpoint.encoding import ActivationScales, Encoding, ValueType
from sglang_jax.checkpoint.layer_patterns import NO_LAYERS, LayerPatterns, compiled, is_pattern, wildcards
from sglang_jax.config import KVCacheDtype
from sglang_jax.errors import CheckpointError, quote

MODELOPT_FILE = "hf_quant_config.json"
"""Written by ModelOpt next to config.json; its first versions wrote only this, and no field in config.json."""

_FIELD = "quantization_config"
_COMPRESSED, _MODELOPT = "compressed-tensors", "modelopt"
_KV_TYPES = {("float", 8): KVCacheDtype.FLOAT8_E4M3, ("int", 8): KVCacheDtype.INT8}
_VALUE_TYPES = {"float": ValueType.FLOAT8_E4M3, "int": ValueType.INT8}
_PACKED = "pack-quantized"
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", _PACKED)
_STATES = (None, "compressed", "frozen")
"""Early versions of llm-compressor wrote `frozen` for the same files."""

_INSTEAD = (
    "give a checkpoint in bfloat16, float16 or float32, one of 8 bits with scales per row or per matrix "
    "(compressed-tensors, or ModelOpt's FP8), or a GGUF file"
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of some layers are stored.

    - `per_row`: one scale per row; otherwise one per matrix.
    - `packed`: four values per 32-bit word (see `QuantizedReader`).
    """

    encoding: Encoding
    per_row: bool
    packed: bool = False


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """Which layers of a folder are quantised, and how.

    - `file`: the source of this information.
    - `targets`: schemes by layer name or torch class; None for plain weights. Layer names take precedence over
      patterns, and patterns over classes.
    - `patterns`: schemes by pattern; the first match counts.
    - `ignored`: layers that are plain in any case.
    """

    file: Path
    targets: Mapping[str, Scheme | None]
    patterns: tuple[tuple[re.Pattern[str], Scheme | None], ...] = ()
    ignored: LayerPatterns = NO_LAYERS

    def scheme(self, layer: str, layer_class: str) -> Scheme | None:
        """The scheme of a layer such as `model.layers.0.mlp.up_proj`, of a class such as `Linear`; None if plain."""
        if self.ignored.match(layer, layer_class):
            return None
        if layer in self.targets:
            return self.targets[layer]
        for pattern, scheme in self.patterns:
            if pattern.match(layer):
                return scheme
        return self.targets.get(layer_class)


def read_quantization(fields: JsonFields, beside: JsonFields | None = None) -> StoredQuantization | None:
    """How the weights of a folder are quantised; None if they are plain. `beside`: ModelOpt's file, used if config.json
    has no such field. Raises `CheckpointError` naming the file, the field and its value if it is not supported."""
    given = fields.value(_FIELD)
    if given is None:
        quantization = None if beside is None else beside.nested("quantization")
        return None if quantization is None else _modelopt(quantization)
    if not isinstance(given, dict):
        _refuse_method(fields, given)
    quantization = JsonFields(given, fields.file, f"{_FIELD}.")
    method = quantization.value("quant_method")
    if method == _COMPRESSED:
        return _compressed_tensors(quantization)
    if method == _MODELOPT:
        return _modelopt(quantization.nested("quantization") or quantization)
    _refuse_method(fields, method)


def kv_scales_made_for(fields: JsonFields, beside: JsonFields | None = None) -> KVCacheDtype | None:
    """The KV cache type for which the checkpoint's KV scales were made; None if neither file says. Raises
    `CheckpointError` for a scheme that one scale per kv head cannot express."""
    quantization = fields.nested(_FIELD)
    if quantization is None:
        quantization = None if beside is None else beside.nested("quantization")
    elif quantization.value("quant_method") == _MODELOPT:
        quantization = quantization.nested("quantization") or quantization
    if quantization is None:
        return None
    scheme = quantization.nested("kv_cache_scheme")
    if scheme is None:
        return _modelopt_kv_type(quantization)
    kind = (scheme.string("type") or "int", scheme.integer("num_bits") or 8)
    if kind not in _KV_TYPES or scheme.boolean("symmetric") is False or scheme.boolean("dynamic"):
        raise CheckpointError(
            f"{fields.file}: {scheme.within}type {kind[0]!r} of {kind[1]} bits, symmetric "
            f"{scheme.boolean('symmetric')}, dynamic {scheme.boolean('dynamic')} is not supported; supported: float or "
            "int of 8 bits, symmetric, not dynamic (or --kv-cache-dtype auto, which uses no scales)"
        )
    return _KV_TYPES[kind]


def _modelopt_kv_type(quantization: JsonFields) -> KVCacheDtype | None:
    algorithm = quantization.string("kv_cache_quant_algo")
    if algorithm is None:
        return None
    types = {"FP8": KVCacheDtype.FLOAT8_E4M3, "INT8": KVCacheDtype.INT8}
    if algorithm.upper() not in types:
        raise CheckpointError(
            f"{quantization.file}: {quantization.within}kv_cache_quant_algo is {quote(algorithm)}; supported: FP8, "
            "INT8 (or --kv-cache-dtype auto, which uses no scales)"
        )
    return types[algorithm.upper()]


def _refuse_method(fields: JsonFields, method: object) -> NoReturn:
    raise CheckpointError(f"{fields.file}: weights quantised by {quote(method)} are not supported; {_INSTEAD}")


def _refuse(fields: JsonFields, name: str, supported: str) -> NoReturn:
    raise CheckpointError(
        f"{fields.file}: {fields.within}{name} {quote(fields.value(name))} of quantised weights is not supported; "
        f"supported: {supported}; {_INSTEAD}"
    )


def _compressed_tensors(quantization: JsonFields) -> StoredQuantization | None:
    """Reads `config_groups`. Groups without `weights` only describe keys and values."""
    groups = quantization.nested("config_groups")
    targets: dict[str, Scheme | None] = {}
    for name in () if groups is None else groups.values:
        group = None if groups is None else groups.nested(name)
        if group is not None:
            scheme = None if group.value("weights") is None else _scheme(quantization, group)
            targets |= dict.fromkeys(group.strings("targets") or (), scheme)
    sparsity = quantization.nested("sparsity_config")
    if sparsity is not None and sparsity.values and sparsity.string("format") != "dense":
        _refuse(sparsity, "format", "dense")
    for other in ("transform_config", "moe_sparsity_config"):
        if quantization.value(other):
            _refuse(quantization, other, "none")
    if not any(targets.values()):
        return None
    if quantization.string("quantization_status") not in _STATES:
        _refuse(quantization, "quantization_status", " or ".join(_STATES[1:]))
    ignored = quantization.strings("ignore") or ()
    patterns = compiled(quantization, "config_groups", sorted(targets))
    return StoredQuantization(
        quantization.file,
        {target: scheme for target, scheme in targets.items() if not is_pattern(target)},
        tuple((pattern, targets[text]) for text, pattern in patterns.items()),
        LayerPatterns(
            names=frozenset(text for text in ignored if not is_pattern(text)),
            patterns=tuple(compiled(quantization, "ignore", ignored).values()),
        ),
    )


def _scheme(quantization: JsonFields, group: JsonFields) -> Scheme:
    of_group = group.string("format")
    packing = of_group or quantization.string("format")
    if packing not in _FORMATS:
        _refuse(group if of_group else quantization, "format", ", ".join(_FORMATS))
    if group.value("output_activations") is not None:
        _refuse(group, "output_activations", "none")
    weights = group.nested("weights")
    assert weights is not None
    values = _value_type(weights)
    if packing == _PACKED and values is not ValueType.INT8:
        _refuse(weights, "type", f"int, where the format is {_PACKED}")
    if weights.value("dynamic"):
        _refuse(weights, "dynamic", "false")
    strategy = _strategy(weights)
    if strategy not in ("tensor", "channel"):
        _refuse(weights, "strategy", "channel (a scale for each row) and tensor (one scale)")
    inputs = group.nested("input_activations")
    activations = ActivationScales.NONE if inputs is None else _activations(inputs, weights)
    encoding = Encoding(values, None, "float32", activations=activations)
    return Scheme(encoding, strategy == "channel", packing == _PACKED)


def _value_type(numbers: JsonFields) -> ValueType:
    kind = numbers.string("type") or "int"
    if kind not in _VALUE_TYPES:
        _refuse(numbers, "type", ", ".join(_VALUE_TYPES))
    if numbers.integer("num_bits") not in (None, 8):
        _refuse(numbers, "num_bits", "8")
    if numbers.boolean("symmetric") is False:
        _refuse(numbers, "symmetric", "true (without zero points)")
    return _VALUE_TYPES[kind]


def _strategy(numbers: JsonFields) -> str:
    """What shares a scale; files may leave it out if it follows from `group_size`."""
    size = numbers.integer("group_size")
    if size is not None and size > 0:
        _refuse(numbers, "group_size", "none (scales per row or per matrix)")
    if numbers.value("block_structure") is not None:
        _refuse(numbers, "block_structure", "none (scales per row or per matrix)")
    return numbers.string("strategy") or ("tensor" if size is None else "channel")


def _activations(inputs: JsonFields, weights: JsonFields) -> ActivationScales:
    if _value_type(inputs) is not _value_type(weights):
        _refuse(inputs, "type", f"that of the weights, {weights.string('type') or 'int'}")
    if inputs.value("dynamic") not in (None, True, False):
        _refuse(inputs, "dynamic", "true or false")
    if inputs.value("dynamic"):
        if _strategy(inputs) != "token":
            _refuse(inputs, "strategy", "token, where dynamic is true")
        return ActivationScales.TOKEN
    if _strategy(inputs) != "tensor":
        _refuse(inputs, "strategy", "tensor, where dynamic is false")
    return ActivationScales.TENSOR


def _modelopt(quantization: JsonFields) -> StoredQuantization | None:
    """ModelOpt's FP8: all linear layers except excluded ones have a scale, and their inputs too."""
    algorithm = quantization.string("quant_algo")
    if algorithm is None:
        return None
    if algorithm.upper() != "FP8":
        _refuse(quantization, "quant_algo", "FP8")
    # The first is in ModelOpt's file, the second in config.json.
    field = "exclude_modules" if quantization.value("exclude_modules") is not None else "ignore"
    encoding = Encoding(ValueType.FLOAT8_E4M3, None, "float32", activations=ActivationScales.TENSOR)
    linear = Scheme(encoding, per_row=False)
    return StoredQuantization(quantization.file, {"Linear": linear}, ignored=wildcards(quantization, field))
