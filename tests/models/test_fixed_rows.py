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
    assert differences_in_steps(name, dtype, "xla_fixed", tmp_path) == 0


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen2", "float32"),
        ("gemma2", "bfloat16"),
        ("gpt_oss", "float32"),
        ("qwen2_moe", "float32"),
        ("qwen3_5", "float32"),
        ("mamba2", "float32"),
        ("lfm2", "bfloat16"),
        ("deepseek_v3", "float32"),
    ],
)
def test_logits_of_tpu_kernels_do_not_depend_on_the_step(name: str, dtype: str, tmp_path: Path) -> None:
    """With the layouts for TPUs, and their kernels in the interpreter. With `pallas`, most of these logits differ."""
    assert differences_in_steps(name, dtype, "pallas_fixed", tmp_path) == 0


def differences_in_steps(name: str, dtype: str, attention: str, folder: Path) -> int:
    case = CASES[name]
    checkpoint = make_tiny_checkpoint(folder, case.architecture, **case.changes)
    arguments = map(str, (checkpoint, dtype, case.page_size, attention, name in HYBRIDS))
    command = [sys.executable, "-m", "helpers.fixed_rows_on_jax", *arguments]
    found = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=600, check=True)
    return int(found.stdout)
