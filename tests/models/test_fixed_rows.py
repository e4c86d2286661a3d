"""Logits that do not depend on the batch, chunks or cached prefixes, bit for bit, on JAX."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.family_cases import EXPERTS, FAMILIES, HYBRIDS, LATENT, prompts
from helpers.fixed_rows import differences
from helpers.paged_model import MIXED_TOKENS, PagedModel
from helpers.tiny_models import make_tiny_checkpoint

from sglang_jax.models import AttentionImplementation

CASES = FAMILIES | EXPERTS | HYBRIDS | LATENT


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "qwen2_moe", "qwen3_5", "mamba2", "deepseek_v3"])
def test_logits_do_not_depend_on_the_step(name: str, dtype: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = make_tiny_checkpoint(tmp_path, case.architecture, **case.changes)
    columns = -(-64 // case.page_size)
    model = PagedModel(
        folder,
        dtype=dtype,
        attention=AttentionImplementation.XLA_FIXED,
        page_size=case.page_size,
        columns=columns,
    )
    assert differences(model, prompts(), MIXED_TOKENS, states=name in HYBRIDS) == 0
