"""Text models inside checkpoints for text and images: their logits equal transformers' for text."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers.family_cases import FAMILIES
from helpers.parity_cases import STEPS, TOLERANCE, logits_of, prompts
from helpers.tiny_models import randomise, tiny_fields
from helpers.torch_paged_model import TorchPagedModel
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedModel

from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.checkpoint.hf_config import load_hf_config, load_quantization
from sglang_jax.checkpoint.text_part import spellings_of, text_names
from sglang_jax.errors import CheckpointError

_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_BLOCKS = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2}
_VISION: dict[str, dict[str, Any]] = {
    "gemma3": _TOWER,
    "gemma4": {**_TOWER, "num_key_value_heads": 2, "head_dim": 16},
    "mistral3": _TOWER,
    "qwen3_vl": {**_BLOCKS, "deepstack_visual_indexes": [0]},
    "qwen3_5": _BLOCKS,
    "qwen3_5_moe": _BLOCKS,
    "llama4": {
        **_TOWER,
        "intermediate_size": 64,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "vision_output_dim": 32,
    },
}
_TEXT = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "mistral3": "mistral",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "llama4": "llama4_text",
}

_FURTHER: dict[str, dict[str, Any]] = {
    "gemma4": FAMILIES["gemma4"].changes,
    "qwen3_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 2, 2]}},
}
"""Further fields of text models."""


def tiny_model(kind: str) -> PreTrainedModel:
    text = tiny_fields(_TEXT[kind]) | _FURTHER.get(kind, {}) | {"model_type": _TEXT[kind]}
    config = transformers.AutoConfig.for_model(kind, text_config=text, vision_config=_VISION[kind])
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    return randomise(model, _TEXT[kind])


@pytest.mark.parametrize("kind", _TEXT)
def test_logits_of_text_equal_transformers(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model(kind)
    model.save_pretrained(tmp_path)
    # Llama 4's whole model fails without images (transformers 5.24).
    whole = model.language_model if kind == "llama4" else model
    sequences = prompts()
    with caplog.at_level(logging.INFO):
        paged = TorchPagedModel(tmp_path, page_size=16, columns=4)
    assert "only the text model is served, without images" in caplog.text
    for tokens, logits in zip(sequences, paged.run(sequences, STEPS), strict=True):
        assert np.abs(logits - logits_of(whole, tokens)).max() < TOLERANCE


def test_names_of_each_spelling_and_of_faults(tmp_path: Path) -> None:
    tiny_model("gemma3").save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    layer = "layers.1.mlp.up_proj.weight"
    assert f"language_model.model.{layer}" in stored, "the first spelling"
    assert any(name.startswith("vision_tower.") for name in stored)

    def read(change: dict[str, np.ndarray]) -> np.ndarray:
        save_file(change, tmp_path / "model.safetensors")
        opened = open_checkpoint(str(tmp_path))
        assert opened.reader is not None
        return opened.reader.read(f"model.{layer}")

    found = read(stored)
    np.testing.assert_array_equal(found, stored[f"language_model.model.{layer}"])
    renamed = {name.replace("language_model.model.", "model.language_model."): each for name, each in stored.items()}
    np.testing.assert_array_equal(found, read(renamed))
    np.testing.assert_array_equal(found, read({name: stored[old] for name, old in text_names(stored).items()}))
    del renamed[f"model.language_model.{layer}"]
    with pytest.raises(CheckpointError, match=rf"\(1 faults\):\n  missing: model.{layer}"):
        read(renamed)


def test_lists_of_quantised_layers_have_names_of_the_whole_model(tmp_path: Path) -> None:
    tiny_model("mistral3").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    eight = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": eight}},
        "ignore": ["re:.*vision.*", "language_model.lm_head", "model.language_model.layers.0.mlp.up_proj"],
    }
    inside = config | {"text_config": config["text_config"] | {"quantization_config": config["quantization_config"]}}
    del inside["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(inside))
    assert load_quantization(tmp_path) is not None
    (tmp_path / "config.json").write_text(json.dumps(config))
    quantization = load_quantization(tmp_path)
    assert quantization is not None
    plain = [f"model.layers.{number}.mlp.up_proj" for number in range(2)] + ["lm_head"]
    assert [quantization.scheme(layer, "Linear") is None for layer in plain] == [True, False, True]
    assert spellings_of("lm_head") == ("lm_head", "language_model.lm_head", "lm_head")


def test_fields_that_published_files_of_gemma3_lack(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 2}
    values = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "eos_token_id": [1, 106]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    found, theirs = load_hf_config(tmp_path), transformers.AutoConfig.for_model(**text)
    attention = found.layers[0].attention
    assert found.vocab_size == theirs.vocab_size
    assert attention is not None
    sizes = attention.num_heads, attention.num_kv_heads, attention.head_dim
    assert sizes == (theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim)
    assert found.eos_token_ids == (1, 106)


def test_text_models_of_other_families_are_refused(tmp_path: Path) -> None:
    tiny_model("mistral3").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["model_type"] = "ministral3"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError,
        match=r"text_config.model_type of Mistral3ForConditionalGeneration is 'ministral3'; supported: mistral",
    ):
        load_hf_config(tmp_path)
