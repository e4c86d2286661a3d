"""Vectors and scores of texts, as callers get them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_jax.architectures.pooling import Activation, Pooler
from sglang_jax.engine.types import GenerateOutput, ModelInfo, OutputDelta
from sglang_jax.errors import AbortedError, ParameterError, quote
from sglang_jax.sampling.params import SamplingParams

NO_SAMPLES = SamplingParams(temperature=0.0, max_new_tokens=0)
"""The sampling parameters of requests for vectors and scores."""


def embedder(info: ModelInfo) -> Pooler:
    """The pooler of a model that gives vectors. Raises `ParameterError` for other models."""
    pooler = info.pooler
    if pooler is None or pooler.labels:
        gives = "text" if pooler is None else "scores of labels"
        raise ParameterError(
            f"this model gives {gives} and no vectors: start the server with --model-task embed", param="model"
        )
    return pooler


def classifier(info: ModelInfo) -> Pooler:
    """The pooler of a model that gives scores of labels. Raises `ParameterError` for other models."""
    pooler = info.pooler
    if pooler is None or not pooler.labels:
        gives = "text" if pooler is None else "vectors"
        raise ParameterError(
            f"this model gives {gives} and no scores of labels: it needs a checkpoint with a matrix of labels",
            param="model",
        )
    return pooler


def check_dimensions(dimensions: int | None, info: ModelInfo) -> None:
    """Raises `ParameterError` for a length that a model's vectors do not have."""
    if dimensions is None:
        return
    is_number = isinstance(dimensions, int) and not isinstance(dimensions, bool)
    if not is_number or not 1 <= dimensions <= info.pooled_width:
        raise ParameterError(
            f"dimensions must be between 1 and {info.pooled_width}, the numbers of this model's vectors, got "
            f"{quote(dimensions)}",
            param="dimensions",
        )


def pooled_numbers(output: GenerateOutput | OutputDelta) -> NDArray[np.float32]:
    """The vector or the scores of a finished output. Raises `AbortedError` if it ended without them."""
    if output.pooled is None:
        raise AbortedError("the request was aborted before its vector or its scores were computed")
    return output.pooled


def finished_vector(
    found: NDArray[np.float32], pooler: Pooler, dimensions: int | None = None, normalize: bool | None = None
) -> NDArray[np.float32]:
    """A vector `[width]` cut to its first `dimensions` numbers, as models trained for that allow (Kusupati et al.
    2022), and then divided by its length if `normalize`, or without it if the model's vectors are."""
    cut = found if dimensions is None else found[:dimensions]
    if not (pooler.normalised if normalize is None else normalize):
        return cut
    wide = cut.astype(np.float64)
    length = float(np.sqrt((wide * wide).sum()))
    return (wide / max(length, 1e-12)).astype(np.float32)


def probabilities(scores: NDArray[np.float32], activation: Activation) -> NDArray[np.float32]:
    """Scores of labels `[labels]` as the model's `activation` turns them into probabilities."""
    wide = scores.astype(np.float64)
    match activation:
        case Activation.SOFTMAX:
            powers = np.exp(wide - wide.max())
            shares: NDArray[np.float32] = (powers / powers.sum()).astype(np.float32)
            return shares
        case Activation.SIGMOID:
            found: NDArray[np.float32] = (1.0 / (1.0 + np.exp(-wide))).astype(np.float32)
            return found
        case Activation.NONE:
            return scores
