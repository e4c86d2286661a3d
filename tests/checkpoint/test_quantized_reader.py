"""Folders with weights in 8 bits: read as compressed-tensors reads them, whole, as shards, and as stored values."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle import apply_quantization_config
from helpers.kv_scale_checkpoints import kv_scales_of
from helpers.quantized_checkpoints import (
    IGNORED,
    Quantised,
    Tensors,
    make_quantised_checkpoint,
    quantise,
    quantise_as_modelopt,
    scheme_of,
    set_quantization,
    tensors_of,
    write_plain_twin,
    write_tensors,
)
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax.architectures.manifest import ParameterName, manifest_of
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint import ParameterReader, open_checkpoint
from sglang_jax.checkpoint.encoding import BLOCKS, ActivationScales, Encoding, Stored, ValueType
from sglang_jax.checkpoint.ggml_blocks import BlockType
from sglang_jax.checkpoint.quantized_reader import KeptArrays
from sglang_jax.checkpoint.reader import Array, Index, Role
from sglang_jax.checkpoint.safetensors_reader import SafetensorsReader
from sglang_jax.config import KVCacheDtype, ModelImpl
from sglang_jax.errors import CheckpointError

FP8_DYNAMIC = Encoding(ValueType.FLOAT8_E4M3, activations=ActivationScales.TOKEN)
FP8_STATIC = Encoding(ValueType.FLOAT8_E4M3, activations=ActivationScales.TENSOR)
INT8_DYNAMIC = Encoding(ValueType.INT8, activations=ActivationScales.TOKEN)
INT8_PLAIN = Encoding(ValueType.INT8)

ENCODINGS = {
    Quantised.FP8_CHANNEL: FP8_DYNAMIC,
    Quantised.FP8_TENSOR: FP8_STATIC,
    Quantised.INT8_W8A8: INT8_DYNAMIC,
    **dict.fromkeys((Quantised.INT8_W8A16, Quantised.PACKED, Quantised.PACKED_TENSOR), INT8_PLAIN),
    Quantised.MODELOPT: FP8_STATIC,
}

WHOLE_HEADS = {Part.QUERY, Part.KEY, Part.VALUE, Part.OUTPUT_GATE, Part.QUERY_NORM, Part.KEY_NORM}


def parameters(folder: Path) -> ParameterReader:
    opened = open_checkpoint(str(folder))
    assert opened.reader is not None
    return ParameterReader(opened.reader, opened.config)


def changed(folder: Path, change: Callable[[Tensors], object]) -> Path:
    """A folder whose tensors were modified by `change`."""
    tensors = tensors_of(folder)
    change(tensors)
    write_tensors(folder, tensors)
    return folder


def some_shard(name: ParameterName, shape: tuple[int, ...], random: np.random.Generator) -> Index:
    """A shard that is not empty; where rows make up heads, all rows."""
    ends = [np.sort(random.choice(size + 1, 2, replace=False)) for size in shape]
    index = tuple(slice(int(first), int(last)) for first, last in ends)
    return (slice(None), *index[1:]) if name.part in WHOLE_HEADS else index


def faults(quantised: ParameterReader, plain: ParameterReader, random: np.random.Generator) -> list[str]:
    """Parameters that differ from those of the unquantised twin: dequantised and as stored, whole and as shards."""
    found = []
    for name, spec in manifest_of(plain.config).specs.items():
        for index in (None, some_shard(name, spec.shape, random)):
            expected = plain.read(name, index)
            if not np.array_equal(quantised.read(name, index), expected):
                found.append(f"read {name}")
            encoding = quantised.encoding(name, index)
            if encoding is None:
                continue
            stored = quantised.read_stored(name, index)
            shapes = {stored.arrays[role].shape for role in encoding.roles if role is not Role.VALUES}
            if stored.shape != expected.shape or shapes != {expected.shape[:-1]}:
                found.append(f"shapes of {name}")
            elif not np.allclose(stored.widened(), expected, rtol=3e-7, atol=0):  # factors are applied first
                found.append(f"stored {name}")
    return found


@pytest.mark.parametrize("kind", Quantised)
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_every_format_is_read(architecture: str, kind: Quantised, tmp_path: Path) -> None:
    # rows that do not fill their words
    widths = {"intermediate_size": 130, "moe_intermediate_size": 47}
    weights = make_quantised_checkpoint(tmp_path / "a", architecture, kind, **widths)
    quantised = parameters(tmp_path / "a")
    assert not faults(
        quantised, parameters(write_plain_twin(tmp_path / "a", weights, tmp_path / "b")), np.random.default_rng(0)
    )
    plain = {Part.EMBEDDING, Part.HEAD, Part.ROUTER}
    for name, spec in manifest_of(quantised.config).specs.items():
        assert quantised.encoding(name) == (ENCODINGS[kind] if spec.is_matrix and name.part not in plain else None)


MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "mlp_only_layers": [1]},
    "qwen2_moe": {"num_experts": 4},
    "phi3": {"pad_token_id": 0},
    "falcon_h1": {},
    "cohere2": {"num_hidden_layers": 2},  # rows in pairs
    "qwen3_next": {"num_experts": 4},  # queries and gates alternate; a tensor has four parameters of each key head
}
_KINDS = [kind for kind in Quantised if kind is not Quantised.MODELOPT]
_TARGETS = [
    ("Linear",),
    (r"re:.*self_attn\.[qk]_proj$", "model.layers.1.self_attn.v_proj", "Embedding"),
    (r"re:.*(down|out)_proj", "Linear"),
    ("re:model.layers.1.", r"re:.*experts\.[0-2]\..*"),
]
_IGNORED = [(), IGNORED, ("re:.*gate", "model.layers.0.mlp.up_proj", r"re:.*experts\.1\.down"), ("Embedding",)]


@pytest.mark.parametrize("architecture", MODELS)
def test_any_config_groups_are_matched(architecture: str, tmp_path: Path) -> None:
    """Several groups, names, patterns and classes, where the order matters; each tensor as compressed-tensors
    matches and computes it."""
    random = np.random.default_rng(sum(architecture.encode()))
    stored = 0
    for number in range(4):
        folder = make_tiny_checkpoint(tmp_path / f"{number}", architecture, **MODELS[architecture])
        chosen = random.permutation(len(_TARGETS))[: random.integers(1, 4)]
        schemes = [scheme_of(_KINDS[random.integers(len(_KINDS))], *_TARGETS[each]) for each in chosen]
        weights = quantise(folder, schemes, _IGNORED[random.integers(len(_IGNORED))])
        quantised = parameters(folder)
        twin = parameters(write_plain_twin(folder, weights, tmp_path / f"{number}-plain"))
        assert not faults(quantised, twin, random)
        stored += sum(quantised.encoding(name) is not None for name in manifest_of(twin.config).specs)
        check_inputs(quantised, folder)
    assert stored


def check_inputs(quantised: ParameterReader, folder: Path) -> None:
    """Each row has the input scale stored with its tensor."""
    tensors = tensors_of(folder)
    for name, spec in manifest_of(quantised.config).specs.items():
        encoding = quantised.encoding(name)
        if encoding is None or encoding.activations is not ActivationScales.TENSOR:
            continue
        names = [spec.tensor] if not spec.places else [spec.places[0].tensor_of(e) for e in range(spec.shape[0])]
        expected = np.stack([tensors[each.replace(".weight", ".input_scale")].numpy() for each in names])
        found = quantised.read_arrays(name, (Role.INPUT_SCALE,))[Role.INPUT_SCALE]
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found.reshape(len(names), -1), np.tile(expected, spec.shape[-2]))


def test_shards_of_a_fused_matrix_keep_their_scales(tmp_path: Path) -> None:
    """Worked out for rows of one tensor that hold queries, keys and values, and for a tensor with one scale."""
    folder = make_tiny_checkpoint(tmp_path, "phi3", pad_token_id=0)
    quantise(folder, [scheme_of(Quantised.FP8_CHANNEL, "Linear")], IGNORED)
    name = "model.layers.1.self_attn.qkv_proj.weight_scale"
    scales = tensors_of(folder)[name][:, 0].numpy()
    quantised, rows = parameters(folder), {Part.QUERY: (0, 64), Part.KEY: (64, 96), Part.VALUE: (96, 128)}
    for part, (first, last) in rows.items():
        stored = quantised.read_stored(ParameterName(part, layer=1))
        np.testing.assert_array_equal(stored.arrays[Role.SCALES], scales[first:last])
    joined = Stored.stacked([quantised.read_stored(ParameterName(part, layer=1)) for part in rows])
    np.testing.assert_array_equal(joined.arrays[Role.SCALES], scales)
    assert joined.shape == (128, 64)
    assert joined.encoding.nbytes(128, 64) == 128 * 64 + 128 * 4


def test_experts_are_stacked_if_they_have_one_scheme(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "qwen3_moe")
    schemes = [scheme_of(Quantised.INT8_W8A8, r"re:.*experts\.[0-3]\."), scheme_of(Quantised.INT8_W8A16, "Linear")]
    quantise(folder, schemes, [*IGNORED, r"re:.*experts\.5\."])
    quantised, gate = parameters(folder), ParameterName(Part.EXPERT_GATE, layer=0)
    assert quantised.encoding(gate) is None
    assert quantised.encoding(gate, (slice(3, 5),)) is None
    assert quantised.encoding(gate, (slice(5, 6),)) is None
    assert quantised.encoding(gate, (slice(4, 5),)) == INT8_PLAIN
    index = (slice(1, 4), slice(3, 40), slice(5, 7))
    assert quantised.encoding(gate, index) == INT8_DYNAMIC
    up = ParameterName(Part.EXPERT_UP, layer=0)
    both = Stored.stacked([quantised.read_stored(each, index) for each in (gate, up)])
    assert both.shape == (3, 74, 2)
    expected = np.concatenate([quantised.read(each, index) for each in (gate, up)], axis=1)
    np.testing.assert_array_equal(both.widened(), expected)
    np.testing.assert_array_equal(both.of_rows(lambda rows: rows[:, ::-1]).widened(), expected[:, ::-1])


def test_a_model_that_compressed_tensors_saved_itself(tmp_path: Path) -> None:
    """With compressed-tensors' names, formats, scale shapes and config."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from helpers.tiny_models import make_tiny_model

    model = make_tiny_model("qwen3")
    kinds = [
        (Quantised.FP8_TENSOR, r"re:.*self_attn\..*"),
        (Quantised.PACKED, r"re:.*(gate|down)_proj$"),
        (Quantised.INT8_W8A16, "Linear"),
    ]
    schemes = [scheme_of(*each) for each in kinds]
    groups: dict[str, QuantizationScheme] = {f"group_{number}": scheme for number, scheme in enumerate(schemes)}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]), show_progress=False)
    for module in model.modules():
        for parameter in ("weight_scale", "input_scale"):
            if parameter in module._parameters:
                module._parameters[parameter].data.uniform_(0.01, 0.02)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    compressor.decompress_model(model)
    quantised = open_checkpoint(str(tmp_path)).reader
    assert quantised is not None
    state = model.state_dict().items()
    plain = {name: value.detach().numpy() for name, value in state if not re.search("_(scale|zero_point|shape)$", name)}
    assert quantised.names() == plain.keys()
    assert not [name for name in plain if not np.array_equal(quantised.read(name), plain[name])]
    names = sorted(name for name in plain if quantised.encoding(name) is not None)
    assert len(names) == 14
    assert {quantised.encoding(name) for name in names} == {FP8_STATIC, INT8_PLAIN}


def refusal(folder: Path) -> str:
    """The error of opening a folder or of reading all of it."""
    with pytest.raises(CheckpointError) as raised:
        read_all(folder)
    return str(raised.value)


def read_all(folder: Path) -> None:
    reader = open_checkpoint(str(folder)).reader
    assert reader is not None
    for name in sorted(reader.names()):
        reader.read(name, (slice(1, None),))


STEM = "model.layers.1.mlp.up_proj"


def test_tensors_that_are_not_as_config_json_says_are_all_named(tmp_path: Path) -> None:
    make_quantised_checkpoint(tmp_path, "qwen3", Quantised.FP8_CHANNEL)

    def damage(tensors: Tensors) -> None:
        layer = "model.layers.0"
        del tensors[f"{layer}.self_attn.q_proj.weight_scale"]
        tensors[f"{layer}.self_attn.k_proj.weight_scale"] = torch.ones(1)
        tensors[f"{layer}.self_attn.v_proj.weight_scale"] = torch.ones((64, 1), dtype=torch.int8)
        tensors[f"{layer}.self_attn.o_proj.weight"] = torch.ones((64, 128), dtype=torch.int8)
        tensors[f"{layer}.mlp.up_proj.weight"] = tensors[f"{layer}.mlp.up_proj.weight"].float()
        tensors[f"{layer}.mlp.up_proj.weight_zero_point"] = torch.zeros((128, 1), dtype=torch.int8)
        tensors[f"{layer}.mlp.down_proj.input_scale"] = torch.ones(1)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
        tensors["lm_head.weight_scale"] = torch.ones((384, 1))
        tensors[f"{layer}.input_layernorm.weight"] = torch.ones(64, dtype=torch.int8)
        tensors["mtp.fc.weight_scale"] = torch.ones(1)

    told = refusal(changed(tmp_path, damage))
    assert "not those that" in told
    assert told.splitlines()[1:] == [
        "  extra: lm_head.weight is stored as float8_e4m3fn, and is not to be quantised",
        "  extra: lm_head.weight_scale is a scale of a weight that is not quantised",
        "  extra: model.layers.0.input_layernorm.weight is stored as int8, and is not to be quantised",
        "  extra: model.layers.0.mlp.down_proj.input_scale is a scale of an input that is not to have one",
        "  misshapen: model.layers.0.self_attn.k_proj.weight_scale is (1,), it must be (64, 1)",
        "  missing: model.layers.0.self_attn.q_proj.weight_scale",
        "  mistyped: model.layers.0.mlp.up_proj.weight is stored as plain numbers, it is to be quantised to "
        "float8_e4m3fn",
        "  mistyped: model.layers.0.self_attn.o_proj.weight is stored as int8, it is to be quantised to float8_e4m3fn",
        "  mistyped: model.layers.0.self_attn.v_proj.weight_scale must be float32, bfloat16 or float16",
        "  unsupported: model.layers.0.mlp.up_proj.weight_zero_point (quantised weights and inputs may have no zero "
        "points)",
    ]


def test_packed_tensors_that_are_not_as_config_json_says_are_all_named(tmp_path: Path) -> None:
    make_quantised_checkpoint(tmp_path, "qwen3", Quantised.PACKED)

    def damage(tensors: Tensors) -> None:
        layer = "model.layers.0"
        tensors[f"{layer}.self_attn.q_proj.weight_packed"] = torch.ones((128, 16), dtype=torch.int8)
        del tensors[f"{layer}.self_attn.k_proj.weight_shape"]
        tensors[f"{layer}.self_attn.v_proj.weight_shape"] = torch.ones(2)
        tensors[f"{layer}.self_attn.o_proj.weight_shape"] = torch.ones(3, dtype=torch.int64)
        tensors[f"{layer}.mlp.up_proj.weight"] = torch.ones((128, 64), dtype=torch.int8)
        del tensors[f"{layer}.mlp.up_proj.weight_packed"]
        tensors[f"{layer}.mlp.gate_proj.weight"] = torch.ones((128, 64))
        tensors[f"{layer}.mlp.down_proj.weight_scale"] = torch.ones(1)
        tensors["lm_head.weight_packed"] = torch.ones((384, 16), dtype=torch.int32)

    told = refusal(changed(tmp_path, damage))
    assert told.splitlines()[1:] == [
        "  extra: lm_head.weight_packed is stored as int32, and is not to be quantised",
        "  extra: model.layers.0.mlp.up_proj.weight_shape is a shape of a weight that is not packed",
        "  misshapen: model.layers.0.mlp.down_proj.weight_scale is (1,), it must be (64, 1)",
        "  missing: model.layers.0.self_attn.k_proj.weight_shape",
        "  mistyped: model.layers.0.mlp.gate_proj.weight is stored as plain numbers, it is to be in "
        "model.layers.0.mlp.gate_proj.weight_packed",
        "  mistyped: model.layers.0.mlp.up_proj.weight is stored as int8, it is to be in "
        "model.layers.0.mlp.up_proj.weight_packed",
        "  mistyped: model.layers.0.self_attn.o_proj.weight_shape must be two numbers of int64",
        "  mistyped: model.layers.0.self_attn.q_proj.weight_packed is stored as int8, it is to be packed in int32",
        "  mistyped: model.layers.0.self_attn.v_proj.weight_shape must be two numbers of int64",
    ]


def test_weights_may_only_be_packed_where_config_json_says_so(tmp_path: Path) -> None:
    make_quantised_checkpoint(tmp_path, "qwen3", Quantised.PACKED)
    fields = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    fields["config_groups"]["group_0"]["format"] = "naive-quantized"
    set_quantization(tmp_path, fields | {"format": "naive-quantized"})
    assert f"extra: {STEM}.weight_packed is stored as int32, and is not to be packed" in refusal(tmp_path)


def test_shapes_of_packed_weights_must_be_the_models(tmp_path: Path) -> None:
    """Rows of 130 and of 132 have equally many words."""
    make_quantised_checkpoint(tmp_path, "qwen3", Quantised.PACKED, intermediate_size=130)
    name = "model.layers.1.mlp.down_proj.weight"

    def widen(tensors: Tensors) -> None:
        tensors[f"{name}_shape"][1] = 132

    assert refusal(changed(tmp_path, widen)) == f"{name}_shape is [64, 132], the config requires [64, 130]"

    def cut(tensors: Tensors) -> None:
        tensors[f"{name}_packed"] = tensors[f"{name}_packed"][:, 1:]

    assert f"misshapen: {name} is (64, 128), the config requires (64, 130)" in refusal(changed(tmp_path, cut))


def test_scales_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By several threads, in parts, and again; a failed read is retried."""
    make_quantised_checkpoint(tmp_path, "qwen3", Quantised.PACKED)
    quantised = parameters(tmp_path)
    reads: list[str] = []
    read = SafetensorsReader.read

    def slow(self: SafetensorsReader, name: str, index: Index | None = None) -> Array:
        reads.append(name)
        time.sleep(0.05)
        if len(reads) == 1:
            raise CheckpointError("no network")
        return read(self, name, index)

    monkeypatch.setattr(SafetensorsReader, "read", slow)
    up = ParameterName(Part.UP, layer=1)
    with pytest.raises(CheckpointError, match="no network"):
        quantised.read(up)
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda first: quantised.read(up, (slice(first, first + 16),)), range(0, 128, 16)))
    assert reads == [f"{STEM}.weight_scale"] * 2
    np.testing.assert_array_equal(np.concatenate(parts), quantised.read(up))


def test_few_arrays_are_cached() -> None:
    reads: list[str] = []

    def read(name: str) -> Array:
        reads.append(name)
        return np.array([len(reads)])

    kept = KeptArrays(read, most=2)
    assert [kept.get(name).item() for name in "abacab"] == [1, 2, 1, 3, 1, 4]
    assert "".join(reads) == "abcb"


@pytest.mark.parametrize("value", [0.0, -1.5, float("nan"), float("inf")])
def test_an_invalid_scale_is_named_when_it_is_read(value: float, tmp_path: Path) -> None:
    make_quantised_checkpoint(tmp_path, "qwen3", Quantised.INT8_W8A16)
    changed(tmp_path, lambda tensors: tensors[f"{STEM}.weight_scale"][77].fill_(value))
    assert refusal(tmp_path).startswith(f"{STEM}.weight_scale has the scale {value:g}; scales must be positive")
    quantised = parameters(tmp_path)
    quantised.read(ParameterName(Part.UP, layer=1), (slice(0, 77),))  # the other rows are valid


def test_files_of_8_bits_without_a_config_are_refused_as_before(tmp_path: Path) -> None:
    make_quantised_checkpoint(tmp_path, "qwen3", Quantised.FP8_CHANNEL)
    set_quantization(tmp_path, None)
    assert "extra: model.layers.0.mlp.down_proj.weight_scale (64, 1)" in refusal(tmp_path)

    def without_scales(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("_scale")]:
            del tensors[name]

    changed(tmp_path, without_scales)
    assert "is stored as F8_E4M3; supported: BF16, F16, F32" in refusal(tmp_path)


def test_scales_of_16_bits_and_axes_of_one_are_read(tmp_path: Path) -> None:
    """As vLLM reads them: `[out]` and `[out, 1]`, `[]` and `[1]`; float32 or not."""
    weights = make_quantised_checkpoint(tmp_path, "qwen3", Quantised.FP8_TENSOR)

    def narrow(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("_scale")]:
            tensors[name] = (tensors[name] * 0 + 0.0625).to(torch.bfloat16).reshape([])

    before = tensors_of(tmp_path)[f"{STEM}.weight_scale"].item()
    found = parameters(changed(tmp_path, narrow)).read(ParameterName(Part.UP, layer=1))
    np.testing.assert_allclose(found, weights[f"{STEM}.weight"] / before * 0.0625, rtol=1e-6)


WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}


def config_of(of_all: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """A valid `quantization_config` apart from changes: `weights`, `inputs` and other entries of its group."""
    first = {
        "targets": ["Linear"],
        "weights": WEIGHTS | group.pop("weights", {}),
        "input_activations": INPUTS | group.pop("inputs", {}),
        **group,
    }
    fields = {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"}
    return fields | {"config_groups": {"group_0": first}, "ignore": ["lm_head"]} | of_all


@pytest.mark.parametrize(
    ("of_all", "group", "words"),
    [
        ({"format": "dense"}, {}, r"config\.format 'dense' .*; supported: float-quantized, int-quanti"),
        (
            {"format": "pack-quantized"},
            {},
            r"weights\.type 'float' .*supported: int, where the format is pack-quantized",
        ),
        ({}, {"format": "pack-quantized", "weights": {"type": "int", "num_bits": 3}}, r"num_bits 3 .*supported: 4, 8"),
        ({}, {"format": "marlin-24"}, r"group_0\.format 'marlin-24'"),
        ({"quantization_status": "initialized"}, {}, "quantization_status 'initialized' .* compressed or frozen"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, {}, r"sparsity_config\.format 'sparse-24-bitmask'"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, {}, r"transform_config .*supported: none"),
        ({"config_groups": {"W8A8": ["Linear"]}}, {}, r"config_groups\.W8A8 is .* it must be an object"),
        ({}, {"weights": {"num_bits": 4}}, r"group_0\.weights\.num_bits 4 .*supported: 8"),
        ({}, {"weights": {"type": "nvfp"}}, r"weights\.type 'nvfp' .*supported: float, int"),
        ({}, {"weights": {"symmetric": False}}, r"weights\.symmetric False .*for values of the type float"),
        ({}, {"weights": {"strategy": "group", "group_size": 0}}, r"weights\.group_size 0 .*a positive number"),
        ({}, {"weights": {"strategy": "block", "block_structure": [128, 64]}}, r"block_structure \[128, 64\]"),
        ({}, {"weights": {"strategy": "tensor_group"}}, r"weights\.strategy 'tensor_group'"),
        ({}, {"weights": {"dynamic": True}}, r"weights\.dynamic True"),
        ({}, {"inputs": {"type": "int"}}, r"input_activations\.type 'int' .*that of the weights, float"),
        ({}, {"inputs": {"num_bits": 4}}, r"input_activations\.num_bits 4"),
        ({}, {"inputs": {"symmetric": False}}, r"input_activations\.symmetric False"),
        ({}, {"inputs": {"strategy": "tensor"}}, r"input_activations\.strategy 'tensor' .*token, where dynamic"),
        ({}, {"inputs": {"dynamic": False}}, r"input_activations\.strategy 'token' .*tensor, where dynamic is false"),
        ({}, {"inputs": {"dynamic": "local"}}, r"input_activations\.dynamic 'local'"),
        ({}, {"output_activations": WEIGHTS}, r"group_0\.output_activations "),
        ({}, {"targets": ["re:(a+)+b"]}, r"the pattern '\(a\+\)\+b', which repeats a group"),
        ({"ignore": ["re:" + ".*x" * 9]}, {}, r"\.ignore has the pattern .*512 characters and 5 repetitions"),
        ({"ignore": ["re:(a"]}, {}, "is not a regular expression: missing"),
        ({"ignore": [f"re:{number}" for number in range(65)]}, {}, "ignore has 65 patterns, it may have 64"),
        *[
            ({"quant_method": method}, {}, f"weights quantised by {method!r} are not supported; give a checkpoint")
            for method in ("fbgemm_fp8", "bitsandbytes", "quark", None)
        ],
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*x"] * 1025},
            {},
            "1025 names with .*, it may have 1024",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, {}, "'W4A8_AWQ' .*supported: FP8, NVFP4;"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
            {},
            "group_size 32 .*supported: 16;",
        ),
    ],
)
def test_unsupported_schemes_are_refused_by_name(
    of_all: dict[str, Any], group: dict[str, Any], words: str, config_folder: Path
) -> None:
    set_quantization(config_folder, config_of(of_all, dict(group)))
    told = refusal(config_folder)
    assert told.startswith(f"{config_folder / 'config.json'}: ")
    assert re.search(words, told), told


@pytest.fixture(scope="module")
def config_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the default format, with a config for tests to change."""
    folder = tmp_path_factory.mktemp("config")
    make_quantised_checkpoint(folder, "qwen3", Quantised.FP8_CHANNEL)
    set_quantization(folder, config_of({}, {}))
    parameters(folder)
    return folder


def test_missing_fields_have_defaults(config_folder: Path) -> None:
    """The first versions of the tool wrote fewer fields, and `frozen`."""
    short = {"num_bits": 8, "type": "float"}
    config = config_of({"quantization_status": "frozen"}, {})
    config["config_groups"]["group_0"]["input_activations"] = None
    config["config_groups"]["group_0"]["weights"] = short
    set_quantization(config_folder, config)
    assert "weight_scale is (64, 1), it must be one number" in refusal(config_folder)
    config["config_groups"]["group_0"]["weights"] = short | {"group_size": -1}
    set_quantization(config_folder, config)
    quantised = parameters(config_folder)
    assert quantised.encoding(ParameterName(Part.UP, layer=0)) == replace(
        FP8_DYNAMIC, activations=ActivationScales.NONE
    )


def test_modelopts_older_separate_config_file(tmp_path: Path) -> None:
    """In a separate file, with names that have a `*` and the name of a module whose layers are meant; and key
    scales."""
    make_tiny_checkpoint(tmp_path, "qwen3")
    weights = quantise_as_modelopt(tmp_path)

    def widen(tensors: Tensors) -> None:
        for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
            tensors[f"{name}.weight"] = torch.from_numpy(weights[f"{name}.weight"])
            del tensors[f"{name}.weight_scale"], tensors[f"{name}.input_scale"]
        for layer in range(2):
            for side in "kv":
                name = f"model.layers.{layer}.self_attn.{side}_proj.{side}_scale"
                tensors[name] = torch.tensor(0.5 + layer)

    changed(tmp_path, widen)
    set_quantization(tmp_path, None)
    fields = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    excluded = ["lm_head", "model.layers.0*.q_proj", "model.layers.1.mlp"]
    for number, names in enumerate([excluded, excluded[:2]]):
        file = {"producer": {"name": "modelopt"}, "quantization": fields | {"exclude_modules": names}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(file))
        told = refusal(tmp_path)
        assert ("mlp.up_proj.weight is stored as float8_e4m3fn, and is not" in told) is (number == 0)
        assert ("model.layers.1.mlp.down_proj.weight is stored as plain numbers" in told) is (number == 1)
    file["quantization"]["exclude_modules"] = [*excluded[:2], "*.1.mlp.down_proj"]
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(file))
    opened = open_checkpoint(str(tmp_path))
    assert opened.reader is not None
    assert not [name for name in weights if not np.array_equal(opened.reader.read(name), weights[name])]
    assert opened.kv_scales_made_for() is KVCacheDtype.FLOAT8_E4M3
    assert kv_scales_of(opened).tolist() == [[[0.5, 0.5]] * 2, [[1.5, 1.5]] * 2]


def test_quantised_heads_and_embeddings(tmp_path: Path) -> None:
    """A head may be quantised, also where config.json ties it; embeddings are dequantised when read."""
    make_tiny_checkpoint(tmp_path, "qwen3")
    weights = quantise(tmp_path, [scheme_of(Quantised.INT8_W8A16, "Linear", "Embedding")])
    quantised = parameters(tmp_path)
    assert quantised.encoding(ParameterName(Part.HEAD)) == INT8_PLAIN
    embedding = ParameterName(Part.EMBEDDING)
    assert quantised.encoding(embedding) is None
    np.testing.assert_array_equal(quantised.read(embedding), weights["model.embed_tokens.weight"])
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"tie_word_embeddings": True}))
    opened = open_checkpoint(str(tmp_path))
    assert not opened.config.tie_word_embeddings
    np.testing.assert_array_equal(parameters(tmp_path).read(ParameterName(Part.HEAD)), weights["lm_head.weight"])


def test_routers_may_be_plain_though_all_linear_layers_are_quantised(tmp_path: Path) -> None:
    """In transformers 5 they are not linear layers; in earlier versions they are, and may be quantised."""
    make_quantised_checkpoint(tmp_path, "qwen3_moe", Quantised.INT8_W8A8)
    fields = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    set_quantization(tmp_path, fields | {"ignore": ["lm_head"]})
    assert parameters(tmp_path).encoding(ParameterName(Part.ROUTER, layer=0)) is None
    set_quantization(tmp_path, fields | {"ignore": [r"re:.*mlp\.gate$"]})
    assert "lm_head.weight is stored as plain numbers" in refusal(tmp_path)


def test_shards_that_cut_through_blocks_have_no_encoding() -> None:
    q8_0 = BLOCKS[BlockType.Q8_0]
    assert [q8_0.allows(slice(*ends), 96) for ends in ((0, 96), (32, 64), (0, 40), (8, 40))] == [
        True,
        True,
        False,
        False,
    ]
    assert [BLOCKS[BlockType.Q4_K].allows(slice(*ends), 768) for ends in ((256, 512), (0, 128))] == [True, False]
    assert FP8_STATIC.allows(slice(3, 5), 96)
    assert BLOCKS[BlockType.Q4_1].nbytes(6, 64) == 6 * 2 * 20


def test_transformers_models_take_plain_weights_only(config_folder: Path) -> None:
    set_quantization(config_folder, config_of({}, {}))
    with pytest.raises(CheckpointError, match="quantised weights are not supported with model_impl transformers"):
        open_checkpoint(str(config_folder), model_impl=ModelImpl.TRANSFORMERS)
