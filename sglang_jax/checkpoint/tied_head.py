"""Finds checkpoints that have a separate output matrix, although their config ties it to the embeddings."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from sglang_jax.architectures.model_config import ModelConfig
from sglang_jax.architectures.registry import family_named
from sglang_jax.architectures.tensor_names import ParameterKind, Part, hf_name
from sglang_jax.checkpoint.reader import TensorReader

logger = logging.getLogger(__name__)

_PLACES, _ROWS = 16, 16


def as_tied_in_file(config: ModelConfig, reader: TensorReader) -> ModelConfig:
    """Unties the config, with a warning, if the file's output matrix differs from its embeddings."""
    if not config.tie_word_embeddings:
        return config
    names = family_named(config.architecture).names
    head, embeddings = (hf_name(names[part], ParameterKind.WEIGHT, None) for part in (Part.HEAD, Part.EMBEDDING))
    return replace(config, tie_word_embeddings=False) if head_differs(reader, head, embeddings) else config


def head_differs(reader: TensorReader, head: str, embeddings: str) -> bool:
    """Whether a file has both matrices, of one shape, and they differ. Compares `_ROWS` rows at `_PLACES` places,
    because matrices that were trained separately differ everywhere. transformers uses such a head too."""
    if not {head, embeddings} <= reader.names() or reader.shape(head) != reader.shape(embeddings):
        return False
    rows = reader.shape(head)[0]
    for begin in np.unique(np.linspace(0, max(rows - _ROWS, 0), _PLACES).astype(int)).tolist():
        part = (slice(begin, min(begin + _ROWS, rows)),)
        if not np.array_equal(reader.read(head, part), reader.read(embeddings, part)):
            logger.warning(
                "The config ties %s to %s, but the file has two different matrices: using both",
                head,
                embeddings,
            )
            return True
    return False
