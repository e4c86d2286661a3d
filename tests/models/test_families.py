"""Logits of every family against transformers, on JAX."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.family_cases import FAMILIES, check_family
from helpers.paged_model import PagedModel


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    def load(folder: Path, page_size: int, columns: int) -> PagedModel:
        return PagedModel(folder, page_size=page_size, columns=columns)

    check_family(FAMILIES[name], tmp_path, load)
