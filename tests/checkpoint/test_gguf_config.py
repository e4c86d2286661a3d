"""GGUF metadata → ModelConfig."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from gguf import GGMLQuantizationType
from helpers.gguf_files import write_gguf
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from sglang_jax.architectures.dense import dense_decoder
from sglang_jax.checkpoint import ModelConfig, RopeConfig, RopeKind
from sglang_jax.checkpoint.gguf_config import gguf_model_config
from sglang_jax.checkpoint.gguf_file import open_gguf
from sglang_jax.errors import CheckpointError

SHAPE: dict[str, Any] = {
    "block_count": 3,
    "context_length": 4096,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 500000.0,
}
F32 = GGMLQuantizationType.F32


def config_of(
    folder: Path,
    architecture: str = "llama",
    change: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    tokenizer: dict[str, Any] | None = None,
) -> ModelConfig:
    shape = {name: value for name, value in (SHAPE | (change or {})).items() if value is not None}
    metadata = {f"{architecture}.{name}": value for name, value in shape.items()} | (tokenizer or {})
    stored = {"token_embd.weight": np.zeros((100, 64), dtype=np.float32)} | (tensors or {})
    path = write_gguf(folder / "x.gguf", architecture, metadata, {name: (data, F32) for name, data in stored.items()})
    return gguf_model_config(open_gguf(path))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_shapes_come_from_the_metadata(tmp_path: Path, architecture: str) -> None:
    ends = {"eos_token_id": 5, "eot_token_id": 7, "eom_token_id": 5, "bos_token_id": 4}
    tokenizer = {f"tokenizer.ggml.{name}": value for name, value in ends.items()}
    bias = np.zeros(64, dtype=np.float32)
    tensors = {f"blk.{layer}.attn_q.bias": bias for layer in range(3)}
    tensors["output.weight"] = np.zeros((100, 64), dtype=np.float32)
    config = config_of(tmp_path, architecture, {"attention.key_length": 24}, tensors, tokenizer)
    assert config == dense_decoder(
        architecture=architecture,
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0),
        max_position=4096,
        tie_word_embeddings=False,
        attention_bias=True,
        attention_out_bias=False,
        mlp_bias=False,
        qk_norm=architecture == "qwen3",
        eos_token_ids=(5, 7),
        bos_token_id=4,
        dtype="bfloat16",
    )


def test_defaults(tmp_path: Path) -> None:
    config = config_of(tmp_path, change={"attention.head_count_kv": None, "rope.freq_base": None})
    mixer = config.layers[0].mixer
    assert (mixer.num_kv_heads, mixer.head_dim, mixer.rope.theta) == (4, 16, 10000.0)
    assert config.tie_word_embeddings
    assert (config.eos_token_ids, config.bos_token_id) == ((), None)


def test_counts_per_layer_must_agree(tmp_path: Path) -> None:
    assert config_of(tmp_path, change={"attention.head_count_kv": [2, 2, 2]}).layers[0].mixer.num_kv_heads == 2
    with pytest.raises(CheckpointError, match=r"head_count_kv is \[2, 1, 2\]; it must be one integer for all layers"):
        config_of(tmp_path, change={"attention.head_count_kv": [2, 1, 2]})


def test_rope_scaling(tmp_path: Path) -> None:
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert config_of(tmp_path, change=linear).layers[0].mixer.rope == RopeConfig(
        kind=RopeKind.LINEAR, theta=500000.0, factor=4.0
    )
    old = {"rope.scale_linear": 2.0}
    assert config_of(tmp_path, change=old).layers[0].mixer.rope == RopeConfig(
        kind=RopeKind.LINEAR, theta=500000.0, factor=2.0
    )
    assert config_of(tmp_path, change={"rope.scaling.type": "none"}).layers[0].mixer.rope == RopeConfig(theta=500000.0)
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 1024}
    config = config_of(tmp_path, change=yarn)
    expected = RopeConfig(kind=RopeKind.YARN, theta=500000.0, factor=4.0, original_max_position=1024)
    assert config.layers[0].mixer.rope == expected
    scaled = config_of(tmp_path, change=yarn | {"rope.scaling.attn_factor": 0.5}).layers[0].mixer.rope
    assert scaled.attention_factor == pytest.approx(0.5 * (1 + 0.1 * math.log(4)))


def test_yarn_extends_the_context(tmp_path: Path) -> None:
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    config = config_of(tmp_path, change=yarn)
    assert (config.layers[0].mixer.rope.original_max_position, config.max_position) == (4096, 16384)


def llama3_factors(factor: float, head_dim: int, **change: Any) -> np.ndarray:
    """The stored factors: the plain frequency divided by transformers' scaled one."""
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(
        head_dim=head_dim, max_position_embeddings=131072, rope_parameters=parameters | change
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled.numpy()).astype(np.float32)


@pytest.mark.parametrize(("factor", "head_dim"), [(8.0, 128), (32.0, 64)])
def test_llama3_factors_are_recognised(tmp_path: Path, factor: float, head_dim: int) -> None:
    tensors = {"rope_freqs.weight": llama3_factors(factor, head_dim)}
    config = config_of(tmp_path, change={"attention.key_length": head_dim}, tensors=tensors)
    assert config.layers[0].mixer.rope == RopeConfig(
        kind=RopeKind.LLAMA3,
        theta=500000.0,
        factor=factor,
        original_max_position=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )


def test_other_factors_are_refused(tmp_path: Path) -> None:
    change = {"attention.key_length": 64}
    other = llama3_factors(32.0, 64, original_max_position_embeddings=4096)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight does not hold the frequency scaling of Llama 3"):
        config_of(tmp_path, change=change, tensors={"rope_freqs.weight": other})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight has shape \(32,\); heads of 16 need 8 values"):
        config_of(tmp_path, tensors={"rope_freqs.weight": other})


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("mamba", {}, "architecture 'mamba' is not supported; supported: .*llama, .*qwen2, .*qwen3"),
        ("llama", {"expert_count": 8}, r"llama\.expert_used_count is missing"),
        ("qwen2", {"expert_count": 8}, r"qwen2 models with mixtures of experts \(8 experts\) are not supported"),
        ("qwen3moe", {}, r"qwen3moe\.expert_count is missing"),
        ("llama", {"attention.sliding_window": 1024}, "sliding window of 1024 tokens"),
        ("llama", {"rope.dimension_count": 8}, r"rope\.dimension_count is 8; only whole heads \(16\)"),
        ("llama", {"rope.scaling.type": "longrope"}, "'longrope' is not supported; supported: none, linear, yarn"),
        ("llama", {"rope.scaling.type": "yarn"}, r"rope\.scaling\.factor is missing"),
        ("llama", {"block_count": None}, r"llama\.block_count is missing"),
        ("llama", {"block_count": "3"}, r"llama\.block_count should be a int, it is '3'"),
    ],
)
def test_unsupported_metadata_is_refused(
    tmp_path: Path, architecture: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_of(tmp_path, architecture, change)
