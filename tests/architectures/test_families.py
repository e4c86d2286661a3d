"""Configs of families, with transformers' classes as the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.family_cases import FAMILIES, HYBRIDS, LATENT
from helpers.tiny_models import make_tiny_checkpoint
from safetensors import safe_open

from sglang_jax.architectures import CacheGroup, CacheKind, ModelConfig, cache_groups
from sglang_jax.architectures.manifest import manifest_of
from sglang_jax.architectures.registry import known_families
from sglang_jax.checkpoint import ParameterReader, expected_tensors, open_checkpoint
from sglang_jax.checkpoint.hf_config import load_hf_config
from sglang_jax.config import LoadFormat
from sglang_jax.errors import CheckpointError

_SHAPE = {
    "vocab_size": 200000,
    "hidden_size": 4096,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
}
_BERT = ("bert", "roberta", "xlm-roberta")
_EPS = {"lfm2": "norm_eps", "lfm2_moe": "norm_eps", **dict.fromkeys(("cohere2", *_BERT), "layer_norm_eps")}
_WHOLE, _LOCAL = "full_attention", "sliding_attention"


def configured(folder: Path, family: str, **values: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(_SHAPE | {"model_type": family} | values))
    return load_hf_config(folder)


@pytest.mark.parametrize("name", FAMILIES | HYBRIDS | LATENT)
def test_tensors_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    case = (FAMILIES | HYBRIDS | LATENT)[name]
    folder = make_tiny_checkpoint(tmp_path, case.architecture, **case.changes)
    with safe_open(folder / "model.safetensors", "np") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    config = open_checkpoint(str(folder), LoadFormat.DUMMY).config
    assert expected_tensors(config, shapes) == shapes


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2"])
def test_norms_of_random_weights_multiply_by_1(name: str, tmp_path: Path) -> None:
    case = FAMILIES[name]
    folder = make_tiny_checkpoint(tmp_path, case.architecture, **case.changes)
    dummy = open_checkpoint(str(folder), LoadFormat.DUMMY)
    assert dummy.reader is not None
    reader = ParameterReader(dummy.reader, dummy.config)
    norms = [spec for spec in manifest_of(dummy.config).specs.values() if spec.is_scale]
    assert len(norms) >= 1 + 4 * dummy.config.num_layers
    for spec in norms:
        assert (reader.read(spec.name) == 1).all()


@pytest.mark.parametrize(
    ("family", "values", "told"),
    [
        ("llama", {"num_key_value_heads": 8}, "8 with 32 heads of 128 (8 of keys)"),
        (
            "gpt_oss",
            {"num_local_experts": 16, "sliding_window": 64},
            "4 with 32 heads of 64 (8 of keys) in a window of 64, 8 with 4 of 16 experts, "
            "4 with 32 heads of 64 (8 of keys)",
        ),
        ("qwen3_5_text", {}, "6 recurrent, 2 with 32 heads of 256 (4 of keys)"),
        (
            "qwen3_next",
            {"full_attention_interval": 2, "mlp_only_layers": [1], "num_experts": 16},
            "4 recurrent, 7 with 10 of 16 experts, 4 with 32 heads of 256 (2 of keys)",
        ),
        (
            "deepseek_v2",
            {"first_k_dense_replace": 1, "num_experts_per_tok": 6},
            "8 with 32 heads and latents of 512, 7 with 6 of 64 experts",
        ),
    ],
)
def test_a_line_tells_the_sizes(family: str, values: dict[str, Any], told: str, tmp_path: Path) -> None:
    assert configured(tmp_path, family, **values).describe() == (
        f"{family}: 8 layers of 4096, vocabulary of 200000; {told}"
    )


_WITHOUT_ATTENTION = ("granitemoehybrid", "mamba2", "nemotron_h")
"""Families whose layers have no window unless the file says so."""

_LATENT = sorted({case.architecture for case in LATENT.values()})
"""Families with latent attention; tests/architectures/test_latent_families.py has their defaults."""


_CHANGED: dict[str, dict[str, Any]] = {
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "minimax_m2": {"rotary_dim": 64},
    "llama4_text": {"attention_chunk_size": None, "attn_temperature_tuning": False},
}
"""Fields of families that cannot be served, or say too little, without them."""


@pytest.mark.parametrize(
    "family", sorted({family.name for family in known_families()} - {*_WITHOUT_ATTENTION, *_LATENT})
)
def test_missing_fields_take_transformers_defaults(family: str, tmp_path: Path) -> None:
    more = _CHANGED.get(family, {})
    config = configured(tmp_path, family, **more)
    theirs = transformers.AutoConfig.for_model(family, **_SHAPE, **more)
    first = next(number for number, layer in enumerate(config.layers) if layer.attention is not None)
    attention = config.layers[first].attention
    theirs_of_layer = theirs.per_layer_config[first]
    of_keys = "num_attention_heads" if family in _BERT else "num_key_value_heads"
    assert attention.num_kv_heads == getattr(theirs_of_layer, of_keys)
    assert attention.head_dim == (getattr(theirs_of_layer, "head_dim", None) or 128)
    first_position = 0 if config.learnt_positions is None else config.learnt_positions.first
    assert first_position == (2 if family in _BERT[1:] else 0)  # as in transformers' RobertaEmbeddings
    assert config.max_position == theirs.max_position_embeddings - first_position
    assert config.final_norm.eps == getattr(theirs, _EPS.get(family, "rms_norm_eps"))
    assert config.tie_word_embeddings is theirs.tie_word_embeddings
    assert config.bos_token_id == theirs.bos_token_id
    ends = theirs.eos_token_id
    assert config.eos_token_ids == (() if ends is None else tuple(ends) if isinstance(ends, list) else (ends,))
    activation = getattr(theirs, "hidden_activation", None) or getattr(theirs, "hidden_act", "silu")
    assert config.layers[0].feed_forward.activation == activation
    sliding = [kind == _LOCAL for kind in getattr(theirs, "layer_types", None) or [_WHOLE] * 8]
    window = getattr(theirs, "sliding_window", None)
    if family in ("mistral", "phi3"):
        sliding = [window is not None] * 8
    outgrown = window is not None and window < theirs.max_position_embeddings
    expected = [window if slides and outgrown else None for slides in sliding]
    windows = [None if layer.attention is None else layer.attention.window for layer in config.layers]
    assert windows == expected
    if "rope_theta" in getattr(theirs, "rope_parameters", {}):
        thetas = {attention.rope.theta for attention in config.attention if attention.rope is not None}
        assert thetas == {theirs.rope_parameters["rope_theta"]}
        share = theirs.rope_parameters.get("partial_rotary_factor", 1.0)
        assert attention.rope is None or attention.rope.partial_rotary_factor == share
    assert attention.soft_cap == getattr(theirs, "attn_logit_softcapping", None)
    assert config.logit_cap == getattr(theirs, "final_logit_softcapping", None)
    if family in ("gemma2", "gemma3_text"):
        assert attention.scale == theirs.query_pre_attn_scalar**-0.5


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("lfm2", {"full_attn_idxs": [2, 5]}),
        ("qwen3_5_text", {}),
        ("lfm2_moe", {"layer_types": ["conv", "full_attention"] * 4}),
        ("qwen3_5_moe_text", {}),
        ("qwen3_next", {}),
        ("mamba2", {}),
        ("falcon_h1", {"mamba_d_ssm": 4096}),
        ("granitemoehybrid", {"num_local_experts": 0}),
        ("granitemoehybrid", {}),
        ("nemotron_h", {"hybrid_override_pattern": "M-M*-MM-"}),
        ("nemotron_h", {"hybrid_override_pattern": "MEM*-MME"}),
    ],
)
def test_missing_fields_of_recurrent_layers_take_transformers_defaults(
    family: str, more: dict[str, Any], tmp_path: Path
) -> None:
    theirs = transformers.AutoConfig.for_model(family, **_SHAPE, **more)
    config = configured(tmp_path, family, **more)
    with_attention = [layer.attention is not None for layer in config.layers]
    assert with_attention == [kind in (_WHOLE, "hybrid") for kind in theirs.layer_types]
    assert config.bos_token_id == theirs.bos_token_id
    assert config.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert config.tie_word_embeddings is theirs.tie_word_embeddings
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    shapes = {name: tuple(values.shape) for name, values in model.state_dict().items()}
    if family == "nemotron_h":  # files have another name for its layers
        shapes = {name.replace("model.", "backbone.", 1): shape for name, shape in shapes.items()}
    assert manifest_of(config).tensors(shapes).items() <= shapes.items()


@pytest.mark.parametrize(
    ("values", "context"),
    [
        ({}, 8191),
        ({"attn_temperature_tuning": False}, 8192),
        ({"attn_temperature_tuning": 4, "attention_chunk_size": None}, 8191),
        ({"attn_temperature_tuning": False, "no_rope_layers": [0] * 8}, 131072),
        ({"no_rope_layers": [1] * 8, "attention_chunk_size": 4096}, 4096),
        ({"attention_chunk_size": None, "floor_scale": 100000}, 99999),
    ],
)
def test_the_context_of_llama4_ends_where_chunks_or_scales_begin(
    values: dict[str, Any], context: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert configured(tmp_path, "llama4_text", **values).max_position == context
    told = f"the context is {context} tokens, not 131072: "
    assert (told in caplog.text) is (context < 131072)


def test_gemma3_in_both_spellings(tmp_path: Path) -> None:
    old = {
        "rope_theta": 2e6,
        "rope_local_base_freq": 5e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
    }
    theirs = transformers.AutoConfig.for_model("gemma3_text", **_SHAPE | old)
    new = {"rope_parameters": theirs.rope_parameters, "layer_types": theirs.layer_types}
    config = configured(tmp_path, "gemma3_text", **old)
    assert config == configured(tmp_path, "gemma3_text", **new)
    local, _, whole = (layer.mixer for layer in config.layers[:3])
    assert (local.rope.theta, whole.rope.theta, whole.rope.factor) == (5e4, 2e6, 8.0)
    assert cache_groups(config) == (
        CacheGroup("full", CacheKind.FULL, (2, 5)),
        CacheGroup("swa", CacheKind.WINDOW, (0, 1, 3, 4, 6, 7), 4096),
    )


@pytest.mark.parametrize("window", [None, 64])
def test_exaone4_rotates_all_layers_but_full_ones_of_a_hybrid(window: int | None, tmp_path: Path) -> None:
    types = [_LOCAL if window and (number + 1) % 4 else _WHOLE for number in range(8)]
    config = configured(tmp_path, "exaone4", sliding_window=window, sliding_window_pattern="LLLG")
    assert config == configured(tmp_path, "exaone4", sliding_window=window, layer_types=types)
    rotates = [layer.mixer.rope is not None for layer in config.layers]
    assert rotates == [kind == _LOCAL or window is None for kind in types]


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported; supported: silu, gelu"),
        ("exaone4", {"sliding_window_pattern": "LGLG"}, "sliding_window_pattern is 'LGLG', it must be"),
        ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers has 2 entries, it must have one for each of 8 layers"),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "rope scaling 'longrope' is not supported"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.75}}, "partial_rotary_factor 0.75 is not supported"),
        (
            "lfm2",
            {"layer_types": ["conv", "mamba"] * 4},
            "layer_types has mamba; supported: conv or full_attention for",
        ),
        ("qwen3_5_text", {"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5 of rope scaling default is not"),
        (
            "qwen3_5_text",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "partial_rotary_factor 0.25 of rope scaling yarn is not supported",
        ),
        ("glm4", {"head_dim": 20, "partial_rotary_factor": 0.25}, "rotates 5 of the 20 numbers of a head"),
        ("glm4", {"head_dim": 16, "partial_rotary_factor": 0.05}, "rotates 0 of the 16 numbers of a head"),
        ("qwen3_5_text", {"linear_num_key_heads": 5}, "linear_num_value_heads .32. must be a multiple of"),
        ("qwen3_5_text", {"num_experts": 8}, "num_experts is 8, which qwen3_5_text does not support here"),
        ("olmo2", {"residual_multiplier": 0.5}, "residual_multiplier is 0.5, which olmo2 does not support here"),
        ("nemotron_h", {}, "layers_block_type .or hybrid_override_pattern. has 0 entries for 8 layers; supported: "),
        ("nemotron_h", {"hybrid_override_pattern": "M-"}, "has 2 entries for 8 layers; supported: linear_attention .M"),
        ("nemotron_h", {"hybrid_override_pattern": "M-M*-MX-"}, "has 'X'; supported: linear_attention .M., full_att"),
        ("nemotron_h", {"hybrid_override_pattern": "M-MEM*-E", "mlp_bias": True}, "mlp_bias is true; only false is"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias is true; only false is supported, experts have no biases"),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min is 0.1, it must be at most 1e-06"),
        ("llama4_text", {"moe_layers": [1, 99]}, "moe_layers has 99; there are 8 layers, numbered from 0"),
        ("qwen3_next", {"attn_output_gate": False}, "attn_output_gate is false; only true is supported"),
        ("granitemoehybrid", {"normalization_function": "layernorm"}, "normalization_function is 'layernorm'; only"),
        ("llama4_text", {"num_experts_per_tok": 2}, "num_experts_per_tok is 2; only 1 is supported"),
        ("minimax_m2", {"attn_type_list": [1, 0] * 4}, "attn_type_list has linear attention; only 1 is supported"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; supported: 'sigmoid'"),
        (
            "nemotron_h",
            {"layers_block_type": ["mlp"] * 8, "mlp_hidden_act": "silu"},
            "mlp_hidden_act 'silu' is not supported; supported: relu2",
        ),
    ],
)
def test_unsupported_fields_are_refused(family: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        configured(tmp_path, family, **change)


def test_gelu_in_gemmas_first_files_means_its_tanh_approximation(tmp_path: Path) -> None:
    assert transformers.AutoConfig.for_model("gemma", hidden_act="gelu").hidden_act == "gelu_pytorch_tanh"
    assert configured(tmp_path, "gemma", hidden_act="gelu") == configured(tmp_path, "gemma")


@pytest.mark.parametrize("name", ["gemma2", "granite"])
def test_configs_without_a_common_format_are_not_written(name: str, tmp_path: Path) -> None:
    from sglang_jax.checkpoint import write_hf_config

    with pytest.raises(CheckpointError, match=r"cannot be made from a GGUF file: take the model's Hugging Face"):
        write_hf_config(configured(tmp_path, name), tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_attention_heads": 24}, r"hidden_size \(4096\) must be a multiple of num_attention_heads \(24\)"),
        ({"hidden_act": "tanh"}, "hidden_act 'tanh' is not supported; supported: gelu, relu"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key' is not supported"),
        ({"is_decoder": True}, "is_decoder is true"),
        ({"max_position_embeddings": 2}, "max_position_embeddings is 2; it must be more than 2"),
    ],
)
def test_encoders_of_another_form(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        configured(tmp_path, "roberta", **values)
