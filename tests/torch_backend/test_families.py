"""Logits of every family against transformers, on torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.family_cases import FAMILIES, HYBRIDS, check_family, check_hybrid
from helpers.torch_paged_model import TorchPagedModel


@pytest.mark.parametrize("numba", [False, True], ids=["native", "numba"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name: str, numba: bool, tmp_path: Path) -> None:
    def load(folder: Path, page_size: int, columns: int) -> TorchPagedModel:
        return TorchPagedModel(folder, numba=numba, page_size=page_size, columns=columns)

    check_family(FAMILIES[name], tmp_path, load)


@pytest.mark.parametrize("page_size", [1, 64])
def test_layers_with_other_heads_in_pages_of_any_size(page_size: int, tmp_path: Path) -> None:
    def load(folder: Path, page_size: int, columns: int) -> TorchPagedModel:
        return TorchPagedModel(folder, page_size=page_size, columns=columns)

    check_family(replace(FAMILIES["gemma4"], page_size=page_size), tmp_path, load)


@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_of_models_that_keep_states_equal_transformers(name: str, tmp_path: Path) -> None:
    def load(folder: Path, page_size: int, columns: int) -> TorchPagedModel:
        return TorchPagedModel(folder, page_size=page_size, columns=columns)

    check_hybrid(HYBRIDS[name], tmp_path, load)
