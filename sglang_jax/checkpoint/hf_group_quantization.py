"""Reads how folders of GPTQ, AWQ, FP8 in blocks and MXFP4 are quantised, from `quantization_config` of config.json."""

from __future__ import annotations

from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.checkpoint.encoding import ActivationScales, Encoding, ValueType
from sglang_jax.checkpoint.group_blocks import Levels
from sglang_jax.checkpoint.grouped_tensors import GroupLayout, GroupScheme
from sglang_jax.checkpoint.layer_patterns import NO_LAYERS, LayerPatterns
from sglang_jax.checkpoint.stored_quantization import Scheme, StoredQuantization, refuse

LEVELS = {4: Levels.INT4, 8: Levels.INT8}
_GPTQ_FORMATS = {None: GroupLayout.GPTQ, "gptq": GroupLayout.GPTQ, "gptq_v2": GroupLayout.GPTQ_V2}
_HEAD = LayerPatterns(names=frozenset({"lm_head"}))


def gptq(quantization: JsonFields) -> StoredQuantization:
    """GPTQ, as AutoGPTQ and GPTQModel write it. Layers without its tensors are plain."""
    stored = quantization.string("checkpoint_format")
    if stored not in _GPTQ_FORMATS:
        refuse(quantization, "checkpoint_format", "gptq, gptq_v2")
    if quantization.boolean("is_marlin_format"):
        refuse(quantization, "is_marlin_format", "false")
    if quantization.string("pack_dtype") not in (None, "int32"):
        refuse(quantization, "pack_dtype", "int32")
    _refuse_other_bits_of_layers(quantization)
    size = _size(quantization, "group_size")
    scheme = GroupScheme(
        _GPTQ_FORMATS[stored],
        _levels(quantization, "bits"),
        size,
        zeros=quantization.boolean("sym") is False,
        # Where a row is one group, the order in which inputs were quantised does not matter.
        ordered=size is None or not quantization.boolean("desc_act"),
    )
    plain = NO_LAYERS if quantization.boolean("lm_head") else _HEAD
    return StoredQuantization(quantization.file, {}, ignored=plain, by_tensors=scheme)


def awq(quantization: JsonFields) -> StoredQuantization:
    """AWQ, as AutoAWQ writes it. Layers without its tensors are plain."""
    version = quantization.string("version")
    if version is not None and version.lower() != "gemm":
        refuse(quantization, "version", "gemm")
    bits, size = ("bits", "group_size") if quantization.value("bits") is not None else ("w_bit", "q_group_size")
    levels = _levels(quantization, bits)
    if levels is not Levels.INT4:
        refuse(quantization, bits, "4")
    if quantization.boolean("zero_point") is False:
        refuse(quantization, "zero_point", "true")
    scheme = GroupScheme(GroupLayout.AWQ, levels, _size(quantization, size), zeros=True)
    return StoredQuantization(quantization.file, {}, ignored=_HEAD, by_tensors=scheme)


def float8(quantization: JsonFields) -> StoredQuantization:
    """FP8 with a scale for each square block, as DeepSeek and Qwen publish it, or for each matrix. In the first, layers
    without such scales are plain."""
    kind, inputs = quantization.string("fmt"), quantization.string("activation_scheme")
    if kind not in (None, "e4m3", "float8_e4m3fn"):
        refuse(quantization, "fmt", "e4m3")
    if quantization.value("weight_block_size") is None:
        return _float8_matrices(quantization, inputs)
    if inputs not in (None, "dynamic"):
        refuse(quantization, "activation_scheme", "dynamic")
    block = quantization.integers("weight_block_size")
    if len(block) != 2 or block[0] != block[1] or block[0] <= 0:
        refuse(quantization, "weight_block_size", "two equal numbers, such as [128, 128]")
    scheme = GroupScheme(GroupLayout.FLOAT8_INVERSE, Levels.FLOAT8_E4M3, block[0], zeros=False)
    return StoredQuantization(quantization.file, {}, ignored=_plain_modules(quantization), by_tensors=scheme)


def mxfp4(quantization: JsonFields) -> StoredQuantization:
    """MXFP4, as gpt-oss has it: of experts. Layers without its tensors are plain."""
    scheme = GroupScheme(GroupLayout.MXFP4_EXPERTS, Levels.FLOAT4_E2M1, 32, zeros=False)
    linear = LayerPatterns(names=frozenset({"Linear"}))
    return StoredQuantization(quantization.file, {}, ignored=linear, by_tensors=scheme)


def _float8_matrices(quantization: JsonFields, inputs: str | None) -> StoredQuantization:
    activations = {"static": ActivationScales.TENSOR, "dynamic": ActivationScales.TOKEN}
    if inputs not in activations:
        refuse(quantization, "activation_scheme", ", ".join(activations))
    scheme = Scheme(Encoding(ValueType.FLOAT8_E4M3, activations=activations[inputs]), per_row=False)
    return StoredQuantization(quantization.file, {"Linear": scheme}, ignored=_plain_modules(quantization))


def _plain_modules(quantization: JsonFields) -> LayerPatterns:
    plain = (quantization.strings(field) or () for field in ("ignored_layers", "modules_to_not_convert"))
    return LayerPatterns(modules=frozenset({"lm_head"}.union(*plain)))


def _levels(quantization: JsonFields, field: str) -> Levels:
    bits = quantization.integer(field)
    if bits not in LEVELS:
        refuse(quantization, field, "4, 8")
    return LEVELS[bits]


def _size(quantization: JsonFields, field: str) -> int | None:
    """Inputs of a group; None for a whole row, which is stored as -1."""
    size = quantization.integer(field)
    if size is None or size == 0 or size < -1:
        refuse(quantization, field, "a positive number, or -1 for whole rows")
    return None if size == -1 else size


def _refuse_other_bits_of_layers(quantization: JsonFields) -> None:
    """GPTQModel's `dynamic` has other settings for some layers, by pattern; with a `-` before it, those are plain."""
    dynamic = quantization.nested("dynamic")
    changed = [] if dynamic is None else [each for each in dynamic.values if not each.startswith("-:")]
    if changed:
        refuse(quantization, "dynamic", "only patterns of layers that are not quantised, which begin with -:")
