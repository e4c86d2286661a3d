"""Folders whose weights are stored in 8 bits: read as compressed-tensors reads them, whole, in part and as stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle import apply_quantization_config
from helpers.quantized_checkpoints import (
    IGNORED,
    Quantised,
    Tensors,
    Weights,
    make_quantised_checkpoint,
    quantise,
    scheme_of,
    set_quantization,
    tensors_of,
    write_tensors,
)
from helpers.tiny_models import make_tiny_checkpoint
from safetensors.numpy import save_file

from sglang_jax.architectures.manifest import ParameterName, manifest_of
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint import ParameterReader, open_checkpoint
from sglang_jax.checkpoint.encoding import ActivationScales, Encoding, Stored, ValueType
from sglang_jax.checkpoint.reader import Index, Role

FP8_DYNAMIC = Encoding(ValueType.FLOAT8_E4M3, None, "float32", activations=ActivationScales.TOKEN)
FP8_STATIC = Encoding(ValueType.FLOAT8_E4M3, None, "float32", activations=ActivationScales.TENSOR)
INT8_DYNAMIC = Encoding(ValueType.INT8, None, "float32", activations=ActivationScales.TOKEN)
INT8_PLAIN = Encoding(ValueType.INT8, None, "float32")

ENCODINGS = {
    Quantised.FP8_CHANNEL: FP8_DYNAMIC,
    Quantised.FP8_TENSOR: FP8_STATIC,
    Quantised.INT8_W8A8: INT8_DYNAMIC,
    Quantised.INT8_W8A16: INT8_PLAIN,
    Quantised.MODELOPT: FP8_STATIC,
}

WHOLE_HEADS = {Part.QUERY, Part.KEY, Part.VALUE, Part.OUTPUT_GATE, Part.QUERY_NORM, Part.KEY_NORM}


def parameters(folder: Path) -> ParameterReader:
    opened = open_checkpoint(str(folder))
    assert opened.reader is not None
    return ParameterReader(opened.reader, opened.config)


def changed(folder: Path, change: Callable[[Tensors], object]) -> Path:
    """A folder whose tensors `change` changed."""
    tensors = tensors_of(folder)
    change(tensors)
    write_tensors(folder, tensors)
    return folder


def plain_twin(quantised: Path, weights: Weights, folder: Path) -> Path:
    """A checkpoint with plain weights that should be the same."""
    folder.mkdir()
    (folder / "config.json").write_text((quantised / "config.json").read_text())
    set_quantization(folder, None)
    save_file({name: np.ascontiguousarray(value) for name, value in weights.items()}, folder / "model.safetensors")
    return folder


def some_part(name: ParameterName, shape: tuple[int, ...], random: np.random.Generator) -> Index:
    """A part that is not empty; of rows that make up heads, all."""
    ends = [np.sort(random.choice(size + 1, 2, replace=False)) for size in shape]
    index = tuple(slice(int(first), int(last)) for first, last in ends)
    return (slice(None), *index[1:]) if name.part in WHOLE_HEADS else index


def faults(quantised: ParameterReader, plain: ParameterReader, random: np.random.Generator) -> list[str]:
    """Parameters that differ from those of the twin: read, and as stored, whole and in part."""
    found = []
    for name, spec in manifest_of(plain.config).specs.items():
        for index in (None, some_part(name, spec.shape, random)):
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
            elif not np.allclose(stored.widened(), expected, rtol=3e-7, atol=0):  # factors are multiplied by before
                found.append(f"stored {name}")
    return found


@pytest.mark.parametrize("kind", Quantised)
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_every_format(architecture: str, kind: Quantised, tmp_path: Path) -> None:
    weights = make_quantised_checkpoint(tmp_path / "a", architecture, kind)
    quantised = parameters(tmp_path / "a")
    assert not faults(
        quantised, parameters(plain_twin(tmp_path / "a", weights, tmp_path / "b")), np.random.default_rng(0)
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
def test_any_groups(architecture: str, tmp_path: Path) -> None:
    """Several groups, names, patterns and classes, in orders that matter; each tensor as compressed-tensors' own
    matching and numbers have it."""
    random = np.random.default_rng(sum(architecture.encode()))
    stored = 0
    for number in range(4):
        folder = make_tiny_checkpoint(tmp_path / f"{number}", architecture, **MODELS[architecture])
        chosen = random.permutation(len(_TARGETS))[: random.integers(1, 4)]
        schemes = [scheme_of(_KINDS[random.integers(len(_KINDS))], *_TARGETS[each]) for each in chosen]
        weights = quantise(folder, schemes, _IGNORED[random.integers(len(_IGNORED))])
        quantised = parameters(folder)
        twin = parameters(plain_twin(folder, weights, tmp_path / f"{number}-plain"))
        assert not faults(quantised, twin, random)
        stored += sum(quantised.encoding(name) is not None for name in manifest_of(twin.config).specs)
        check_inputs(quantised, folder)
    assert stored


def check_inputs(quantised: ParameterReader, folder: Path) -> None:
    """Each row has the scale of its input that its own tensor has beside it."""
    tensors = tensors_of(folder)
    for name, spec in manifest_of(quantised.config).specs.items():
        encoding = quantised.encoding(name)
        if encoding is None or encoding.activations is not ActivationScales.TENSOR:
            continue
        names = [spec.tensor] if not spec.places else [spec.places[0].tensor_of(e) for e in range(spec.shape[0])]
        expected = np.stack([tensors[each.replace(".weight", ".input_scale")].numpy() for each in names])
        found = quantised.read_array(name, Role.INPUT_SCALE)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found.reshape(len(names), -1), np.tile(expected, spec.shape[-2]))


def test_parts_of_a_fused_matrix_keep_their_scales(tmp_path: Path) -> None:
    """Written out: rows of one tensor that hold queries, keys and values, and those of a tensor with one scale."""
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


def test_experts_are_stacked_if_they_are_alike(tmp_path: Path) -> None:
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
    """Its own names, formats and shapes of scales, and its own config."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from helpers.tiny_models import make_tiny_model

    model = make_tiny_model("qwen3")
    schemes = [scheme_of(Quantised.FP8_TENSOR, r"re:.*self_attn\..*"), scheme_of(Quantised.INT8_W8A16)]
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
    plain = {name: value.detach().numpy() for name, value in model.state_dict().items() if "_scale" not in name}
    plain = {name: value for name, value in plain.items() if "zero_point" not in name}
    assert quantised.names() == plain.keys()
    assert not [name for name in plain if not np.array_equal(quantised.read(name), plain[name])]
    names = sorted(name for name in plain if quantised.encoding(name) is not None)
    assert len(names) == 14
    assert {quantised.encoding(name) for name in names} == {FP8_STATIC, INT8_PLAIN}
