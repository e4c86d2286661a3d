"""Logits of every family against transformers, on JAX."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.family_cases import FAMILIES, HYBRIDS, check_family, check_hybrid
from helpers.paged_model import PagedModel


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    def load(folder: Path, page_size: int, columns: int) -> PagedModel:
        return PagedModel(folder, page_size=page_size, columns=columns)

    check_family(FAMILIES[name], tmp_path, load)


@pytest.mark.parametrize("page_size", [1, 64])
def test_layers_with_other_heads_in_pages_of_any_size(page_size: int, tmp_path: Path) -> None:
    def load(folder: Path, page_size: int, columns: int) -> PagedModel:
        return PagedModel(folder, page_size=page_size, columns=columns)

    check_family(replace(FAMILIES["gemma4"], page_size=page_size), tmp_path, load)


_SLOW = {"mamba2", "granite_hybrid"}
"""Of layers that other families have as well."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if name in _SLOW else []) for name in HYBRIDS]
)
def test_logits_of_models_that_keep_states_equal_transformers(name: str, tmp_path: Path) -> None:
    def load(folder: Path, page_size: int, columns: int) -> PagedModel:
        return PagedModel(folder, page_size=page_size, columns=columns)

    check_hybrid(HYBRIDS[name], tmp_path, load)
