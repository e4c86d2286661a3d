"""Decode steps whose kernel calls are recorded: the same results, on other inputs and in other memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from helpers.cpu_kernels import ThreadedKernels
from helpers.gguf_blocks import make_mixed_gguf
from helpers.gguf_files import make_tiny_gguf
from helpers.tiny_models import make_tiny_model, make_tiny_tokenizer
from helpers.torch_paged_model import TorchPagedModel

from torch_backend.attention.interface import HeadForm
from torch_backend.cpu_kernels import recording
from torch_backend.kv_pages import KVPages

STEPS = [
    {0: 8, 1: 3},
    *[{0: 1, 1: 1}] * 3,
    {0: 1, 1: 1, 2: 90, 3: 70},
    *[{0: 1, 1: 1, 2: 1, 3: 1}] * 2,
    {2: 1},
    {1: 1, 3: 1},
    {3: 120},  # threads share attention to this many keys
    *[{0: 1, 1: 1, 2: 1, 3: 1}] * 2,
    {1: 1, 3: 1},
]


def models(folder: Path, architecture: str, dtype: torch.dtype) -> tuple[TorchPagedModel, TorchPagedModel]:
    """With recordings and without. The Llama has matrices of several types."""
    if architecture == "llama":
        file = make_mixed_gguf(folder, tied=False)
    else:
        model = make_tiny_model(architecture, hidden_size=128, intermediate_size=256)
        file = folder / "model.gguf"
        make_tiny_gguf(file, model, make_tiny_tokenizer(folder), architecture, GGMLQuantizationType.Q8_0)
    options = {"dtype": dtype, "page_size": 16}
    return TorchPagedModel(file, recorded=True, **options), TorchPagedModel(file, recorded=False, **options)


@pytest.mark.parametrize(
    ("architecture", "dtype", "limit"), [("llama", torch.bfloat16, 2**26), ("qwen2", torch.float32, 2**12)]
)
def test_recorded_steps_have_equal_results(
    architecture: str, dtype: torch.dtype, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, for steps of other rows, lengths and pages, between prompts; after pages have moved; and with room
    for one recording only."""
    monkeypatch.setattr(recording, "_MAX_BYTES", limit)
    recorded, plain = models(tmp_path, architecture, dtype)
    tokens = np.random.default_rng(0).integers(0, 378, (4, 250)).astype(np.int32)
    for _ in range(2):
        for step, (found, expected) in enumerate(
            zip(recorded.run(tokens, STEPS), plain.run(tokens, STEPS), strict=True)
        ):
            np.testing.assert_array_equal(found, expected, err_msg=str(step))
        recordings = recorded.model.recordings
        assert recordings is not None
        # Padded to 4 rows, or by themselves, with few keys and with many.
        assert recordings.count >= 2 if limit == 2**26 else recordings.count == 1
        recorded.kv[:] = [
            replace(memory, pages=KVPages(memory.pages.keys.clone(), memory.pages.values.clone()))
            for memory in recorded.kv
            if memory.pages is not None
        ]


def test_a_function_that_computes_otherwise_is_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    kernels = ThreadedKernels.of(torch.float32, [HeadForm(32, 2)], recorded=True)
    recordings = kernels.recordings
    assert recordings is not None

    def layers(inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
        (x,) = inputs
        return lambda: kernels.operations.rms_norm(x, torch.ones(64), 1e-5) * 2

    with caplog.at_level(logging.INFO, logger="torch_backend"):
        for scale in (1.0, 2.0, 3.0):
            x = torch.arange(128.0).view(2, 64) * scale + scale**2
            found = recordings.run("kind", [x], layers)
            assert torch.equal(found, kernels.operations.rms_norm(x, torch.ones(64), 1e-5) * 2)
    assert recordings.count == 0
    (message,) = caplog.messages
    assert message == "Layers are computed call by call: besides kernels, they use torch.Tensor.mul, torch.ones"
