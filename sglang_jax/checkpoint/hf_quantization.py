"""Reads how a Hugging Face folder quantises weights, keys and values: from `quantization_config` of config.json, or
from hf_quant_config.json.

Supported formats: compressed-tensors (as llm-compressor writes it) with scales per row, matrix, group or block;
ModelOpt's FP8 and NVFP4; and those of `hf_group_quantization`.
"""

from __future__ import annotations

from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.checkpoint.encoding import ActivationScales, Encoding, ValueType
from sglang_jax.checkpoint.group_blocks import Levels
from sglang_jax.checkpoint.grouped_tensors import GroupLayout, GroupScheme
from sglang_jax.checkpoint.hf_group_quantization import LEVELS, awq, float8, gptq, mxfp4
from sglang_jax.checkpoint.layer_patterns import LayerPatterns, compiled, is_pattern, wildcards
from sglang_jax.checkpoint.stored_quantization import (
    AnyScheme,
    Scheme,
    StoredQuantization,
    refuse,
    refuse_method,
)
from sglang_jax.config import KVCacheDtype
from sglang_jax.errors import CheckpointError, quote

MODELOPT_FILE = "hf_quant_config.json"
"""Written by ModelOpt next to config.json; its first versions wrote only this, and no field in config.json."""

_FIELD = "quantization_config"
_COMPRESSED, _MODELOPT = "compressed-tensors", "modelopt"
_METHODS = {"gptq": gptq, "awq": awq, "fp8": float8, "mxfp4": mxfp4}
_KV_TYPES = {("float", 8): KVCacheDtype.FLOAT8_E4M3, ("int", 8): KVCacheDtype.INT8}
_VALUE_TYPES = {"float": ValueType.FLOAT8_E4M3, "int": ValueType.INT8}
_PACKED = "pack-quantized"
_FLOAT4 = {
    "mxfp4-pack-quantized": (GroupLayout.MXFP4, "group", 32),
    "nvfp4-pack-quantized": (GroupLayout.NVFP4, "tensor_group", 16),
}
"""Formats of floats of 4 bits: what shares a scale, and how many weights."""

_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", _PACKED, *_FLOAT4)
_ORDERS: dict[object, bool] = {None: True, False: True, "weight": True, "static": True, "group": False, True: False}
"""Values of `actorder`, and whether the inputs of a group are neighbours."""

_STATES = (None, "compressed", "frozen")
"""Early versions of llm-compressor wrote `frozen` for the same files."""


def read_quantization(fields: JsonFields, beside: JsonFields | None = None) -> StoredQuantization | None:
    """How the weights of a folder are quantised; None if they are plain. `beside`: ModelOpt's file, used if config.json
    has no such field. Raises `CheckpointError` naming the file, the field and its value if it is not supported."""
    given = fields.value(_FIELD)
    if given is None:
        quantization = None if beside is None else beside.nested("quantization")
        return None if quantization is None else _modelopt(quantization)
    if not isinstance(given, dict):
        refuse_method(fields, given)
    quantization = JsonFields(given, fields.file, f"{_FIELD}.")
    method = quantization.value("quant_method")
    if method == _COMPRESSED:
        return _compressed_tensors(quantization)
    if method == _MODELOPT:
        return _modelopt(quantization.nested("quantization") or quantization)
    if method in _METHODS:
        return _METHODS[method](quantization)
    refuse_method(fields, method)


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


def _compressed_tensors(quantization: JsonFields) -> StoredQuantization | None:
    """Reads `config_groups`. Groups without `weights` only describe keys and values."""
    groups = quantization.nested("config_groups")
    targets: dict[str, AnyScheme | None] = {}
    for name in () if groups is None else groups.values:
        group = None if groups is None else groups.nested(name)
        if group is not None:
            scheme = None if group.value("weights") is None else _scheme(quantization, group)
            targets |= dict.fromkeys(group.strings("targets") or (), scheme)
    sparsity = quantization.nested("sparsity_config")
    if sparsity is not None and sparsity.values and sparsity.string("format") != "dense":
        refuse(sparsity, "format", "dense")
    for other in ("transform_config", "moe_sparsity_config"):
        if quantization.value(other):
            refuse(quantization, other, "none")
    if not any(targets.values()):
        return None
    if quantization.string("quantization_status") not in _STATES:
        refuse(quantization, "quantization_status", " or ".join(_STATES[1:]))
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


def _scheme(quantization: JsonFields, group: JsonFields) -> AnyScheme:
    of_group = group.string("format")
    packing = of_group or quantization.string("format")
    if packing not in _FORMATS:
        refuse(group if of_group else quantization, "format", ", ".join(_FORMATS))
    if group.value("output_activations") is not None:
        refuse(group, "output_activations", "none")
    weights = group.nested("weights")
    assert weights is not None
    if weights.value("dynamic"):
        refuse(weights, "dynamic", "false")
    if packing in _FLOAT4:
        return _float4_scheme(weights, *_FLOAT4[packing])
    strategy, inputs = _strategy(weights), group.nested("input_activations")
    bits, symmetric = weights.integer("num_bits") or 8, weights.boolean("symmetric") is not False
    if strategy in ("group", "block") or (strategy == "channel" and (bits != 8 or not symmetric)):
        return _group_scheme(weights, strategy, inputs, packed=packing == _PACKED)
    values = _value_type(weights)
    if packing == _PACKED and values is not ValueType.INT8:
        refuse(weights, "type", f"int, where the format is {_PACKED}")
    if strategy not in ("tensor", "channel"):
        refuse(weights, "strategy", "channel (a scale for each row), group, block, and tensor (one scale)")
    activations = ActivationScales.NONE if inputs is None else _activations(inputs, weights)
    return Scheme(Encoding(values, activations=activations), strategy == "channel", packing == _PACKED)


def _group_scheme(weights: JsonFields, strategy: str, inputs: JsonFields | None, *, packed: bool) -> GroupScheme:
    """Products do not round inputs for weights in groups; scales of inputs that are computed need not be stored."""
    if inputs is not None and not inputs.value("dynamic"):
        refuse(inputs, "dynamic", "true, where weights are in groups")
    kind, bits = weights.string("type") or "int", weights.integer("num_bits") or 8
    if kind == "float" and (bits != 8 or packed):
        refuse(weights, "num_bits", "8, of values of the type float that are not packed")
    if kind not in _VALUE_TYPES:
        refuse(weights, "type", ", ".join(_VALUE_TYPES))
    if bits not in LEVELS:
        refuse(weights, "num_bits", "4, 8")
    if bits == 4 and not packed:
        refuse(weights, "num_bits", "8, of values that are not packed")
    levels = Levels.FLOAT8_E4M3 if kind == "float" else LEVELS[bits]
    zeros = weights.boolean("symmetric") is False
    if zeros and kind == "float":
        refuse(weights, "symmetric", "true, for values of the type float")
    if strategy == "block":
        structure = weights.integers("block_structure") or ()
        if len(structure) != 2 or structure[0] != structure[1] or structure[0] <= 0 or kind != "float" or zeros:
            refuse(weights, "block_structure", "two equal numbers, for values of the type float")
        return GroupScheme(GroupLayout.FLOAT8, levels, structure[0], zeros=False)
    size = weights.integer("group_size") if strategy == "group" else None
    if strategy == "group" and (size is None or size <= 0):
        refuse(weights, "group_size", "a positive number, where the strategy is group")
    order = weights.value("actorder")
    if not isinstance(order, str | bool | None) or order not in _ORDERS:
        refuse(weights, "actorder", ", ".join(map(str, _ORDERS)))
    return GroupScheme(GroupLayout.COMPRESSED, levels, size, zeros, packed=packed, ordered=_ORDERS[order])


def _float4_scheme(weights: JsonFields, layout: GroupLayout, strategy: str, size: int) -> GroupScheme:
    """Products do not round inputs, whose scales are not read."""
    for field, wanted in (("num_bits", 4), ("type", "float"), ("strategy", strategy), ("group_size", size)):
        if weights.value(field) not in (wanted, None):
            refuse(weights, field, str(wanted))
    if weights.boolean("symmetric") is False:
        refuse(weights, "symmetric", "true")
    return GroupScheme(layout, Levels.FLOAT4_E2M1, size, zeros=False)


def _value_type(numbers: JsonFields) -> ValueType:
    kind = numbers.string("type") or "int"
    if kind not in _VALUE_TYPES:
        refuse(numbers, "type", ", ".join(_VALUE_TYPES))
    if numbers.integer("num_bits") not in (None, 8):
        refuse(numbers, "num_bits", "8")
    if numbers.boolean("symmetric") is False:
        refuse(numbers, "symmetric", "true (without zero points)")
    return _VALUE_TYPES[kind]


def _strategy(numbers: JsonFields) -> str:
    """What shares a scale; files may leave it out if it follows from `group_size` or `block_structure`."""
    strategy, size = numbers.string("strategy"), numbers.integer("group_size")
    if strategy is not None:
        return strategy
    if numbers.value("block_structure") is not None:
        return "block"
    if size is None:
        return "tensor"
    return "group" if size > 0 else "channel"


def _activations(inputs: JsonFields, weights: JsonFields) -> ActivationScales:
    if _value_type(inputs) is not _value_type(weights):
        refuse(inputs, "type", f"that of the weights, {weights.string('type') or 'int'}")
    if inputs.value("dynamic") not in (None, True, False):
        refuse(inputs, "dynamic", "true or false")
    if inputs.value("dynamic"):
        if _strategy(inputs) != "token":
            refuse(inputs, "strategy", "token, where dynamic is true")
        return ActivationScales.TOKEN
    if _strategy(inputs) != "tensor":
        refuse(inputs, "strategy", "tensor, where dynamic is false")
    return ActivationScales.TENSOR


def _modelopt(quantization: JsonFields) -> StoredQuantization | None:
    """ModelOpt's FP8 and NVFP4: all linear layers except excluded ones have a scale, and their inputs too."""
    algorithm = quantization.string("quant_algo")
    if algorithm is None:
        return None
    if algorithm.upper() not in ("FP8", "NVFP4"):
        refuse(quantization, "quant_algo", "FP8, NVFP4")
    # The first is in ModelOpt's file, the second in config.json.
    field = "exclude_modules" if quantization.value("exclude_modules") is not None else "ignore"
    encoding = Encoding(ValueType.FLOAT8_E4M3, activations=ActivationScales.TENSOR)
    linear: AnyScheme = Scheme(encoding, per_row=False)
    if algorithm.upper() == "NVFP4":
        if quantization.integer("group_size") not in (None, 16):
            refuse(quantization, "group_size", "16")
        linear = GroupScheme(GroupLayout.NVFP4_MODELOPT, Levels.FLOAT4_E2M1, 16, zeros=False)
    return StoredQuantization(quantization.file, {"Linear": linear}, ignored=wildcards(quantization, field))
