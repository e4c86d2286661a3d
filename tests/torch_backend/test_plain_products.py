"""Which product experts with plain weights have on a GPU, and what a model computes with the kernels."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helpers.torch_paged_model
import helpers.triton_interpreter
import numpy as np
import pytest
import torch
from helpers.scaled_grouped_mm import scaled_grouped_mm
from helpers.tiny_models import make_tiny_checkpoint
from helpers.torch_paged_model import TorchPagedModel
from helpers.triton_norms import TritonNorms
from torch.nn import functional
from triton.errors import TritonError

from sglang_jax.architectures.kinds.experts import ClampedGate
from sglang_jax.architectures.kinds.feed_forward import Activation
from sglang_jax.checkpoint.quantization import FLOAT8_ROWS, INT8_ROWS, Quantization
from torch_backend.kernels import plain_experts as kernels
from torch_backend.kernels.chip import Chip
from torch_backend.layers import expert_matrices, expert_products, experts, plain_products
from torch_backend.layers.expert_products import float8_product_on
from torch_backend.layers.plain_products import fused_product_for, fused_product_on

assert helpers.triton_interpreter

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CLAMPED = ClampedGate(alpha=1.7, limit=0.8)
CACHES = plain_products.kernel_works, expert_products.log_product


@pytest.fixture(autouse=True)
def h100(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are interpreted as if for an H100."""
    monkeypatch.setattr(Chip, "of", lambda device: Chip(90, 132))
    yield
    for each in CACHES:
        each.cache_clear()


def test_a_gpu_has_the_kernel_where_it_works_and_the_log_names_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for works in (True, False):
        monkeypatch.setattr(plain_products, "kernel_works", lambda *_, works=works: works)
        for _ in range(2):
            for dtype in (torch.bfloat16, torch.float32):
                assert (fused_product_for(GPU, dtype, Activation.SILU, None) is not None) is works
                assert fused_product_for(CPU, dtype, Activation.SILU, None) is None
    assert [record.getMessage() for record in caplog.records] == [
        f"Experts of {dtype} are multiplied {how}"
        for how in ("by a kernel, with their gate and scores", "by every token, whether it chose them or not")
        for dtype in ("bfloat16", "float32")
    ]


@pytest.mark.parametrize(
    ("activation", "clamped"), [(Activation.SILU, None), (Activation.GELU_TANH, None), (Activation.SILU, CLAMPED)]
)
def test_a_kernel_that_is_wrong_or_fails_is_rejected(
    activation: Activation,
    clamped: ClampedGate | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for module in ("plain_products", "scaled_products"):
        monkeypatch.setattr(f"torch_backend.layers.{module}.ROWS_TRIED", (3, 5))
    given = (CPU, torch.bfloat16, activation, clamped)
    assert plain_products.kernel_works(*given)
    assert not caplog.records

    def refuse(*_: Any) -> torch.Tensor:
        raise TritonError("no such product")

    other = Activation.SILU if activation is Activation.GELU_TANH else Activation.GELU_TANH
    wrong = fused_product_on(CPU, activation, ClampedGate(1.0, 0.1)), fused_product_on(CPU, other, None), refuse
    for product in wrong:
        plain_products.kernel_works.cache_clear()
        monkeypatch.setattr(plain_products, "fused_product_on", lambda *_, product=product: product)
        assert not plain_products.kernel_works(*given)
    what = "Triton's kernel for experts of bfloat16"
    assert [record.getMessage() for record in caplog.records] == [
        *2 * [f"{what} is wrong with torch {torch.__version__}"],
        f"{what} does not run with torch {torch.__version__}: no such product",
    ]


@pytest.mark.parametrize(
    ("architecture", "quantization"), [("qwen3_moe", None), ("gpt_oss", Quantization(INT8_ROWS))], ids=["plain", "int8"]
)
def test_a_model_computes_with_the_kernels(
    architecture: str, quantization: Quantization | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, all products of experts, up to rounding; those of 8 bits after they are widened. One table of tiles
    serves both products of a layer."""
    make_tiny_checkpoint(tmp_path, architecture, hidden_size=64, intermediate_size=96, moe_intermediate_size=32)
    prompts, steps = [np.arange(3, 9, dtype=np.int32)], [{0: 5}, {0: 1}]
    plain = TorchPagedModel(tmp_path, quantization=quantization, dtype=torch.bfloat16)
    expected = plain.run(prompts, steps)
    calls: list[str] = []
    for name in ("gate_experts", "sum_experts"):
        monkeypatch.setattr(kernels, name, _noted(getattr(kernels, name), name, calls))
    monkeypatch.setattr(experts, "fused_product_for", lambda device, dtype, *gate: fused_product_on(CPU, *gate))
    model = TorchPagedModel(tmp_path, quantization=quantization, dtype=torch.bfloat16)
    found = model.run(prompts, steps)
    assert calls == ["gate_experts", "sum_experts"] * len(steps) * model.model.config.num_layers
    for logits, wanted in zip(found, expected, strict=True):
        assert 0 < np.abs(logits - wanted).max() < 0.03 * np.abs(wanted).max()


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of padding, which is undefined
def test_matrices_with_a_product_of_their_own_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If only one of both has one, the kernel computes the other product. If both do, nothing is chosen, or logged."""
    make_tiny_checkpoint(tmp_path, "qwen3_moe", hidden_size=64, intermediate_size=96, moe_intermediate_size=32)
    monkeypatch.setattr(functional, "scaled_grouped_mm", scaled_grouped_mm)
    monkeypatch.setattr(helpers.torch_paged_model, "NativeOperations", TritonNorms)
    prompts, steps, fp8 = [np.arange(3, 9, dtype=np.int32)], [{0: 5}, {0: 1}], Quantization(FLOAT8_ROWS)
    expected = TorchPagedModel(tmp_path, quantization=fp8, dtype=torch.bfloat16).run(prompts, steps)
    calls: list[str] = []
    for module, name in ((kernels, "multiply_sorted_rows"), (expert_products, "multiply_float8")):
        monkeypatch.setattr(module, name, _noted(getattr(module, name), name, calls))
    monkeypatch.setattr(
        experts,
        "fused_product_for",
        _noted(lambda device, dtype, *gate: fused_product_on(CPU, *gate), "fused_product_for", calls),
    )
    every = ["multiply_sorted_rows", "multiply_float8"]
    for own, products in (((32,), every), ((64,), every[::-1]), ((32, 64), 2 * every[1:])):
        calls.clear()
        monkeypatch.setattr(
            expert_matrices,
            "scaled_product_for",
            lambda encoding, shape, *_, own=own: float8_product_on(CPU) if shape[2] in own else None,
        )
        model = TorchPagedModel(tmp_path, quantization=fp8, dtype=torch.bfloat16)
        layers = model.model.config.num_layers
        found = model.run(prompts, steps)
        assert calls == layers * (len(own) == 1) * ["fused_product_for"] + len(steps) * layers * products
        for logits, wanted in zip(found, expected, strict=True):
            assert 0 < np.abs(logits - wanted).max() < 0.1 * np.abs(wanted).max()


def _noted(function: Any, name: str, calls: list[str]) -> Any:
    def call(*given: Any) -> torch.Tensor:
        calls.append(name)
        found: torch.Tensor = function(*given)
        return found

    return call
