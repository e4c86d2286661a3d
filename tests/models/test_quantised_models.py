"""Quantised checkpoints on both backends: the same model as one whose weights are what the quantiser makes of them."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from helpers.paged_model import PagedModel
from helpers.parity_cases import STEPS, prompts
from helpers.quantized_checkpoints import Quantised, make_quantised_checkpoint, write_plain_twin
from helpers.torch_paged_model import TorchPagedModel


@pytest.mark.parametrize(
    ("architecture", "kind"), [("qwen3", Quantised.FP8_CHANNEL), ("qwen3_moe", Quantised.MODELOPT)]
)
def test_weights_are_those_that_the_quantiser_means(architecture: str, kind: Quantised, tmp_path: Path) -> None:
    """Every array on JAX, and logits on Torch, which packs its weights."""
    weights = make_quantised_checkpoint(tmp_path / "quantised", architecture, kind)
    folders = tmp_path / "quantised", write_plain_twin(tmp_path / "quantised", weights, tmp_path / "plain")
    for loaded in zip(*(jax.tree.leaves(PagedModel(folder).state) for folder in folders), strict=True):
        np.testing.assert_array_equal(*loaded)
    quantised, plain = (TorchPagedModel(folder).run(prompts(), STEPS) for folder in folders)
    for logits, others in zip(quantised, plain, strict=True):
        np.testing.assert_array_equal(logits, others)
