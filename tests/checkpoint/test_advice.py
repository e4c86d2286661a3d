"""Warnings of libraries that do not apply here are not shown."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("imported", "advised"), [("transformers", True), ("sglang_jax.checkpoint.tokenizer", False)])
def test_without_torch_no_warning_says_that_it_is_missing(imported: str, advised: bool) -> None:
    program = f"import sys; sys.modules['torch'] = None; import {imported}"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ("PyTorch was not found" in run.stderr) is advised
