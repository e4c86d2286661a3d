"""GGUF files written by the `gguf` package, the reference for the format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import PreTrainedModel, PreTrainedTokenizerFast

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[np.ndarray, GGMLQuantizationType]],
) -> Path:
    """`metadata` keys are complete; a tensor is (stored data, type), where block types have raw bytes as data."""
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    adders: tuple[tuple[type, Callable[[str, Any], None]], ...] = (
        (bool, writer.add_bool),
        (int, writer.add_uint32),
        (float, writer.add_float32),
        (str, writer.add_string),
        (list, writer.add_array),
    )
    next(add for kind, add in adders if isinstance(value, kind))(key, value)


def gguf_name(name: str) -> str:
    """The GGUF name of a Hugging Face tensor."""
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.{suffix}"
    return f"{_NAMES[stem]}.{suffix}"


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in the order in which llama-architecture files store them (as llama.cpp's converter does)."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def model_tensors(model: PreTrainedModel, kind: GGMLQuantizationType) -> dict[str, tuple[np.ndarray, Any]]:
    """A transformers model's tensors as a GGUF file stores them: matrices as `kind`, vectors as F32."""
    config = model.config
    tensors = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.float().numpy()
        if config.model_type in ("llama", "mistral") and ".q_proj." in name:
            values = permuted(values, config.num_attention_heads)
        if config.model_type in ("llama", "mistral") and ".k_proj." in name:
            values = permuted(values, config.num_key_value_heads)
        stored = kind if values.ndim == 2 else GGMLQuantizationType.F32
        tensors[gguf_name(name)] = (gguf.quantize(values, stored), stored)
    return tensors


def _rope_of_most(parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters of layers with full attention, where layers with a window have separate ones."""
    whole: dict[str, Any] = parameters.get("full_attention", parameters)
    return whole


def model_metadata(model: PreTrainedModel, architecture: str) -> dict[str, Any]:
    """The keys that describe a transformers model's shape."""
    config = model.config
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.freq_base": float(_rope_of_most(config.rope_parameters)["rope_theta"]),
    }
    if "layer_norm_eps" in config.to_dict():
        values["attention.layer_norm_epsilon"] = config.layer_norm_eps
    else:
        values["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    if "head_dim" in config.to_dict():
        values |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    return {f"{architecture}.{key}": value for key, value in values.items()}


def byte_level_metadata(tokenizer: PreTrainedTokenizerFast, pre: str = "gpt-2") -> dict[str, Any]:
    """The keys that describe a byte-level BPE tokenizer."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    special = set(tokenizer.all_special_tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        "tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": tokenizer.chat_template,
    }


def make_tiny_gguf(
    path: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    architecture: str = "llama",
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    others: Mapping[str, tuple[np.ndarray, GGMLQuantizationType]] = MappingProxyType({}),
) -> Path:
    """Writes a transformers model and its tokenizer as one GGUF file. `others`: tensors that replace the model's."""
    metadata = model_metadata(model, architecture) | byte_level_metadata(tokenizer)
    return write_gguf(path, architecture, metadata, model_tensors(model, kind) | dict(others))
