"""Checkpoints: model configs, tensors and tokenizers from Hugging Face folders, GGUF files and the hub.

Tensors are numpy arrays; neither jax nor torch is imported. `checkpoint.tokenizer` imports transformers, which takes a
second, and so is imported only where text is tokenized.
"""

from sglang_jax.architectures.kinds.rope import RopeConfig, RopeKind
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.checkpoint.hf_config import write_hf_config
from sglang_jax.checkpoint.opening import Checkpoint, open_checkpoint, open_served, tokenizer_source, with_end_tokens
from sglang_jax.checkpoint.parameters import ParameterReader
from sglang_jax.checkpoint.reader import TensorReader
from sglang_jax.checkpoint.resolve import DEMO, ORBAX_MARKER, ModelSource, SourceKind, resolve_model, resolve_tokenizer
from sglang_jax.checkpoint.tensors import check_tensors, expected_tensors

__all__ = [
    "DEMO",
    "ORBAX_MARKER",
    "Checkpoint",
    "ModelConfig",
    "ModelSource",
    "ParameterReader",
    "RopeConfig",
    "RopeKind",
    "SourceKind",
    "TensorReader",
    "check_tensors",
    "expected_tensors",
    "open_checkpoint",
    "open_served",
    "resolve_model",
    "resolve_tokenizer",
    "tokenizer_source",
    "with_end_tokens",
    "write_hf_config",
]
