"""`open_checkpoint` over every format, and the check of names and shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from helpers.gguf_files import make_tiny_gguf, write_gguf
from helpers.tiny_models import ARCHITECTURES, make_tiny_checkpoint, make_tiny_model, make_tiny_tokenizer
from safetensors.numpy import load_file, save_file

from sglang_jax.checkpoint import ORBAX_MARKER, RopeConfig, SourceKind, TensorReader, expected_tensors, open_checkpoint
from sglang_jax.config import LoadFormat
from sglang_jax.errors import CheckpointError


def reader_of(path: str | Path, load_format: LoadFormat = LoadFormat.AUTO, seed: int = 0) -> TensorReader:
    reader = open_checkpoint(str(path), load_format, seed=seed).reader
    assert reader is not None
    return reader


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *[(architecture, {}) for architecture in ARCHITECTURES],
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("architecture", "overrides"), VARIANTS)
def test_expected_tensors_are_those_of_transformers(
    tmp_path: Path, architecture: str, overrides: dict[str, Any]
) -> None:
    checkpoint = open_checkpoint(str(make_tiny_checkpoint(tmp_path, architecture, **overrides)))
    state = make_tiny_model(architecture, **overrides).state_dict()
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    if checkpoint.config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    assert expected_tensors(checkpoint.config) == shapes
    assert checkpoint.source.kind is SourceKind.SAFETENSORS
    assert checkpoint.tokenizer_source == checkpoint.source


def test_missing_extra_and_misshapen_tensors_are_all_named(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    del tensors["model.norm.weight"]
    tensors["model.layers.7.mlp.up_proj.weight"] = np.zeros((3,), dtype=np.float32)
    tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((64, 32), dtype=np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros((8,), dtype=np.float32)
    tensors["mtp.fc.weight"] = np.zeros((8, 8), dtype=np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(folder))
    assert str(caught.value).splitlines() == [
        "the tensors do not fit a llama model of 2 layers (4 faults):",
        "  missing: model.layers.1.mlp.up_proj.weight (128, 64)",
        "  missing: model.norm.weight (64,)",
        "  extra: model.layers.7.mlp.up_proj.weight (3,)",
        "  misshapen: model.layers.0.self_attn.q_proj.weight is (64, 32), the config requires (64, 64)",
    ]


def test_an_output_matrix_that_differs_from_tied_embeddings_is_used(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    assert "lm_head.weight" in reader_of(folder).names()
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": True}))
    assert not open_checkpoint(str(folder)).config.tie_word_embeddings


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_has_the_tensors_of_its_original(tmp_path: Path, architecture: str, tied: bool) -> None:
    bias = {"attention_bias": True} if architecture == "llama" else {}
    model = make_tiny_model(architecture, tie_word_embeddings=tied, rms_norm_eps=1e-5, **bias)
    path = make_tiny_gguf(tmp_path / "model.gguf", model, make_tiny_tokenizer(tmp_path), architecture)
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.reader is not None
    assert checkpoint.config.tie_word_embeddings is tied
    assert checkpoint.config.max_position == 512
    assert checkpoint.config.eos_token_ids == (2,)
    state = model.state_dict()
    for name in expected_tensors(checkpoint.config):
        np.testing.assert_array_equal(checkpoint.reader.read(name), state[name].numpy())


def test_an_unknown_tensor_of_a_gguf_file_is_named(tmp_path: Path) -> None:
    model, tokenizer = make_tiny_model("llama"), make_tiny_tokenizer(tmp_path)
    path = make_tiny_gguf(tmp_path / "model.gguf", model, tokenizer)
    reference = gguf.GGUFReader(path)
    fields = {
        name: field.contents() for name, field in reference.fields.items() if not name.startswith(("GGUF.", "general."))
    }
    tensors = {tensor.name: (np.array(tensor.data), tensor.tensor_type) for tensor in reference.tensors}
    del tensors["blk.1.ffn_norm.weight"]
    tensors["blk.0.ffn_gate_inp.weight"] = (np.zeros((2, 4), dtype=np.float32), GGMLQuantizationType.F32)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(write_gguf(tmp_path / "other.gguf", "llama", fields, tensors)))
    assert "missing: model.layers.1.post_attention_layernorm.weight (64,)" in str(caught.value)
    assert "extra: blk.0.ffn_gate_inp.weight (2, 4)" in str(caught.value)


def test_the_embedded_model() -> None:
    checkpoint = open_checkpoint("demo")
    config, reader = checkpoint.config, checkpoint.reader
    assert reader is not None
    assert (config.num_layers, config.hidden_size, config.layers[0].feed_forward.size) == (30, 576, 1536)
    mixer = config.layers[0].mixer
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, config.vocab_size) == (9, 3, 64, 49152)
    attention = config.layers[0].mixer
    assert (config.max_position, attention.rope, config.final_norm.eps) == (8192, RopeConfig(theta=1e5), 1e-5)
    assert (config.bos_token_id, config.eos_token_ids, config.tie_word_embeddings) == (1, (2,), True)
    assert reader.names() == expected_tensors(config).keys()
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(checkpoint.source.path).tensors}
    key = theirs["blk.7.attn_k.weight"]
    stored = gguf.dequantize(key.data, key.tensor_type).reshape(3, 32, 2, 576)
    expected = np.concatenate([stored[:, :, 0], stored[:, :, 1]], axis=1).reshape(192, 576)
    np.testing.assert_array_equal(reader.read("model.layers.7.self_attn.k_proj.weight"), expected)
    rows = reader.read("model.embed_tokens.weight", (slice(1000, 1010),))
    embedding = theirs["token_embd.weight"]
    np.testing.assert_array_equal(rows, gguf.dequantize(embedding.data[1000:1010], embedding.tensor_type))


def test_dummy_weights_need_only_the_config(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, dtype="bfloat16")
    (folder / "model.safetensors").unlink()
    reader = reader_of(folder, LoadFormat.DUMMY)
    assert reader.names() == expected_tensors(open_checkpoint(str(folder), LoadFormat.DUMMY).config).keys()
    assert reader.read("model.norm.weight").tolist() == [1.0] * 64
    values = reader.read("model.embed_tokens.weight")
    assert values.dtype.name == "bfloat16"
    assert abs(values.astype(np.float32).std() - 0.02) < 0.001
    with pytest.raises(CheckpointError, match=r"no tensor model\.none"):
        reader.read("model.none")


def test_dummy_weights_depend_only_on_seed_and_name(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    name, other = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    values = reader_of(folder, LoadFormat.DUMMY, seed=5).read(name)
    np.testing.assert_array_equal(reader_of(folder, LoadFormat.DUMMY, seed=5).read(name), values)
    assert not np.array_equal(reader_of(folder, LoadFormat.DUMMY, seed=6).read(name), values)
    reader = reader_of(folder, LoadFormat.DUMMY, seed=5)
    assert not np.array_equal(reader.read(other), values)
    np.testing.assert_array_equal(reader.read(name, (slice(9, 40), slice(3, 50))), values[9:40, 3:50])


def test_dummy_weights_of_a_gguf_and_an_orbax_checkpoint(tmp_path: Path) -> None:
    assert reader_of("demo", LoadFormat.DUMMY).shape("model.embed_tokens.weight") == (49152, 576)
    folder = make_tiny_checkpoint(tmp_path)
    (folder / ORBAX_MARKER).write_text("{}")
    assert open_checkpoint(str(folder)).reader is None
    assert open_checkpoint(str(folder)).source.kind is SourceKind.ORBAX
    assert reader_of(folder, LoadFormat.DUMMY).shape("model.norm.weight") == (64,)


def test_generation_defaults_are_read(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0], "temperature": 0.7}))
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.generation_defaults.temperature == 0.7
    assert checkpoint.config.eos_token_ids == (2, 0)


@pytest.mark.parametrize("ends", [[0, 5000], [0, -1], [5000, 0, 4294967295]])
def test_eos_ids_outside_the_vocabulary_are_ignored(
    tmp_path: Path, ends: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("config.json", "generation_config.json"):
        folder = make_tiny_checkpoint(tmp_path / name)
        values = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps(values | {"eos_token_id": ends}))
        found = open_checkpoint(str(folder)).config.eos_token_ids
        assert set(found) <= {0, 2}
        assert 0 in found
        assert "outside its vocabulary of 384 tokens" in caplog.text
        caplog.clear()
    values = json.loads((folder / "config.json").read_text()) | {"bos_token_id": 5000}
    (folder / "config.json").write_text(json.dumps(values))
    assert open_checkpoint(str(folder)).config.bos_token_id is None
