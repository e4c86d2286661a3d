"""Logits of every family against transformers, on JAX."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.family_cases import (
    EVERY_FAMILY,
    FAMILIES,
    HYBRIDS,
    LATENT,
    check_alignments,
    check_family,
    check_hybrid,
    check_state_alignments,
)
from helpers.paged_model import PagedModel


def _load(folder: Path, page_size: int, columns: int) -> PagedModel:
    return PagedModel(folder, page_size=page_size, columns=columns)


_DIFFERENT = (
    *("gemma2", "gemma3", "gemma4", "granite_swa", "glm4", "phi3", "olmo2", "smollm3", "cohere2"),
    *("qwen2_moe", "gpt_oss"),
)
"""Each has a kind of layer, norm or rotation that none of the others has; the torch backend's tests have all
families."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _DIFFERENT else pytest.mark.soak) for name in FAMILIES]
)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    check_family(FAMILIES[name], tmp_path, _load)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "deepseek_v3" else pytest.mark.soak) for name in LATENT]
)
def test_logits_of_latent_attention_equal_transformers(name: str, tmp_path: Path) -> None:
    check_family(LATENT[name], tmp_path, _load)


@pytest.mark.parametrize("page_size", [1, pytest.param(64, marks=pytest.mark.soak)])
def test_layers_with_other_heads_in_pages_of_any_size(page_size: int, tmp_path: Path) -> None:
    check_family(replace(FAMILIES["gemma4"], page_size=page_size), tmp_path, _load)


_SLOW = {
    "mamba2",
    "granite_hybrid",
    "granite_hybrid_experts",
    "qwen3_5",
    "qwen3_5_moe",
    "lfm2_moe",
    "nemotron_h_experts",
}
"""For layers that other families have as well."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if name in _SLOW else []) for name in HYBRIDS]
)
def test_logits_of_models_that_keep_states_equal_transformers(name: str, tmp_path: Path) -> None:
    check_hybrid(HYBRIDS[name], tmp_path, _load)


@pytest.mark.soak
@pytest.mark.parametrize("name", EVERY_FAMILY | LATENT)
def test_chunks_and_hits_at_every_place_in_pages_of_every_size(name: str, tmp_path: Path) -> None:
    check_alignments((EVERY_FAMILY | LATENT)[name], tmp_path, _load)


@pytest.mark.soak
@pytest.mark.parametrize("name", HYBRIDS)
def test_states_at_every_place_in_pages_of_every_size(name: str, tmp_path: Path) -> None:
    check_state_alignments(HYBRIDS[name], tmp_path, _load)


def test_chunks_and_hits_at_every_place(tmp_path: Path) -> None:
    """A short version of the test above: a family with windows, and pages larger than them."""
    check_alignments(FAMILIES["gemma3"], tmp_path, _load, (16,), every=5)
