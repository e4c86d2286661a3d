"""Logits that do not depend on the batch, chunks or cached prefixes, bit for bit, on JAX. In separate processes:
programs of tests are compiled without the passes by which users' are (`helpers.quick_programs`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.family_cases import EXPERTS, FAMILIES, HYBRIDS, LATENT
from helpers.tiny_models import make_tiny_checkpoint

CASES = FAMILIES | EXPERTS | HYBRIDS | LATENT
TESTS = Path(__file__).parents[1]


def soak(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen3_5", "bfloat16"),
        soak("gpt_oss", "float32"),
        soak("gemma2", "float32"),
        soak("gemma2", "bfloat16"),
        soak("gpt_oss", "bfloat16"),
        soak("qwen2_moe", "float32"),
        soak("qwen3_5", "float32"),
        soak("mamba2", "float32"),
        soak("deepseek_v3", "float32"),
        soak("deepseek_v3", "bfloat16"),
    ],
)
def test_logits_do_not_depend_on_the_step(name: str, dtype: str, tmp_path: Path) -> None:
    """With `xla` in place of `xla_fixed`, most of these logits differ."""
    case = CASES[name]
    folder = make_tiny_checkpoint(tmp_path, case.architecture, **case.changes)
    arguments = map(str, (folder, dtype, case.page_size, "xla_fixed", name in HYBRIDS))
    command = [sys.executable, "-m", "helpers.fixed_rows_on_jax", *arguments]
    found = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=300, check=True)
    assert int(found.stdout) == 0
