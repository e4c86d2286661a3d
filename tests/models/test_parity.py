"""Logits against transformers: every architecture and rotary variant, paged, chunked, decoded and mixed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
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

from sglang_jax.models import AttentionImplementation


@pytest.mark.parametrize("attention", [AttentionImplementation.REFERENCE, AttentionImplementation.XLA])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, attention: AttentionImplementation, tmp_path: Path) -> None:
    architecture, overrides = MODELS[name]
    model = PagedModel(make_tiny_checkpoint(tmp_path, architecture, **overrides), attention=attention)
    sequences = prompts()
    found = model.run(sequences, STEPS)
    for tokens, logits in zip(sequences, found, strict=True):
        assert len(logits) == len(tokens)
        expected = transformers_logits(architecture, tokens, **overrides)
        assert np.abs(logits - expected).max() < TOLERANCE


@pytest.mark.parametrize("page_size", [1, 16])
def test_page_sizes(page_size: int, tmp_path: Path) -> None:
    model = PagedModel(make_tiny_checkpoint(tmp_path, "llama"), page_size=page_size, columns=64 // page_size)
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
        (logits,) = PagedModel(folder).run([tokens], steps)
        assert np.abs(logits - decoded_logits("llama", tokens, prompt=16, **DYNAMIC)).max() < TOLERANCE
        assert np.abs(logits - decoded_logits("llama", tokens, prompt=1, **DYNAMIC)).max() < TOLERANCE

    def test_within_the_original_context(self, tmp_path: Path) -> None:
        folder = make_tiny_checkpoint(tmp_path, "llama", **DYNAMIC)
        tokens = prompts()[0][:16]
        (logits,) = PagedModel(folder).run([tokens], ({0: 9}, {0: 7}))
        assert np.abs(logits - transformers_logits("llama", tokens, **DYNAMIC)).max() < TOLERANCE


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_bfloat16_is_as_close_to_float32_as_in_transformers(architecture: str, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, architecture, dtype="bfloat16")
    sequences = prompts()
    found = PagedModel(folder, dtype="bfloat16").run(sequences, STEPS)
    error, reference_error = bfloat16_errors(architecture, sequences, found)
    assert 0 < error < 1.2 * reference_error
