"""The error for a checkpoint of an unknown family: the supported families, and fields that none of them has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from sglang_jax.architectures.registry import known_families
from sglang_jax.checkpoint.hf_config import load_hf_config
from sglang_jax.errors import CheckpointError


def refusal(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        load_hf_config(folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "class_name", "told"),
    [
        ("deepseek_v32", "DeepseekV32ForCausalLM", ["index_topk 2048 (sparse attention)"]),
        ("deepseek_v4", "DeepseekV4ForCausalLM", ["index_topk 512 (sparse attention)"]),
        ("electra", "ElectraForMaskedLM", ["embedding_size 128"]),
        ("t5", "T5ForConditionalGeneration", ["is_encoder_decoder True (an encoder in addition to the decoder)"]),
        ("whisper", "WhisperForConditionalGeneration", ["num_mel_bins 80 (audio)", " and 12 more"]),
        ("apertus", "ApertusForCausalLM", ["hidden_act 'xielu'"]),
        ("vaultgemma", "VaultGemmaForCausalLM", ["supported families have the same fields, so this file"]),
        ("jamba", "JambaForCausalLM", ["expert_layer_period 2", "mamba_dt_rank 256"]),
        ("starcoder2", "Starcoder2ForCausalLM", ["norm_epsilon 1e-05 (an unsupported kind of norm)"]),
        ("gpt2", "GPT2LMHeadModel", ["n_embd 768", "n_layer 12"]),
        ("laguna", "LagunaForCausalLM", ["num_attention_heads_per_layer [...] (a number of heads for each layer)"]),
        (
            "llava",
            "LlavaForConditionalGeneration",
            ["its text_config is that of a LlamaForCausalLM", "vision_config {...} (images)"],
        ),
    ],
)
def test_fields_that_no_family_has_are_named(
    model_type: str, class_name: str, told: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = transformers.AutoConfig.for_model(model_type).to_dict()
    message = refusal(tmp_path, config | {"architectures": [class_name]})
    ours = [record for record in caplog.records if record.name.startswith("sglang_jax")]
    assert not ours, "families are tried without their warnings"
    assert f"architecture {class_name} is not supported: " in message
    for part in told:
        assert part in message
    for field in ("vocab_size", "num_hidden_layers", "initializer", "token_id", "dropout"):
        assert f" {field}" not in message
    for family in known_families():
        assert family.class_name in message
        assert family.multimodal is None or family.multimodal.class_name in message


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"architectures": ["LlamaForTokenClassification"]},
            "LlamaForCausalLM, with the same model_type, is supported; supported",
        ),
        ({"architectures": None, "model_type": "crow"}, "architecture crow is not supported; supported: "),
        ({"architectures": None, "model_type": None}, "neither architectures nor model_type given"),
        ({"per_layer_config": {"2": {"head_dim": 8}}}, "per_layer_config is {'2': {'head_dim': 8}}, which llama does"),
        ({"num_attention_heads_per_layer": [4, 8]}, "num_attention_heads_per_layer is [4, 8], which llama does not"),
        ({"clip_qkv": 8.0}, "clip_qkv is 8.0, which llama does not support here: outputs would be wrong"),
    ],
)
def test_the_error_for_a_known_model_type(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("llama").to_dict() | {"architectures": ["LlamaForCausalLM"]} | change
    assert told in refusal(tmp_path, config)


def test_gemma_4_with_unsupported_parts_is_refused(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("gemma4_text").to_dict() | {"architectures": ["Gemma4ForCausalLM"]}
    assert "hidden_size_per_layer_input is 256" in refusal(tmp_path, config)
    config["hidden_size_per_layer_input"] = 0
    assert "num_kv_shared_layers is 3: layers that read" in refusal(tmp_path, config | {"num_kv_shared_layers": 3})
    assert "enable_moe_block is True: experts" in refusal(tmp_path, config | {"enable_moe_block": True})
    assert "use_bidirectional_attention is 'all'" in refusal(tmp_path, config | {"use_bidirectional_attention": "all"})
    odd = {"per_layer_config": {"5": {"sliding_window": 3}}}
    assert "per_layer_config of layer 5 has sliding_window" in refusal(tmp_path, config | odd)
