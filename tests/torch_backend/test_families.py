"""Logits of every family against transformers, on torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.family_cases import (
    EVERY_FAMILY,
    EXPERTS,
    FAMILIES,
    HYBRIDS,
    LATENT,
    FamilyCase,
    check_alignments,
    check_family,
    check_hybrid,
    check_state_alignments,
)
from helpers.torch_paged_model import TorchPagedModel


def _load(folder: Path, page_size: int, columns: int) -> TorchPagedModel:
    return TorchPagedModel(folder, page_size=page_size, columns=columns)


@pytest.mark.parametrize("numba", [False, True], ids=["native", "numba"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name: str, numba: bool, tmp_path: Path) -> None:
    def load(folder: Path, page_size: int, columns: int) -> TorchPagedModel:
        return TorchPagedModel(folder, numba=numba, page_size=page_size, columns=columns)

    check_family(FAMILIES[name], tmp_path, load)


@pytest.mark.parametrize("name", LATENT)
def test_logits_of_latent_attention_equal_transformers(name: str, tmp_path: Path) -> None:
    check_family(LATENT[name], tmp_path, _load)


@pytest.mark.soak
@pytest.mark.parametrize("name", LATENT)
def test_chunks_and_hits_of_latent_attention_at_every_place(name: str, tmp_path: Path) -> None:
    check_alignments(LATENT[name], tmp_path, _load)


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - EXPERTS.keys() - {"gemma4"}))
def test_logits_of_traced_models_equal_transformers(name: str, tmp_path: Path) -> None:
    """Every family with a file, as in transformers. (Gemma 4 has heads of several sizes, and the choice of experts
    cannot be traced.)"""

    def load(folder: Path, page_size: int, columns: int) -> TorchPagedModel:
        return TorchPagedModel(folder, traced=True, numba=True, page_size=page_size, columns=columns)

    case = FAMILIES[name]
    check_family(case, tmp_path, load, (case.page_size,))


@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_of_models_that_keep_states_equal_transformers(name: str, tmp_path: Path) -> None:
    check_hybrid(HYBRIDS[name], tmp_path, _load)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        (
            "qwen3_5_text",
            {
                "num_hidden_layers": 3,
                "layer_types": ["full_attention", "linear_attention", "linear_attention"],
                "linear_num_key_heads": 3,
                "linear_num_value_heads": 9,
                "linear_key_head_dim": 24,
                "linear_value_head_dim": 40,
                "linear_conv_kernel_dim": 2,
            },
        ),
        ("mamba2", {"conv_kernel": 3, "state_size": 24, "n_groups": 4, "use_conv_bias": False, "use_bias": False}),
        ("lfm2", {"conv_L_cache": 6}),
        ("falcon_h1", {"mamba_rms_norm": False}),
        ("granitemoehybrid", {"mamba_d_conv": 2, "mamba_n_groups": 4, "mamba_d_state": 8}),
    ],
)
def test_heads_groups_and_convolutions_of_other_sizes(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    check_hybrid(FamilyCase(architecture, 4, changes), tmp_path, _load)


@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_chunks_and_hits_at_some_places(name: str, tmp_path: Path) -> None:
    case = EVERY_FAMILY[name]
    check_alignments(case, tmp_path, _load, (case.page_size,), every=7)


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_at_some_places(name: str, tmp_path: Path) -> None:
    case = HYBRIDS[name]
    check_state_alignments(case, tmp_path, _load, (case.page_size,), every=7)


@pytest.mark.soak
@pytest.mark.parametrize("numba", [False, True], ids=["native", "numba"])
@pytest.mark.parametrize("name", EVERY_FAMILY)
def test_chunks_and_hits_at_every_place_in_pages_of_every_size(name: str, numba: bool, tmp_path: Path) -> None:
    def load(folder: Path, page_size: int, columns: int) -> TorchPagedModel:
        return TorchPagedModel(folder, numba=numba, page_size=page_size, columns=columns)

    check_alignments(EVERY_FAMILY[name], tmp_path, load)


@pytest.mark.soak
@pytest.mark.parametrize("name", HYBRIDS)
def test_states_at_every_place_in_pages_of_every_size(name: str, tmp_path: Path) -> None:
    check_state_alignments(HYBRIDS[name], tmp_path, _load)
