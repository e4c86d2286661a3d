"""Tensors of llama, qwen2 and qwen3 GGUF files under their Hugging Face names and in their layout."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, dequantize
from numpy.typing import NDArray

from sglang_jax.checkpoint.gguf_file import GgufFile, GgufTensor
from sglang_jax.checkpoint.model_config import Architecture, ModelConfig
from sglang_jax.checkpoint.reader import Array, Index, row_numbers, whole_index
from sglang_jax.errors import CheckpointError

ROPE_FACTORS = "rope_freqs.weight"
"""Llama 3's frequency scaling, stored as a tensor: part of the config here."""

_WHOLE_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PLAIN_DTYPES: dict[GGMLQuantizationType, np.dtype] = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_BLOCK_TYPES = frozenset(
    {
        GGMLQuantizationType.Q8_0,
        GGMLQuantizationType.Q4_0,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.Q5_0,
        GGMLQuantizationType.Q5_1,
        GGMLQuantizationType.Q4_K,
        GGMLQuantizationType.Q5_K,
        GGMLQuantizationType.Q6_K,
    }
)
SUPPORTED_TYPES = frozenset(_PLAIN_DTYPES) | _BLOCK_TYPES


@dataclass(frozen=True, slots=True)
class _Entry:
    """A stored tensor, and the heads whose rows the file has in another order (0: none)."""

    tensor: GgufTensor
    permuted_heads: int


class GgufReader:
    """F32, F16 and BF16 tensors keep their type; block-quantised ones are read as float32.

    Only the rows that are asked for are dequantised.
    """

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        """Raises `CheckpointError` naming the tensors whose type is not in `SUPPORTED_TYPES`."""
        self._file = file
        self._entries: dict[str, _Entry] = {}
        for name, tensor in file.tensors.items():
            if name != ROPE_FACTORS:
                hf_name = hugging_face_name(name)
                self._entries[hf_name] = _Entry(tensor, _permuted_heads(hf_name, config))
        unsupported = [
            f"{tensor.name} ({tensor.kind.name if tensor.kind else f'type {tensor.type_id}'})"
            for tensor in file.tensors.values()
            if tensor.kind not in SUPPORTED_TYPES
        ]
        if unsupported:
            supported = ", ".join(sorted(kind.name for kind in SUPPORTED_TYPES))
            raise CheckpointError(
                f"{file.path} holds tensors of types that cannot be read: {', '.join(unsupported)}; "
                f"supported: {supported}"
            )

    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).tensor.shape

    def read(self, name: str, index: Index | None = None) -> Array:
        entry = self._entry(name)
        rows, *rest = whole_index(entry.tensor.shape, index)
        raw: Array = self._file.raw(entry.tensor)
        if entry.tensor.kind in _PLAIN_DTYPES:
            raw = raw.view(_PLAIN_DTYPES[entry.tensor.kind])
        if entry.permuted_heads:
            raw = raw[_stored_rows(entry.tensor.shape[0], entry.permuted_heads)[rows]]
        elif raw.ndim == 1 and entry.tensor.kind in _BLOCK_TYPES:
            vector: Array = _dequantize(raw[None], entry.tensor)[0]
            return vector[rows]
        else:
            raw = raw[rows]
        return _dequantize(raw, entry.tensor)[(slice(None), *rest)]

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise CheckpointError(f"no tensor {name} in {self._file.path}")
        return self._entries[name]


def hugging_face_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name that these architectures do not use is returned as it is."""
    if name in _WHOLE_MODEL_NAMES:
        return _WHOLE_MODEL_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, ("weight" | "bias") as kind] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    return name


def _dequantize(raw: Array, tensor: GgufTensor) -> Array:
    if tensor.kind is None or tensor.kind in _PLAIN_DTYPES:
        return raw
    if raw.size == 0:
        return np.empty((0, tensor.shape[-1]), dtype=np.float32)
    values: Array = dequantize(np.ascontiguousarray(raw), tensor.kind)
    return values


def _permuted_heads(name: str, config: ModelConfig) -> int:
    """Files of the llama architecture store q and k for rotary pairs of neighbours; Hugging Face rotates halves."""
    if config.architecture not in (Architecture.LLAMA, Architecture.MISTRAL):
        return 0
    if ".self_attn.q_proj." in name:
        return config.num_heads
    return config.num_kv_heads if ".self_attn.k_proj." in name else 0


def _stored_rows(num_rows: int, heads: int) -> NDArray[np.int64]:
    """For each row of the Hugging Face layout, the row of the file that holds it: `[num_rows]`.

    A head's row `half * head_dim / 2 + i` is stored as row `2 * i + half`.
    """
    stored = row_numbers(num_rows, slice(None)).reshape(heads, -1, 2)
    return stored.swapaxes(1, 2).reshape(-1)
