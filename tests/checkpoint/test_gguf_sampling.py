"""Sampling values that GGUF files recommend, and those of the embedded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from helpers.gguf_files import write_gguf

from sglang_jax.checkpoint import DEMO, open_checkpoint
from sglang_jax.checkpoint.gguf_config import gguf_generation_defaults
from sglang_jax.checkpoint.gguf_file import open_gguf
from sglang_jax.errors import CheckpointError
from sglang_jax.sampling import GenerationDefaults


def defaults_of(folder: Path, **values: Any) -> GenerationDefaults:
    metadata = {f"general.sampling.{name}": value for name, value in values.items()}
    tensors = {"x": (np.zeros((1, 32), dtype=np.float32), GGMLQuantizationType.F32)}
    return gguf_generation_defaults(open_gguf(write_gguf(folder / "x.gguf", "llama", metadata, tensors)))


def test_values_come_from_the_file(tmp_path: Path) -> None:
    found = defaults_of(tmp_path, temp=0.6, top_p=0.95, top_k=20, min_p=0.05, penalty_repeat=1.1)
    assert found == GenerationDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.05)


def test_a_file_without_values_has_neutral_defaults(tmp_path: Path) -> None:
    assert defaults_of(tmp_path) == GenerationDefaults()


def test_a_top_k_of_0_keeps_all_tokens(tmp_path: Path) -> None:
    assert defaults_of(tmp_path, top_k=0).top_k == -1


def test_a_value_of_another_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"general\.sampling\.temp should be a float"):
        defaults_of(tmp_path, temp="hot")


def test_the_embedded_model_has_the_values_of_its_model_card() -> None:
    assert open_checkpoint(DEMO).generation_defaults == GenerationDefaults(temperature=0.2, top_p=0.9)
