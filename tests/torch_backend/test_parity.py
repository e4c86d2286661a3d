"""Logits of the torch backend against transformers: every architecture and rotary variant, paged, chunked, mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.paged_model import PagedModel
from helpers.parity_cases import (
    DYNAMIC,
    MODELS,
    STEPS,
    TOLERANCE,
    bfloat16_errors,
    decoded_logits,
    prompts,
    transformers_logits,
)
from helpers.tiny_models import make_tiny_checkpoint
from helpers.torch_paged_model import TorchPagedModel

from torch_backend.attention.native import NativeAttention
from torch_backend.attention.reference import ReferenceAttention

KERNELS = {
    "numba": {"numba": True},
    "native": {"attention": NativeAttention()},
    "reference": {"attention": ReferenceAttention()},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
def test_logits_equal_transformers(name: str, kernels: dict[str, Any], tmp_path: Path) -> None:
    architecture, overrides = MODELS[name]
    model = TorchPagedModel(make_tiny_checkpoint(tmp_path, architecture, **overrides), **kernels)
    sequences = prompts()
    for tokens, logits in zip(sequences, model.run(sequences, STEPS), strict=True):
        assert len(logits) == len(tokens)
        assert np.abs(logits - transformers_logits(architecture, tokens, **overrides)).max() < TOLERANCE


@pytest.mark.parametrize("numba", [True, False], ids=["numba", "native"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_sizes(page_size: int, numba: bool, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama")
    model = TorchPagedModel(folder, numba=numba, page_size=page_size, columns=64 // page_size)
    sequences = prompts()
    for tokens, logits in zip(sequences, model.run(sequences, STEPS), strict=True):
        assert np.abs(logits - transformers_logits("llama", tokens)).max() < TOLERANCE


class TestDynamicScaling:
    """Past the original context: each token as in a sequence that ends with it, as transformers decodes."""

    @pytest.mark.parametrize(
        "steps",
        [({0: 16}, *[{0: 1}] * 27), ({0: 43},), ({0: 10}, {0: 20}, {0: 13})],
        ids=["decoded", "prefilled", "chunked"],
    )
    def test_any_way_to_compute_a_sequence(self, steps: tuple[dict[int, int], ...], tmp_path: Path) -> None:
        folder = make_tiny_checkpoint(tmp_path, "llama", **DYNAMIC)
        tokens = prompts()[1]
        (logits,) = TorchPagedModel(folder).run([tokens], steps)
        assert np.abs(logits - decoded_logits("llama", tokens, prompt=1, **DYNAMIC)).max() < TOLERANCE

    def test_within_the_original_context(self, tmp_path: Path) -> None:
        folder = make_tiny_checkpoint(tmp_path, "llama", **DYNAMIC)
        tokens = prompts()[0][:16]
        (logits,) = TorchPagedModel(folder).run([tokens], ({0: 9}, {0: 7}))
        assert np.abs(logits - transformers_logits("llama", tokens, **DYNAMIC)).max() < TOLERANCE


@pytest.mark.parametrize(
    "kernels",
    [{"numba": True}, {}, pytest.param({"traced": True, "numba": True}, marks=pytest.mark.soak)],
    ids=["numba", "native", "traced"],
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_bfloat16_is_as_close_to_float32_as_in_transformers(
    architecture: str, kernels: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_tiny_checkpoint(tmp_path, architecture, dtype="bfloat16")
    sequences = prompts()
    found = TorchPagedModel(folder, dtype=torch.bfloat16, **kernels).run(sequences, STEPS)
    error, reference_error = bfloat16_errors(architecture, sequences, found)
    assert 0 < error < 1.2 * reference_error


@pytest.mark.parametrize("numba", [True, False], ids=["numba", "native"])
@pytest.mark.parametrize("name", ["llama_biases", "mistral", "qwen2", "qwen3"])
def test_greedy_tokens_are_those_of_the_jax_model(name: str, numba: bool, tmp_path: Path) -> None:
    """What the torch model decodes token by token is, after each prefix, the most likely token of the JAX model."""
    architecture, overrides = MODELS[name]
    folder = make_tiny_checkpoint(tmp_path, architecture, **overrides)
    prompt = prompts()[0][:16]
    tokens = TorchPagedModel(folder, numba=numba).greedy(prompt, 32)
    (logits,) = PagedModel(folder).run([tokens], [{0: 48}])
    assert logits.argmax(-1)[15:47].tolist() == tokens[16:].tolist()
