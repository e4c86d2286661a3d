"""Logits that do not depend on the batch, chunks or cached prefixes, bit for bit, on the Torch backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.family_cases import EXPERTS, FAMILIES, HYBRIDS, LATENT, prompts
from helpers.fixed_rows import differences
from helpers.tiny_models import make_tiny_checkpoint
from helpers.torch_paged_model import TorchPagedModel

CASES = FAMILIES | EXPERTS | HYBRIDS | LATENT
MOST = 48


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "numba"),
    [
        ("gemma2", False),
        ("gpt_oss", False),
        ("qwen2_moe", True),
        ("qwen3_5", False),
        ("mamba2", False),
        ("deepseek_v3", False),
    ],
)
def test_logits_do_not_depend_on_the_step(name: str, numba: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    case = CASES[name]
    folder = make_tiny_checkpoint(tmp_path, case.architecture, **case.changes)
    model = TorchPagedModel(
        folder, dtype=dtype, numba=numba, page_size=case.page_size, columns=-(-64 // case.page_size), fixed=True
    )
    assert differences(model, prompts(), MOST, states=name in HYBRIDS) == 0
