"""Inputs of 8-bit products on a GPU are rounded once, by the kernel before the product: in whole models, in the
interpreter."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import helpers.torch_paged_model
import helpers.triton_interpreter
import numpy as np
import pytest
import torch
from helpers.tiny_models import make_tiny_checkpoint
from helpers.torch_paged_model import TorchPagedModel
from helpers.triton_norms import TritonNorms

from sglang_jax.checkpoint.quantization import FLOAT8_ROWS, INT8_ROWS, Quantization
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.operations import TritonRounding
from torch_backend.layers import matrix
from torch_backend.layers.matrix import ScaledMatrix
from torch_backend.layers.scaled_products import float8_product_on, integer_product_on
from torch_backend.rounded_rows import rounding_for

assert helpers.triton_interpreter

CPU = torch.device("cpu")
PROMPTS, STEPS = [np.arange(3, 7, dtype=np.int32)], [{0: 3}, {0: 1}]
KINDS = {"int8": (INT8_ROWS, integer_product_on), "fp8": (FLOAT8_ROWS, float8_product_on)}


class Reader:
    def __init__(self, rounding: TritonRounding | None) -> None:
        self.rounding = rounding


def test_rows_are_rounded_before_they_are_read_if_all_readers_agree() -> None:
    int8, float8, plain = (
        Reader(TritonRounding(torch.int8)),
        Reader(TritonRounding(torch.float8_e4m3fn)),
        Reader(None),
    )
    assert rounding_for(int8, None, Reader(TritonRounding(torch.int8))) == int8.rounding
    assert rounding_for(int8, float8) is None
    assert rounding_for(int8, plain) is None
    assert rounding_for(plain, int8) is None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kernel has rounded. Models have Triton's norms and gates, as if on an H100."""
    found: Counter[str] = Counter()

    def counted(name: str) -> Any:
        whole = getattr(TritonRounding, name)

        def call(*given: Any) -> Any:
            found[name] += 1
            return whole(*given)

        return call

    for name in ("round", "rms_norm", "add_rms_norm", "gated"):
        monkeypatch.setattr(TritonRounding, name, counted(name))
    monkeypatch.setattr(Chip, "of", lambda device: Chip(90, 132))
    monkeypatch.setattr(helpers.torch_paged_model, "NativeOperations", TritonNorms)
    return found


WIDE = {"hidden_size": 64, "intermediate_size": 96}
CASES = [
    # attention and feed-forward; the first norm has no residual
    ("llama", "int8", WIDE, {"rms_norm": 1, "add_rms_norm": 3, "gated": 2, "round": 2}),
    ("llama", "fp8", WIDE, {"rms_norm": 1, "add_rms_norm": 3, "gated": 2, "round": 2}),
    # one norm before both
    ("cohere2", "int8", WIDE, {"gated": 2, "round": 2 + 2}),
    # attention next to a recurrent part
    ("falcon_h1", "int8", {}, {"rms_norm": 1, "add_rms_norm": 3, "gated": 2, "round": 2 * 2}),
    # a recurrent layer, an output gate, and experts whose router reads plain numbers
    ("qwen3_next", "int8", WIDE, {"rms_norm": 1, "add_rms_norm": 1, "gated": 2, "round": 2 * 2}),
    # latent vectors of queries, which have a norm
    ("deepseek_v3", "int8", WIDE, {"rms_norm": 1 + 2, "add_rms_norm": 2, "gated": 2, "round": 3}),
]


@pytest.mark.parametrize(("architecture", "kind", "sizes", "expected"), CASES, ids=[f"{a}-{k}" for a, k, *_ in CASES])
def test_a_model_computes_the_same_when_norms_and_gates_round(
    architecture: str,
    kind: str,
    sizes: dict[str, int],
    expected: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    calls: Counter[str],
) -> None:
    """Bit for bit the logits with a separate kernel before each product; how often each kernel rounds in a step."""
    make_tiny_checkpoint(tmp_path, architecture, **sizes)
    encoding, product_on = KINDS[kind]
    monkeypatch.setattr(matrix, "product_for", lambda *_: product_on(CPU))
    model = TorchPagedModel(tmp_path, quantization=Quantization(encoding), dtype=torch.bfloat16)
    found = model.run(PROMPTS, STEPS)
    products = sum(isinstance(each, ScaledMatrix) for each in model.model.modules())
    assert calls == {name: count * len(STEPS) for name, count in expected.items()}
    calls.clear()
    monkeypatch.setattr(ScaledMatrix, "rounding", None)
    separate = TorchPagedModel(tmp_path, quantization=Quantization(encoding), dtype=torch.bfloat16)
    wanted = separate.run(PROMPTS, STEPS)
    assert calls == {"round": products * len(STEPS)}
    for logits, own in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(logits, own)
