"""A head stored in a file whose config ties it is used, as in transformers, by every model and backend."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.parity_cases import prompts
from helpers.tiny_models import make_tiny_checkpoint
from helpers.torch_paged_model import TorchPagedModel
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from sglang_jax.checkpoint import open_checkpoint
from sglang_jax.config import EngineConfig, ModelImpl
from torch_backend.attention.native import NativeAttention
from torch_backend.compilation.building import build_traced
from torch_backend.native_operations import NativeOperations

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_checkpoint(tmp_path / "model", "llama", tie_word_embeddings=True)


def give_head(folder: Path, change: float) -> None:
    """Adds a head to the file: the embeddings with some rows changed."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    assert HEAD not in tensors
    tensors[HEAD] = tensors[EMBEDDINGS].copy()
    tensors[HEAD][100:] *= 1 + change
    save_file(tensors, file, {"format": "pt"})


def test_a_head_that_differs_is_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    give_head(folder, change=0.5)
    assert not open_checkpoint(str(folder)).config.tie_word_embeddings
    assert "two different matrices: using both" in caplog.text
    (sequence,) = prompts((11,))
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        expected = model(torch.from_numpy(sequence.astype(np.int64))[None]).logits[0].numpy()
    (found,) = TorchPagedModel(folder).run([sequence], [{0: len(sequence)}])
    np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.parametrize(("change", "heads"), [(0.5, 2), (0.0, 1)], ids=["another", "the same"])
def test_a_traced_model_reads_it_too(folder: Path, change: float, heads: int) -> None:
    give_head(folder, change)
    checkpoint = open_checkpoint(str(folder), model_impl=ModelImpl.TRANSFORMERS)
    model, _ = build_traced(
        EngineConfig(),
        checkpoint,
        dtype=torch.float32,
        device=torch.device("cpu"),
        operations=NativeOperations(),
        attention=NativeAttention(),
    )
    plain, matrices = model._uses()
    embeddings = {weight for weight in plain | matrices if weight.parts[0] in (HEAD, EMBEDDINGS)}
    assert len(embeddings) == heads


def test_an_equal_matrix_stays_tied_without_a_log_line(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    give_head(folder, change=0.0)
    caplog.set_level(logging.INFO)
    assert open_checkpoint(str(folder)).config.tie_word_embeddings
    assert "matrices" not in caplog.text
