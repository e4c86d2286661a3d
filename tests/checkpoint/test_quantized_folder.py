"""Folders written by `convert --quantize`: read back, decompressed by compressed-tensors, and matched by its rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import is_match, match_targets
from helpers.kv_scale_checkpoints import add_tensors, kv_scales_of, scale_tensors
from helpers.quantized_checkpoints import tensors_of
from helpers.tiny_models import make_tiny_checkpoint
from safetensors.torch import load_file

from sglang_jax.architectures.manifest import ParameterName, manifest_of
from sglang_jax.architectures.tensor_names import Part
from sglang_jax.checkpoint import Checkpoint, ParameterReader, open_checkpoint, quantization
from sglang_jax.checkpoint.hf_config import CONFIG_FILE
from sglang_jax.checkpoint.packed_words import packed_words, signed_levels, unpacked_words
from sglang_jax.checkpoint.quantization import FLOAT8_ROWS, INT4_GROUPS, INT8_ROWS, Quantization
from sglang_jax.checkpoint.quantized_folder import QuantizedTensors, write_quantized_folder
from sglang_jax.checkpoint.safetensors_reader import INDEX_FILE
from sglang_jax.checkpoint.safetensors_writer import SHARD_BYTES
from sglang_jax.config import KVCacheDtype
from sglang_jax.errors import CheckpointError, ConfigError

FORMATS = {"int8": INT8_ROWS, "fp8": FLOAT8_ROWS, "int4": INT4_GROUPS}
EXPERTS = {"moe_intermediate_size": 64}


def write(
    original: Path, output: Path, encoding: str, *, shard_bytes: int = SHARD_BYTES, dtype: np.dtype | None = None
) -> Checkpoint:
    checkpoint = open_checkpoint(str(original))
    output.mkdir()
    tensors = QuantizedTensors(checkpoint.reader, checkpoint.config, Quantization(FORMATS[encoding]))
    values = json.loads((original / CONFIG_FILE).read_text())
    kv_type = checkpoint.kv_scales_made_for()
    write_quantized_folder(output, tensors, values, dtype=dtype, kv_type=kv_type, shard_bytes=shard_bytes)
    return checkpoint


def check_equal(before: Checkpoint, output: Path, encoding: str) -> int:
    """Every parameter equals what is quantised while loading, in blocks, scales or plain numbers; returns the number of
    quantised ones."""
    after = open_checkpoint(str(output))
    assert after.config == before.config
    loading = ParameterReader(before.reader, before.config, Quantization(FORMATS[encoding]))
    written = ParameterReader(after.reader, after.config)
    quantised = 0
    for name in manifest_of(before.config).specs:
        kept = loading.encoding(name)
        assert written.encoding(name) == kept, name
        if kept is None:
            np.testing.assert_array_equal(written.read(name), loading.read(name), err_msg=str(name))
            continue
        quantised += 1
        found, expected = (reader.read_arrays(name, kept.roles) for reader in (written, loading))
        for role, array in expected.items():
            assert found[role].dtype == array.dtype
            np.testing.assert_array_equal(found[role], array, err_msg=f"{name} {role}")
    return quantised


@pytest.mark.parametrize("encoding", FORMATS)
@pytest.mark.parametrize(
    ("architecture", "changes", "quantised", "in_groups"),
    [
        # Rows of several groups, of 64 and of 128.
        ("llama", {"tie_word_embeddings": True, "hidden_size": 192, "intermediate_size": 384}, 14, 14),
        # 66 inputs are not whole words of 4 or 8 values, and no groups.
        ("qwen3", {"intermediate_size": 66}, 14, 12),
        ("qwen3_moe", EXPERTS, 14, 14),
        # No groups divide the 48 inputs of `down_proj`.
        ("qwen2_moe", {}, 20, 16),
        # `kv_b_proj` stays plain, and rotated pairs are neighbours.
        ("deepseek_v3", EXPERTS, 21, 15),
        # Some tensors have several parts, head by head; a convolution of 3 axes stays plain.
        ("qwen3_next", EXPERTS, 22, 19),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_written_is_what_loading_quantises(
    tmp_path: Path, encoding: str, architecture: str, changes: dict[str, Any], quantised: int, in_groups: int
) -> None:
    original = make_tiny_checkpoint(tmp_path / "original", architecture, dtype="bfloat16", **changes)
    before = write(original, tmp_path / "output", encoding)
    assert check_equal(before, tmp_path / "output", encoding) == (in_groups if encoding == "int4" else quantised)


@pytest.mark.parametrize("encoding", FORMATS)
def test_compressed_tensors_reads_it(tmp_path: Path, encoding: str) -> None:
    """Its rules find the quantised layers among the modules of transformers, and it decompresses the same numbers."""
    changes = {"hidden_size": 192, "intermediate_size": 66, "tie_word_embeddings": True}
    original, output = make_tiny_checkpoint(tmp_path / "original", **changes), tmp_path / "output"
    before = write(original, output, encoding)
    config = QuantizationConfig.model_validate(json.loads((output / CONFIG_FILE).read_text())["quantization_config"])
    schemes = {target: scheme for scheme in config.config_groups.values() for target in scheme.targets}
    stored, wanted = tensors_of(output), Quantization(FORMATS[encoding])
    specs = {spec.tensor: spec for spec in manifest_of(before.config).specs.values()}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(original))
    seen = set()
    for layer, module in model.named_modules():
        targets = match_targets(layer, module, schemes)
        if not targets or is_match(layer, module, config.ignore):
            continue
        scheme, prefix = schemes[targets[0]], f"{layer}."
        own = {name.removeprefix(prefix): value for name, value in stored.items() if name.startswith(prefix)}
        seen |= {prefix + name for name in own}
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        found = compressor.decompress(own, scheme)["weight"].float().numpy()
        rounded = wanted.of(specs[f"{layer}.weight"])
        assert rounded is not None, layer
        # Its products of levels and scales are in the dtype of scales.
        narrow = ml_dtypes.bfloat16 if encoding == "int4" else np.float32
        expected = rounded.widened(before.reader.read(f"{layer}.weight")).astype(narrow)
        np.testing.assert_array_equal(found, expected.astype(np.float32), err_msg=layer)
    assert {name for name in stored if not name.endswith(".weight")} <= seen
    assert len({name.rpartition(".")[0] for name in seen}) == (12 if encoding == "int4" else 14)


def test_transformers_reads_experts_whatever_groups_other_layers_have(tmp_path: Path) -> None:
    """Experts in groups of 64; the shared expert's last matrix has groups of 128, and is named first."""
    sizes = {**EXPERTS, "shared_expert_intermediate_size": 128}
    original, output = make_tiny_checkpoint(tmp_path / "original", "qwen2_moe", **sizes), tmp_path / "output"
    write(original, output, "int4")
    groups = json.loads((output / CONFIG_FILE).read_text())["quantization_config"]["config_groups"].values()
    assert [group["weights"]["group_size"] for group in groups] == [128, 64]
    model, after = transformers.AutoModelForCausalLM.from_pretrained(output), open_checkpoint(str(output))
    experts, reader = model.get_submodule("model.layers.1.mlp.experts"), ParameterReader(after.reader, after.config)
    wanted = [reader.read(ParameterName(part, layer=1)) for part in (Part.EXPERT_GATE, Part.EXPERT_UP)]
    narrow = np.concatenate(wanted, axis=1).astype(ml_dtypes.bfloat16).astype(np.float32)  # as scales are stored
    np.testing.assert_array_equal(experts.get_parameter("gate_up_proj").detach().float().numpy(), narrow)


@pytest.mark.parametrize("encoding", FORMATS)
def test_plain_layers_are_listed(tmp_path: Path, encoding: str) -> None:
    original, output = make_tiny_checkpoint(tmp_path / "original", "qwen2_moe"), tmp_path / "output"
    write(original, output, encoding)
    expected = {"lm_head", "model.embed_tokens"}
    for layer in ("model.layers.0.mlp", "model.layers.1.mlp"):
        expected |= {f"{layer}.gate", f"{layer}.shared_expert_gate"}
        if encoding == "int4":  # 32 divides neither 48 nor 80 inputs
            expected |= {f"{layer}.shared_expert.down_proj", *(f"{layer}.experts.{n}.down_proj" for n in range(6))}
    ignored = json.loads((output / CONFIG_FILE).read_text())["quantization_config"]["ignore"]
    assert len(ignored) == len(set(ignored))
    assert set(ignored) == expected


def test_experts_of_one_tensor_are_written_one_by_one(tmp_path: Path) -> None:
    """As transformers saves them with `save_original_format=False`."""
    original = make_tiny_checkpoint(tmp_path / "original", "qwen3_moe", **EXPERTS)
    model = transformers.AutoModelForCausalLM.from_pretrained(original)
    model.save_pretrained(original, save_original_format=False)
    before = write(original, tmp_path / "output", "int4")
    assert "model.layers.0.mlp.experts.gate_up_proj" in before.reader.names()
    assert check_equal(before, tmp_path / "output", "int4") == 14
    assert "model.layers.1.mlp.experts.5.up_proj.weight_packed" in tensors_of(tmp_path / "output")


@pytest.mark.parametrize("plain", [Part.QUERY, Part.OUTPUT_GATE])
def test_a_tensor_with_a_plain_part_stays_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: Part) -> None:
    """Whether it is the first or the second part."""
    monkeypatch.setattr(quantization, "_STAY_PLAIN", frozenset({Part.EMBEDDING, Part.HEAD, plain}))
    original = make_tiny_checkpoint(tmp_path / "original", "qwen3_next")
    write(original, tmp_path / "output", "int8")
    stored = tensors_of(tmp_path / "output")
    assert "model.layers.1.self_attn.q_proj.weight" in stored
    assert "model.layers.1.self_attn.k_proj.weight_packed" in stored


def test_shards_have_an_index(tmp_path: Path) -> None:
    """Each at most as large as asked for; a larger tensor has a file to itself."""
    original, output = make_tiny_checkpoint(tmp_path / "original"), tmp_path / "output"
    before = write(original, output, "int4", shard_bytes=20_000)
    assert check_equal(before, output, "int4") == 14
    index = json.loads((output / INDEX_FILE).read_text())
    files = sorted(output.glob("*.safetensors"))
    assert {file.name for file in files} == set(index["weight_map"].values())
    assert len(files) > 3
    assert all(file.name.endswith(f"-of-{len(files):05}.safetensors") for file in files)
    assert not list(output.glob("*.incomplete"))
    assert {file.stat().st_mode for file in files} == {(output / CONFIG_FILE).stat().st_mode}
    held = [[tensor.nbytes for tensor in load_file(file).values()] for file in files]
    assert all(sum(sizes) <= 20_000 or len(sizes) == 1 for sizes in held)
    assert max(map(len, held)) > 1
    assert index["metadata"]["total_size"] == sum(map(sum, held))


def test_scales_of_keys_and_values_are_kept(tmp_path: Path) -> None:
    given = np.random.default_rng(0).uniform(0.1, 2, (2, 2, 2)).astype(np.float32)
    original, output = make_tiny_checkpoint(tmp_path / "original"), tmp_path / "output"
    scheme = {"type": "int", "num_bits": 8, "symmetric": True, "dynamic": False}
    add_tensors(original, scale_tensors(given), scheme=scheme)
    write(original, output, "int8", dtype=np.dtype(ml_dtypes.bfloat16))
    after = open_checkpoint(str(output))
    assert after.kv_scales_made_for() is KVCacheDtype.INT8
    np.testing.assert_array_equal(kv_scales_of(after), given)
    assert after.reader.in_bfloat16("model.norm.weight")


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("gpt_oss", {}, r"gate_up_proj: .* share a tensor: choose --to orbax with --quantize int8 or fp8"),
        ("llama", {"hidden_size": 40, "intermediate_size": 40, "head_dim": 10}, "can be quantised to int4 in groups"),
    ],
)
def test_models_without_such_matrices_are_refused(
    tmp_path: Path, architecture: str, changes: dict[str, Any], message: str
) -> None:
    original = make_tiny_checkpoint(tmp_path / "original", architecture, **changes)
    with pytest.raises(ConfigError, match=message):
        write(original, tmp_path / "output", "int4")


def test_numbers_that_are_not_finite_name_their_tensor(tmp_path: Path) -> None:
    original, name = make_tiny_checkpoint(tmp_path / "original"), "model.layers.1.mlp.up_proj.weight"
    broken = tensors_of(original)[name].numpy().copy()
    broken[3, 5] = np.inf
    add_tensors(original, {name: broken})
    with pytest.raises(CheckpointError, match=f"{name}: numbers that are not finite cannot be quantised"):
        write(original, tmp_path / "output", "fp8")
    assert not (tmp_path / "output" / CONFIG_FILE).exists()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [1, 7, 8, 33])
def test_words_keep_their_values(bits: int, columns: int) -> None:
    random = np.random.default_rng(columns)
    levels = random.integers(0, 16, (3, columns), np.uint8) if bits == 4 else random.integers(-128, 128, (3, columns))
    levels = levels if bits == 4 else levels.astype(np.int8)
    words = packed_words(levels, bits)
    assert words.shape == (3, -(-columns * bits // 32))
    np.testing.assert_array_equal(signed_levels(unpacked_words(words, bits), bits)[:, :columns], levels)
