"""Logits of every family against transformers, on torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.family_cases import FAMILIES, check_family
from helpers.torch_paged_model import TorchPagedModel


@pytest.mark.parametrize("numba", [False, True], ids=["native", "numba"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name: str, numba: bool, tmp_path: Path) -> None:
    """In pages of several sizes where that is cheap: no program is compiled for each."""

    def load(folder: Path, page_size: int, columns: int) -> TorchPagedModel:
        return TorchPagedModel(folder, numba=numba, page_size=page_size, columns=columns)

    check_family(FAMILIES[name], tmp_path, load, () if numba else (1, 16, 64))
