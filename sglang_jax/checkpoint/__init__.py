"""Checkpoints: model configs, tensors and tokenizers from Hugging Face folders, GGUF files and the hub.

Framework-free: tensors are numpy arrays, and neither jax nor torch is imported.
"""

from sglang_jax.architectures.model_config import ModelConfig, RopeConfig, RopeKind
from sglang_jax.checkpoint.hf_config import write_hf_config
from sglang_jax.checkpoint.opening import Checkpoint, open_checkpoint
from sglang_jax.checkpoint.parameters import ParameterReader
from sglang_jax.checkpoint.reader import TensorReader
from sglang_jax.checkpoint.resolve import DEMO, ORBAX_MARKER, ModelSource, SourceKind, resolve_model, resolve_tokenizer
from sglang_jax.checkpoint.tensors import check_tensors, expected_tensors
from sglang_jax.checkpoint.text_stream import TextStream
from sglang_jax.checkpoint.tokenizer import Tokenizer, load_tokenizer

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
    "TextStream",
    "Tokenizer",
    "check_tensors",
    "expected_tensors",
    "load_tokenizer",
    "open_checkpoint",
    "resolve_model",
    "resolve_tokenizer",
    "write_hf_config",
]
