"""Logits that do not depend on the number of devices, bit for bit, on JAX. In separate processes: see
`test_fixed_rows`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.family_cases import EXPERTS, FAMILIES, HYBRIDS, LATENT
from helpers.tiny_models import make_tiny_checkpoint

CASES = FAMILIES | EXPERTS | HYBRIDS | LATENT
TESTS = Path(__file__).parents[1]
EIGHT: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2}
THREE: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 72}


def soak(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("name", "changes", "shards", "dtype"),
    [
        ("llama", {**EIGHT, "tie_word_embeddings": True, "vocab_size": 385, "mlp_bias": True}, 4, "float32"),
        soak("llama", {**EIGHT, "attention_bias": True}, 8, "float32"),
        soak("llama", EIGHT, 8, "bfloat16"),
        soak("llama", {**THREE, "head_dim": 16, "intermediate_size": 120}, 3, "float32"),
        soak("cohere2", {}, 4, "float32"),
        soak("gemma2", EIGHT, 8, "float32"),
        soak("gpt_oss", EIGHT, 8, "bfloat16"),
        soak("qwen2_moe", {}, 4, "float32"),
        soak("deepseek_v3", {}, 4, "float32"),
        soak("qwen3_5", {}, 2, "float32"),
        soak("mamba2", {}, 2, "float32"),
        soak("falcon_h1", {}, 2, "float32"),
    ],
)
def test_logits_do_not_depend_on_the_number_of_devices(
    name: str, changes: dict[str, Any], shards: int, dtype: str, tmp_path: Path
) -> None:
    """Every divisor of the number of shards; and the largest in other steps. Without shards, most logits differ."""
    case = CASES.get(name)
    architecture, defaults, page_size = (
        (name, {}, 4) if case is None else (case.architecture, case.changes, case.page_size)
    )
    folder = make_tiny_checkpoint(tmp_path, architecture, **defaults | changes)
    arguments = map(str, (folder, dtype, page_size, shards, name in HYBRIDS))
    command = [sys.executable, "-m", "helpers.fixed_shards_on_jax", *arguments]
    found = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, found.stderr
    counts = [int(count) for count in found.stdout.split()]
    assert counts == [0] * sum(shards % size == 0 for size in range(1, shards + 1))
