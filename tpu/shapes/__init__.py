"""Shapes of well-known models from their config.json, so that they can be checked without the hub."""

from __future__ import annotations

from pathlib import Path

from sglang_jax.architectures.json_fields import JsonFields
from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.checkpoint.hf_config import model_config_from_hf
from sglang_jax.checkpoint.hf_quantization import read_quantization
from sglang_jax.checkpoint.stored_quantization import StoredQuantization

_FOLDER = Path(__file__).parent

SHAPES = tuple(sorted(file.stem for file in _FOLDER.glob("*.json")))


def load_shape(name: str) -> ModelConfig:
    """Loads one of `SHAPES`."""
    file = _FOLDER / f"{name}.json"
    return model_config_from_hf(JsonFields.read(file), JsonFields({}, file))


def stored_quantization(name: str) -> StoredQuantization | None:
    """How the published checkpoint of one of `SHAPES` is quantised."""
    return read_quantization(JsonFields.read(_FOLDER / f"{name}.json"), None)
