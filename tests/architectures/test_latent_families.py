"""Configs of families with latent attention: those of released models, written out by hand, with transformers'
numbers as the oracle."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.family_cases import LATENT
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax.architectures import ModelConfig
from sglang_jax.architectures.kinds.experts import ExpertsConfig, ExpertScores
from sglang_jax.architectures.kinds.feed_forward import FeedForwardConfig
from sglang_jax.architectures.kinds.latent_attention import LatentAttentionConfig
from sglang_jax.architectures.kinds.part import CachedArray
from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.checkpoint import expected_tensors, open_checkpoint
from sglang_jax.checkpoint.hf_config import load_hf_config
from sglang_jax.checkpoint.rotary import RotaryScaling
from sglang_jax.config import LoadFormat
from sglang_jax.errors import CheckpointError, ConfigError

_OF_DEEPSEEK = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
}
_OF_V2 = {
    **_OF_DEEPSEEK,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 163840,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "rope_theta": 10000,
    "scoring_func": "softmax",
    "vocab_size": 102400,
}
_OF_V3 = {
    **_OF_DEEPSEEK,
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "q_lora_rank": 1536,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


def _yarn(factor: int, mscale: float, **more: float) -> dict[str, Any]:
    shape = {"type": "yarn", "factor": factor, "original_max_position_embeddings": 4096, "beta_fast": 32}
    return {"rope_scaling": {**shape, "beta_slow": 1, "mscale": mscale, "mscale_all_dim": mscale} | more}


_LINEAR = {"rope_scaling": {"type": "linear", "factor": 4.0, "mscale_all_dim": 1.0}}
_FACTORS = [1.0591, 1.1242, 1.2597, 1.538, 2.094, 3.1447, 4.938, 7.5245]
_FACTORS += [10.4755, 13.062, 14.8553, 15.906, 16.462, 16.7403, 16.8758, 16.9409]

RELEASED: dict[str, dict[str, Any]] = {
    "DeepSeek-V2-Lite": _OF_V2
    | _yarn(40, 0.707)
    | {
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "topk_method": "greedy",
    },
    "DeepSeek-V2": _OF_V2
    | _yarn(40, 0.707)
    | {
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_group": 8,
        "n_routed_experts": 160,
        "num_attention_heads": 128,
        "num_hidden_layers": 60,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "routed_scaling_factor": 16.0,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
    },
    "DeepSeek-V3": _OF_V3
    | _yarn(40, 1.0)
    | {
        "model_type": "deepseek_v3",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "first_k_dense_replace": 3,
        "max_position_embeddings": 163840,
        "n_group": 8,
        "n_routed_experts": 256,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "vocab_size": 129280,
    },
    "Kimi-K2": _OF_V3
    | _yarn(32, 1.0, beta_fast=1)
    | {
        "model_type": "kimi_k2",
        "bos_token_id": 163584,
        "eos_token_id": 163585,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
        "n_group": 1,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "topk_group": 1,
        "vocab_size": 163840,
    },
    "GLM-4.7-Flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": [154820, 154827, 154829],
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "kv_lora_rank": 512,
        "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 20,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 47,
        "num_key_value_heads": 20,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 154820,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.8,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 256,
        "vocab_size": 154880,
    },
    "MiniCPM3-4B": {
        "architectures": ["MiniCPM3ForCausalLM"],
        "model_type": "minicpm3",
        "bos_token_id": 1,
        "dim_model_base": 256,
        "eos_token_id": [2, 73440],
        "hidden_act": "silu",
        "hidden_size": 2560,
        "initializer_range": 0.1,
        "intermediate_size": 6400,
        "kv_lora_rank": 256,
        "max_position_embeddings": 32768,
        "num_attention_heads": 40,
        "num_hidden_layers": 62,
        "num_key_value_heads": 40,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": _FACTORS,
            "short_factor": _FACTORS,
            "original_max_position_embeddings": 32768,
        },
        "scale_depth": 1.4,
        "scale_emb": 12,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 73448,
    },
    "Youtu-LLM-2B": {
        "architectures": ["YoutuForCausalLM"],
        "model_type": "youtu",
        "attention_bias": False,
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "kv_lora_rank": 512,
        "max_position_embeddings": 131072,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "num_key_value_heads": 16,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_interleave": True,
        "rope_theta": 1600000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "v_head_dim": 128,
        "vocab_size": 128256,
    },
    "sarvam-105b": {
        "architectures": ["SarvamMLAForCausalLM"],
        "model_type": "sarvam_mla",
        "attention_bias": False,
        "eos_token_id": 1,
        "first_k_dense_replace": 1,
        "head_dim": 576,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 16384,
        "kv_lora_rank": 512,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 2048,
        "n_group": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 32,
        "num_shared_experts": 2,
        "q_head_dim": 192,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "type": "deepseek_yarn",
            "factor": 32,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "torch_dtype": "bfloat16",
        "v_head_dim": 128,
        "vocab_size": 262144,
    },
}
"""As released; sarvam-105b only as far as transformers documents it, with made-up numbers of shared experts."""


def configured(folder: Path, values: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return load_hf_config(folder)


@pytest.mark.parametrize(
    ("name", "attention", "experts", "dense"),
    [
        (
            "DeepSeek-V2-Lite",
            {"num_heads": 16, "query_latent": None, "key_dim": 128, "value_dim": 128},
            {"num_experts": 64, "chosen": 6, "size": 1408, "shared_size": 2816, "groups": 1, "scale": 1.0},
            {"layers": 1, "size": 10944},
        ),
        (
            "DeepSeek-V2",
            {"num_heads": 128, "query_latent": 1536, "key_dim": 128, "value_dim": 128},
            {"num_experts": 160, "chosen": 6, "size": 1536, "shared_size": 3072, "groups": 8, "scale": 16.0}
            | {"chosen_groups": 3, "best_of_group": 1, "scores": ExpertScores.SOFTMAX, "renormalised": False},
            {"layers": 1, "size": 12288},
        ),
        (
            "DeepSeek-V3",
            {"num_heads": 128, "query_latent": 1536, "key_dim": 128, "value_dim": 128},
            {"num_experts": 256, "chosen": 8, "size": 2048, "shared_size": 2048, "groups": 8, "scale": 2.5}
            | {"chosen_groups": 4, "best_of_group": 2, "scores": ExpertScores.SIGMOID, "renormalised": True},
            {"layers": 3, "size": 18432},
        ),
        (
            "Kimi-K2",
            {"num_heads": 64, "query_latent": 1536, "key_dim": 128, "value_dim": 128},
            {"num_experts": 384, "chosen": 8, "size": 2048, "shared_size": 2048, "groups": 1, "scale": 2.827}
            | {"scores": ExpertScores.SIGMOID, "renormalised": True, "correction": True},
            {"layers": 1, "size": 18432},
        ),
        (
            "GLM-4.7-Flash",
            {"num_heads": 20, "query_latent": 768, "key_dim": 192, "value_dim": 256},
            {"num_experts": 64, "chosen": 4, "size": 1536, "shared_size": 1536, "groups": 1, "scale": 1.8}
            | {"scores": ExpertScores.SIGMOID, "renormalised": True, "correction": True},
            {"layers": 1, "size": 10240},
        ),
        (
            "sarvam-105b",
            {"num_heads": 64, "query_latent": None, "key_dim": 128, "value_dim": 128, "rotary_dim": 64},
            {"num_experts": 128, "chosen": 8, "size": 2048, "shared_size": 4096, "groups": 1, "scale": 2.5}
            | {"scores": ExpertScores.SIGMOID, "renormalised": True, "correction": True},
            {"layers": 1, "size": 16384},
        ),
    ],
)
def test_released_models_with_experts(
    name: str,
    attention: dict[str, Any],
    experts: dict[str, Any],
    dense: dict[str, int],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    values = RELEASED[name]
    config = configured(tmp_path, values)
    assert config == configured(tmp_path, values | {"rope_parameters": {}}), "an empty field hides no other"
    assert "unknown fields" not in caplog.text
    assert config.num_layers == values["num_hidden_layers"]
    assert config.max_position == values["max_position_embeddings"]
    assert config.vocab_size == values["vocab_size"]
    ends = values["eos_token_id"]
    assert config.eos_token_ids == (tuple(ends) if isinstance(ends, list) else (ends,))
    assert config.mtp_layers == values.get("num_nextn_predict_layers", 0)
    assert config.dtype == "bfloat16"
    assert len(set(config.attention)) == 1
    found = config.attention[0]
    assert isinstance(found, LatentAttentionConfig)
    assert found.interleaved_rope
    assert {field: getattr(found, field) for field in attention} == attention
    for number, part in enumerate(config.feed_forward):
        kind = FeedForwardConfig if number < dense["layers"] else ExpertsConfig
        assert isinstance(part, kind)
        expected = {"size": dense["size"]} if number < dense["layers"] else experts
        assert {field: getattr(part, field) for field in expected} == expected


def test_released_dense_models(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = configured(tmp_path, RELEASED["MiniCPM3-4B"])
    found = config.attention[0]
    assert isinstance(found, LatentAttentionConfig)
    assert (found.num_heads, found.latent, found.query_latent) == (40, 256, 768)
    assert (found.key_dim, found.rotary_dim, found.value_dim, found.interleaved_rope) == (64, 32, 64, False)
    assert config.layers[0].residual_multiplier == 1.4 / math.sqrt(62)
    assert (config.embedding_multiplier, config.logit_multiplier) == (12.0, 0.1)
    assert (config.final_norm.eps, config.tie_word_embeddings, config.max_position) == (1e-5, True, 32768)
    plain = configured(
        tmp_path, RELEASED["MiniCPM3-4B"] | {"scale_depth": None, "dim_model_base": None, "rope_scaling": None}
    )
    assert (plain.layers[0].residual_multiplier, plain.logit_multiplier) == (1.0, 1.0)
    config = configured(tmp_path, RELEASED["Youtu-LLM-2B"])
    found = config.attention[0]
    assert isinstance(found, LatentAttentionConfig)
    assert (found.num_heads, found.query_latent, found.value_dim, found.interleaved_rope) == (16, 1536, 128, True)
    assert {part.size for part in config.feed_forward} == {6144}
    assert "unknown fields" not in caplog.text


def test_the_file_says_which_layers_of_glm_have_experts(tmp_path: Path) -> None:
    values = RELEASED["GLM-4.7-Flash"] | {"num_hidden_layers": 4}
    for change, dense in (({}, 1), ({"first_k_dense_replace": 2}, 2)):
        config = configured(tmp_path, values | change)
        assert [isinstance(part, FeedForwardConfig) for part in config.feed_forward] == [n < dense for n in range(4)]
    config = configured(tmp_path, values | {"mlp_layer_types": ["sparse", "dense", "dense", "sparse"]})
    assert [isinstance(part, ExpertsConfig) for part in config.feed_forward] == [True, False, False, True]


def test_a_token_caches_one_vector_for_any_number_of_heads(tmp_path: Path) -> None:
    found = configured(tmp_path, RELEASED["DeepSeek-V3"]).attention[0]
    assert found.cached == (CachedArray("latent", None, 512 + 64, (512, 64)),)
    assert [found.cached[0].numbers(devices) for devices in (1, 8)] == [576, 576]
    assert found.products_per_key == 128 * (512 + 64) + 128 * 512, "for scores and for values"
    assert found.sharded(Parallelism(64)) == found
    with pytest.raises(ConfigError, match="128 heads cannot be spread over 3 devices: choose a tp_size that divides"):
        found.sharded(Parallelism(3))


def small(values: dict[str, Any]) -> transformers.PreTrainedModel:
    """transformers' model of a released config, with two layers, without memory."""
    few = {"num_hidden_layers": 2}
    name = values["model_type"].replace("kimi_k2", "deepseek_v3")
    fields = {field: value for field, value in values.items() if field not in ("model_type", "architectures")}
    theirs = transformers.AutoConfig.for_model(name, **copy.deepcopy(fields | few))
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(theirs)


@pytest.mark.parametrize(
    "values", [*RELEASED.values(), RELEASED["DeepSeek-V3"] | _LINEAR], ids=[*RELEASED, "DeepSeek-V3-linear"]
)
def test_scores_and_rotations_are_scaled_as_by_transformers(values: dict[str, Any], tmp_path: Path) -> None:
    model = small(values)
    config = configured(tmp_path, values)
    found = config.attention[0]
    assert isinstance(found, LatentAttentionConfig)
    assert found.scale == pytest.approx(model.model.layers[0].self_attn.scaling, rel=1e-12)
    assert found.norm.eps == model.model.layers[0].self_attn.kv_a_layernorm.variance_epsilon
    assert found.rope is not None
    rotation = RotaryScaling(found.rope, found.rotary_dim, config.max_position)
    theirs = type(model.model.rotary_emb)(model.config)
    assert rotation.attention_factor() == pytest.approx(theirs.attention_scaling, rel=1e-12)
    torch.testing.assert_close(torch.tensor(rotation.frequencies(), dtype=torch.float32), theirs.inv_freq)


@pytest.mark.parametrize("name", sorted({case.architecture for case in LATENT.values()}))
def test_missing_fields_take_transformers_defaults(name: str, tmp_path: Path) -> None:
    shape = {
        "vocab_size": 512,
        "hidden_size": 4096,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_experts_per_tok": 4,
    }
    theirs = transformers.AutoConfig.for_model(name, **shape)
    config = configured(tmp_path, {"model_type": name, **shape})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    shapes = {name: tuple(values.shape) for name, values in model.state_dict().items()}
    expected = expected_tensors(config, shapes)  # in memory, experts are stacked in one tensor
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    assert expected == shapes
    found = config.attention[0]
    assert isinstance(found, LatentAttentionConfig)
    assert found.interleaved_rope is getattr(theirs, "rope_interleave", name == "deepseek_v2")
    assert config.max_position == theirs.max_position_embeddings
    assert config.final_norm.eps == theirs.rms_norm_eps
    assert config.tie_word_embeddings is theirs.tie_word_embeddings
    assert config.bos_token_id == theirs.bos_token_id
    assert config.eos_token_ids == (theirs.eos_token_id,)
    experts = config.feed_forward[-1]
    if isinstance(experts, ExpertsConfig):
        assert experts.chosen == theirs.num_experts_per_tok
        assert experts.scale == theirs.routed_scaling_factor
        assert (experts.groups, experts.chosen_groups) == (theirs.n_group or 1, theirs.topk_group or 1)
        assert experts.renormalised is theirs.norm_topk_prob


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; supported: sigmoid"),
        ("DeepSeek-V3", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported; supported: noaux_tc"),
        ("DeepSeek-V3", {"n_group": 7}, "n_group 7, topk_group 4 and num_experts_per_tok 8 do not fit 256 experts"),
        ("DeepSeek-V3", {"topk_group": 0}, "topk_group is 0, it must be at least 1"),
        ("DeepSeek-V3", {"index_topk": 2048}, "index_topk is 2048, which deepseek_v3 does not support here"),
        ("DeepSeek-V3", {"topk_group": 9}, "n_group 8, topk_group 9 and"),
        ("DeepSeek-V3", {"n_group": 256}, "groups must be of equal size, 2 experts or more"),
        ("DeepSeek-V3", {"n_group": 128, "topk_group": 2}, "those chosen must have enough of them"),
        ("DeepSeek-V3", {"moe_layer_freq": 2}, "moe_layer_freq is 2; supported: 1"),
        ("DeepSeek-V3", {"q_lora_rank": 0}, "q_lora_rank is 0, it must be at least 1, or null"),
        ("DeepSeek-V3", {"routed_scaling_factor": 0}, "routed_scaling_factor is 0, it must be greater than 0"),
        ("DeepSeek-V3", {"rms_norm_eps": -1.0}, "rms_norm_eps is -1, it must be greater than 0"),
        ("DeepSeek-V3", {"max_position_embeddings": 0}, "max_position_embeddings is 0, it must be at least 1"),
        ("DeepSeek-V3", {"num_key_value_heads": 0}, "num_key_value_heads is 0, it must be at least 1"),
        ("DeepSeek-V3", {"rope_theta": 0}, "rope_theta of rope scaling yarn is 0"),
        ("DeepSeek-V3", {"qk_rope_head_dim": 63}, "must be even for rotary embedding"),
        ("DeepSeek-V3", {"num_nextn_predict_layers": 5000}, "num_nextn_predict_layers is 5000, it must be in"),
        ("DeepSeek-V3", {"quantization_config": {"quant_method": "fbgemm_fp8"}}, "weights quantised by 'fbgemm_fp8'"),
        (
            "GLM-4.7-Flash",
            {"mlp_layer_types": ["dense"]},
            "mlp_layer_types has 1 entries for 47 layers; supported",
        ),
        ("GLM-4.7-Flash", {"mlp_layer_types": ["linear"] * 47}, "mlp_layer_types has linear; supported: dense or spar"),
        ("MiniCPM3-4B", {"max_position_embeddings": 65536}, "'longrope' from 32768 to 65536 tokens, by factor 2, is n"),
        ("MiniCPM3-4B", {"qk_rope_head_dim": 16}, "short_factor must be a list of 8 numbers above 0, one for each"),
        ("MiniCPM3-4B", {"scale_depth": 0.0}, "scale_depth is 0, it must be greater than 0"),
        ("MiniCPM3-4B", {"rope_scaling": {"type": "su"}}, "rope scaling 'su' is not supported; supported: default"),
        ("DeepSeek-V2", {"norm_topk_prob": True}, "norm_topk_prob true of deepseek_v2 is not supported"),
        ("DeepSeek-V2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported; supported: greedy, gro"),
        ("DeepSeek-V2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported; supported: softmax"),
    ],
)
def test_unsupported_fields_are_refused(name: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        configured(tmp_path, RELEASED[name] | change)


def test_only_tensors_of_declared_draft_layers_are_ignored(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "deepseek_v3", num_hidden_layers=3, num_mtp_layers=1)
    config = json.loads((folder / "config.json").read_text())
    fewer = config | {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(fewer))
    assert open_checkpoint(str(folder), LoadFormat.AUTO).config.num_layers == 2
    for change in ({"num_nextn_predict_layers": 0}, {"num_hidden_layers": 1}):
        (folder / "config.json").write_text(json.dumps(fewer | change))
        with pytest.raises(CheckpointError, match=r"extra: model\.layers\.2\.input_layernorm\.weight"):
            open_checkpoint(str(folder), LoadFormat.AUTO)


@pytest.mark.parametrize(
    ("name", "change", "least"),
    [
        ("DeepSeek-V2-Lite", {}, 171),
        ("GLM-4.7-Flash", {}, 399),
        ("DeepSeek-V2-Lite", {"kv_lora_rank": 129}, 16512),
        ("DeepSeek-V2-Lite", {"kv_lora_rank": 128}, None),
    ],
)
def test_rows_are_expanded_where_that_takes_fewer_products(
    name: str, change: dict[str, Any], least: int | None, tmp_path: Path
) -> None:
    layer = configured(tmp_path, RELEASED[name] | change).layers[0].mixer
    assert isinstance(layer, LatentAttentionConfig)
    assert layer.expands_from == least
    made = layer.key_dim + layer.value_dim
    for queries in (1, 170, 171, 398, 399, 16511, 16512):
        absorbed = queries * (2 * layer.latent + layer.rotary_dim)
        expanded = queries * (made + layer.rotary_dim) + layer.latent * made
        assert (absorbed >= expanded) == (least is not None and queries >= least)
