"""config.json → ModelConfig, with transformers' own config classes as the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from helpers.tiny_models import ARCHITECTURES, make_tiny_checkpoint

from sglang_jax.architectures.model_config import CacheGroup, CacheKind, cache_groups
from sglang_jax.checkpoint import RopeKind, open_checkpoint, write_hf_config
from sglang_jax.checkpoint.hf_config import load_generation_defaults, load_hf_config
from sglang_jax.errors import CheckpointError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
}
CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 5.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    "yarn-all": {
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
        "attention_factor": 1.25,
        "truncate": False,
    },
}


def written(folder: Path, values: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def architecture_values(architecture: str) -> dict[str, Any]:
    return LLAMA | {"architectures": [CLASSES[architecture]], "model_type": architecture, "sliding_window": None}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_shapes_agree_with_transformers(tmp_path: Path, architecture: str) -> None:
    folder = make_tiny_checkpoint(tmp_path, architecture, tie_word_embeddings=True)
    config = load_hf_config(folder)
    theirs = transformers.AutoConfig.from_pretrained(folder)
    assert config.architecture == architecture
    assert config.vocab_size == theirs.vocab_size
    assert config.hidden_size == theirs.hidden_size
    assert config.layers[0].feed_forward.size == theirs.intermediate_size
    assert config.num_layers == theirs.num_hidden_layers
    mixer = config.layers[0].mixer
    assert (mixer.num_heads, mixer.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert mixer.head_dim == (32 if architecture == "qwen3" else 16)
    assert config.final_norm.eps == theirs.rms_norm_eps
    assert config.max_position == theirs.max_position_embeddings
    assert config.tie_word_embeddings is True
    assert (config.bos_token_id, config.eos_token_ids) == (0, (2,))
    assert config.dtype == "float32"
    assert config.layers[0].mixer.bias is (architecture == "qwen2")
    assert config.layers[0].mixer.out_bias is False
    assert (config.layers[0].mixer.qk_norm is not None) is (architecture == "qwen3")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_missing_fields_take_transformers_defaults(tmp_path: Path, architecture: str) -> None:
    values = architecture_values(architecture)
    for name in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "architectures"):
        del values[name]
    values |= {"num_attention_heads": 32, "hidden_size": 4096}
    config = load_hf_config(written(tmp_path, values))
    theirs = transformers.AutoConfig.for_model(**values)
    assert config.layers[0].mixer.num_kv_heads == theirs.num_key_value_heads
    assert config.max_position == theirs.max_position_embeddings
    assert config.final_norm.eps == theirs.rms_norm_eps
    assert config.layers[0].mixer.head_dim == 128
    assert config.tie_word_embeddings is theirs.tie_word_embeddings
    assert config.bos_token_id == theirs.bos_token_id
    assert config.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert config.layers[0].mixer.rope.theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling", "rope_scaling with type"])
def test_rope_in_both_spellings(tmp_path: Path, rope: str, form: str) -> None:
    kind = rope.removesuffix("-all")
    parameters = ROPES[rope]
    values = dict(LLAMA)
    if form == "rope_parameters":
        values["rope_parameters"] = {"rope_type": kind, "rope_theta": 5e5, **parameters}
    else:
        key = "type" if form.endswith("type") else "rope_type"
        values |= {"rope_theta": 5e5, "rope_scaling": {key: kind, **parameters} if parameters else None}
    config = load_hf_config(written(tmp_path, values))
    theirs = transformers.LlamaConfig(**values).rope_parameters
    assert (config.layers[0].mixer.rope.kind, config.layers[0].mixer.rope.theta) == (
        RopeKind(kind),
        theirs["rope_theta"],
    )
    assert config.layers[0].mixer.rope.factor == theirs.get("factor", 1.0)
    for ours, name in (
        (config.layers[0].mixer.rope.low_freq_factor, "low_freq_factor"),
        (config.layers[0].mixer.rope.high_freq_factor, "high_freq_factor"),
        (config.layers[0].mixer.rope.beta_fast, "beta_fast"),
        (config.layers[0].mixer.rope.beta_slow, "beta_slow"),
        (config.layers[0].mixer.rope.mscale, "mscale"),
        (config.layers[0].mixer.rope.mscale_all_dim, "mscale_all_dim"),
        (config.layers[0].mixer.rope.attention_factor, "attention_factor"),
        (config.layers[0].mixer.rope.truncate, "truncate"),
    ):
        if name in parameters:
            assert ours == theirs[name] == parameters[name]
    if kind in ("llama3", "yarn"):
        assert config.layers[0].mixer.rope.original_max_position == theirs["original_max_position_embeddings"]
    if kind == "dynamic":
        assert config.layers[0].mixer.rope.original_max_position == 2048
    assert config.max_position == 2048


def test_yarn_extends_the_declared_context(tmp_path: Path) -> None:
    """As Qwen2.5's documentation asks: max_position_embeddings stays the length before scaling."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert load_hf_config(written(tmp_path, LLAMA | {"rope_scaling": scaling})).max_position == 8192
    del scaling["original_max_position_embeddings"]
    config = load_hf_config(written(tmp_path, LLAMA | {"rope_scaling": scaling}))
    assert (config.layers[0].mixer.rope.original_max_position, config.max_position) == (2048, 8192)


@pytest.mark.parametrize(
    ("scaling", "default", "longest"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, 8192, 8192),
        ({"type": "dynamic", "factor": 1.5}, 3072, 3072),
        ({"rope_type": "linear", "factor": 4.0}, 2048, 8192),  # 2,048 may be the context after scaling
        ({"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 512}, 2048, 2048),
        ({"rope_type": "linear", "factor": 8.0, "original_max_position_embeddings": 512}, 2048, 4096),
        ({"rope_type": "yarn", "factor": 4.0}, 8192, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048, 2048),
        ({"rope_type": "llama3", **ROPES["llama3"]}, 2048, 2048),
        (None, 2048, 2048),
    ],
)
def test_the_context_is_the_length_after_rope_scaling(
    tmp_path: Path, scaling: dict[str, Any] | None, default: int, longest: int
) -> None:
    config = load_hf_config(written(tmp_path, LLAMA | {"rope_scaling": scaling}))
    assert (config.default_context, config.longest_context) == (default, longest)
    write_hf_config(config, tmp_path)
    assert load_hf_config(tmp_path) == config


def test_a_window_shorter_than_only_the_scaled_context_counts(tmp_path: Path) -> None:
    values = architecture_values("mistral") | {"max_position_embeddings": 2048, "sliding_window": 2048}
    assert load_hf_config(written(tmp_path, values)).layers[0].mixer.window is None
    dynamic = load_hf_config(written(tmp_path, values | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}))
    assert dynamic.layers[0].mixer.window == 2048


def test_biases_of_llama_and_qwen3(tmp_path: Path) -> None:
    config = load_hf_config(written(tmp_path, LLAMA | {"attention_bias": True, "mlp_bias": True}))
    assert (
        config.layers[0].mixer.bias,
        config.layers[0].mixer.out_bias,
        config.layers[0].feed_forward.bias,
    ) == (True, True, True)
    config = load_hf_config(written(tmp_path, architecture_values("qwen3") | {"attention_bias": True}))
    assert (
        config.layers[0].mixer.bias,
        config.layers[0].mixer.out_bias,
        config.layers[0].feed_forward.bias,
    ) == (True, True, False)


def test_head_dim_may_be_null_or_differ_from_hidden_over_heads(tmp_path: Path) -> None:
    assert load_hf_config(written(tmp_path, LLAMA | {"head_dim": None})).layers[0].mixer.head_dim == 8
    assert load_hf_config(written(tmp_path, LLAMA | {"head_dim": 80})).layers[0].mixer.head_dim == 80


def test_end_of_sequence_ids_of_both_files_are_joined(tmp_path: Path) -> None:
    folder = written(tmp_path, LLAMA | {"eos_token_id": [7, 9]}, {"eos_token_id": [9, 11]})
    assert load_hf_config(folder).eos_token_ids == (7, 9, 11)
    folder = written(tmp_path, LLAMA | {"eos_token_id": None}, {"eos_token_id": 11})
    assert load_hf_config(folder).eos_token_ids == (11,)


def test_generation_defaults(tmp_path: Path) -> None:
    folder = written(tmp_path, LLAMA, {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05})
    defaults = load_generation_defaults(folder)
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.6, 0.9, 20)
    assert defaults.repetition_penalty == 1.05
    assert defaults.min_p is None
    (folder / "generation_config.json").unlink()
    assert load_generation_defaults(folder).recommended() == {}


def test_a_top_k_of_zero_keeps_all_as_in_transformers(tmp_path: Path) -> None:
    defaults = load_generation_defaults(written(tmp_path, LLAMA, {"top_k": 0, "min_p": 0.0, "do_sample": True}))
    assert defaults.recommended() == {"top_k": -1, "min_p": 0.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel is not supported: LlamaForCausalLM, with the same model_type, is supported; .*LlamaForC",
        ),
        ({"architectures": ["PhiForCausalLM"]}, "PhiForCausalLM is not supported"),
        ({"architectures": None, "model_type": "mamba"}, "mamba is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"quantization_config": {"quant_method": "quip"}}, "quantised by 'quip' are not supported"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope' is not supported; supported: default, lin"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, r"rope_scaling\.factor is '2', it must be a number"),
        (
            {"rope_scaling": {"type": "linear", "factor": 0}},
            "factor of rope scaling linear is 0; it must be a positive",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": -3.0}}, "factor of rope scaling dynamic is -3"),
        ({"rope_scaling": {"type": "linear", "factor": 1e308}}, r"factor of rope scaling linear is 1e\+308"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": -3}}, "beta_fast of rope scaling yarn is -3"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 1.0}, "rope_theta of rope scaling yarn is 1;"),
        ({"rope_theta": -1.0}, "rope_theta of rope scaling default is -1"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', it must be an object"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5 is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64', it must be an integer"),
        ({"vocab_size": 0}, "vocab_size is 0, it must be at least 1"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(8\) must be a multiple of num_key_value_heads \(3\)"),
        ({"head_dim": 7}, r"head_dim \(7\) must be even"),
        ({"attention_bias": 1}, "attention_bias is 1, it must be true or false"),
        ({"eos_token_id": ["2"]}, "eos_token_id is .* it must be an integer or a list of integers"),
    ],
)
def test_unsupported_fields_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_hf_config(written(tmp_path, LLAMA | change))


@pytest.mark.parametrize(
    ("architecture", "change", "windows"),
    [
        ("mistral", {"sliding_window": 1024}, [1024, 1024, 1024]),
        ("mistral", {"sliding_window": 2048}, [None, None, None]),
        ("mistral", {"sliding_window": None}, [None, None, None]),
        ("qwen2", {"sliding_window": 1024, "use_sliding_window": False}, [None, None, None]),
        ("qwen2", {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 3}, [None, None, None]),
        ("qwen2", {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 2}, [None, None, 1024]),
        (
            "qwen3",
            {
                "sliding_window": 1024,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            [1024, None, 1024],
        ),
        ("qwen3", {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 0}, [None, None, None]),
    ],
)
def test_layers_with_a_window_shorter_than_the_context(
    tmp_path: Path, architecture: str, change: dict[str, Any], windows: list[int | None]
) -> None:
    config = load_hf_config(written(tmp_path, architecture_values(architecture) | change))
    assert [layer.mixer.window for layer in config.layers] == windows
    full = tuple(number for number, window in enumerate(windows) if window is None)
    sliding = tuple(number for number, window in enumerate(windows) if window is not None)
    groups = [CacheGroup("full", CacheKind.FULL, full), CacheGroup("swa", CacheKind.WINDOW, sliding, 1024)]
    assert cache_groups(config) == tuple(group for group in groups if group.layers)


def test_mistral_without_the_field_has_transformers_window(tmp_path: Path) -> None:
    values = architecture_values("mistral") | {"max_position_embeddings": 32768}
    del values["sliding_window"]
    assert load_hf_config(written(tmp_path, values)).layers[2].mixer.window == 4096


def test_unknown_layer_types_are_named(tmp_path: Path) -> None:
    values = architecture_values("qwen2") | {"use_sliding_window": True}
    with pytest.raises(
        CheckpointError, match="layer_types has chunked_attention; supported: sliding_attention or full"
    ):
        load_hf_config(written(tmp_path, values | {"layer_types": ["chunked_attention"] * 3}))
    with pytest.raises(CheckpointError, match="layer_types has 2 entries for 3 layers"):
        load_hf_config(written(tmp_path, values | {"layer_types": ["full_attention"] * 2}))


@pytest.mark.parametrize(
    ("name", "value"),
    [("attn_logit_softcapping", 50.0), ("num_local_experts", 8), ("no_rope_layers", [1, 0, 1]), ("use_qk_norm", True)],
)
def test_a_field_of_another_family_is_refused(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=rf"{name} is .*, which llama does not support here"):
        load_hf_config(written(tmp_path, LLAMA | {name: value}))


def test_gemma_2s_soft_cap_is_refused_for_gemma_3(tmp_path: Path) -> None:
    """It was ignored silently."""
    values = transformers.AutoConfig.for_model("gemma3_text", num_hidden_layers=3).to_dict()
    values["architectures"] = ["Gemma3ForCausalLM"]
    assert load_hf_config(written(tmp_path, values | {"attn_logit_softcapping": None})).layers[0].mixer.soft_cap is None
    with pytest.raises(
        CheckpointError, match=r"attn_logit_softcapping is 50\.0, which gemma3_text does not support here"
    ):
        load_hf_config(written(tmp_path, values | {"attn_logit_softcapping": 50.0}))


def test_rotary_parameters_per_layer_type_are_refused(tmp_path: Path) -> None:
    sets = {"full_attention": {"rope_type": "yarn", "factor": 4.0}, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(CheckpointError, match="parameters for full_attention, sliding_attention are not supported"):
        load_hf_config(written(tmp_path, LLAMA | {"rope_parameters": sets}))


def test_long_names_are_truncated_in_the_error_for_an_unknown_family(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_hf_config(written(tmp_path, LLAMA | {"architectures": ["X" * 100_000], "y" * 50_000: 3}))
    assert len(str(caught.value)) < 3000


def test_unknown_fields_are_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load_hf_config(written(tmp_path, LLAMA | {"flux_capacitors": 3, "use_cache": True, "tardis": None}))
    (record,) = caplog.records
    assert record.getMessage().endswith("ignoring unknown fields: flux_capacitors")


def test_a_config_that_is_missing_or_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must contain a JSON object, got list"):
        load_hf_config(tmp_path)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("rope", ROPES)
def test_a_written_config_reads_back(tmp_path: Path, architecture: str, rope: str) -> None:
    parameters = {"rope_type": rope.removesuffix("-all"), "rope_theta": 3e4, **ROPES[rope]}
    values = architecture_values(architecture) | {"rope_parameters": parameters, "eos_token_id": [3, 4], "head_dim": 16}
    config = load_hf_config(written(tmp_path, values))
    write_hf_config(config, tmp_path)
    assert load_hf_config(tmp_path) == config
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.num_hidden_layers == 3
    assert theirs.rope_parameters["rope_theta"] == 3e4


def test_the_embedded_models_config_can_be_written(tmp_path: Path) -> None:
    config = open_checkpoint("demo").config
    write_hf_config(config, tmp_path)
    assert load_hf_config(tmp_path) == config
