"""Experts with 8-bit values and a scale per row on a GPU: multiplied as float8 by torch's grouped product, which an
oracle with the same contract replaces here, and the fallback."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import helpers.torch_paged_model
import helpers.triton_interpreter
import numpy as np
import pytest
import torch
from helpers.scaled_grouped_mm import scaled_grouped_mm
from helpers.tiny_models import make_tiny_checkpoint
from helpers.torch_paged_model import ROWS, TorchPagedModel
from helpers.triton_norms import TritonNorms
from torch.nn import functional

from sglang_jax.checkpoint.encoding import ActivationScales
from sglang_jax.checkpoint.quantization import FLOAT8_ROWS, INT8_ROWS, Quantization
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.operations import TritonRounding
from torch_backend.layers import expert_matrices, expert_products
from torch_backend.layers.expert_matrices import ScaledExperts
from torch_backend.layers.expert_products import SortedRows, float8_product_on, scaled_product_for

assert helpers.triton_interpreter

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice")  # in rows of padding

CACHES = expert_products.float8_works, expert_products.log_product
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FLOAT8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def h100(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are interpreted as if for an H100, with the oracle for torch's product."""
    monkeypatch.setattr(Chip, "of", lambda device: Chip(90, 132))
    monkeypatch.setattr(functional, "scaled_grouped_mm", scaled_grouped_mm)
    yield
    for each in CACHES:
        each.cache_clear()


@pytest.mark.parametrize("sizes", [(3, 0, 1, 4), (0, 0, 9, 0), (1, 1, 1, 1)])
def test_rows_are_multiplied_by_their_experts(sizes: tuple[int, ...]) -> None:
    """In float8, with two rows of padding. Rows of any size; errors are those of rounding the inputs and the result."""
    generator = torch.Generator().manual_seed(0)
    rows, experts, outputs, inputs = sum(sizes), len(sizes), 48, 64
    x = torch.randn((rows + 2, inputs), generator=generator) * 10.0 ** torch.linspace(-20, 20, rows + 2)[:, None]
    x = x.bfloat16()
    values = (100 * torch.randn((experts, outputs, inputs), generator=generator)).to(FLOAT8)
    scales = (torch.arange(experts) + 1)[:, None] * torch.rand((experts, outputs), generator=generator)
    chosen = torch.repeat_interleave(torch.arange(experts + 1), torch.tensor([*sizes, 2]))
    of_experts = SortedRows(chosen, torch.tensor(sizes, dtype=torch.int32))
    product = float8_product_on(CPU)
    found = product(x, values, scales, of_experts)
    assert found.dtype == torch.bfloat16
    matrices = values.double() * scales[..., None].double()
    for row, expert in enumerate(chosen[:rows].tolist()):
        exact = matrices[expert] @ x[row].double()
        magnitude = matrices[expert].abs() @ x[row].double().abs()
        least = 2.0**-10 / 448 * x[row].double().abs().max() * matrices[expert].abs().sum(-1)
        error = (found[row].double() - exact).abs()
        assert (error <= magnitude / 16 + least + magnitude / 256).all()
        assert error.max() > 0
    assert torch.equal(product(product.rounding.round(x), values, scales, of_experts)[:rows], found[:rows])


def test_each_kind_of_experts_has_the_product_that_works_and_the_log_names_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(expert_products, "float8_works", lambda device: True)
    plain_inputs = replace(FLOAT8_ROWS, activations=ActivationScales.NONE)
    rounded_integers = replace(INT8_ROWS, activations=ActivationScales.TOKEN)
    cases = [
        (FLOAT8_ROWS, (4, 32, 64), GPU, torch.bfloat16, True),
        (FLOAT8_ROWS, (4, 32, 72), GPU, torch.bfloat16, False),
        (FLOAT8_ROWS, (4, 24, 64), GPU, torch.bfloat16, False),
        (FLOAT8_ROWS, (4, 32, 64), GPU, torch.float16, False),
        (FLOAT8_ROWS, (4, 32, 64), CPU, torch.bfloat16, False),
        (plain_inputs, (4, 32, 64), GPU, torch.bfloat16, False),
        (rounded_integers, (4, 32, 64), GPU, torch.bfloat16, False),
    ]
    for encoding, shape, device, dtype, rounds in 2 * cases:
        product = scaled_product_for(encoding, shape, device, dtype)
        assert (product is not None and product.rounding == TritonRounding(FLOAT8)) is rounds
    widened = "are multiplied after all are widened to"
    assert [record.getMessage() for record in caplog.records] == [
        "Experts of float8_e4m3fn are multiplied as float8, by torch's scaled_grouped_mm; inputs are rounded to float8",
        f"Experts of float8_e4m3fn {widened} bfloat16, in each product",
        f"Experts of float8_e4m3fn {widened} float16, in each product",
        f"Experts of int8 {widened} bfloat16, in each product",
    ]
    monkeypatch.setattr(expert_products, "float8_works", lambda device: False)
    assert scaled_product_for(FLOAT8_ROWS, (4, 32, 64), GPU, torch.bfloat16) is None


@pytest.mark.parametrize(("capability", "tried"), [((8, 9), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)])
def test_the_product_is_tried_on_hopper(
    capability: tuple[int, int], tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(expert_products, "runs_right", lambda *_: True)
    assert expert_products.float8_works(GPU) is tried


def test_a_product_that_is_wrong_or_fails_is_rejected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in ("expert_products", "scaled_products"):
        monkeypatch.setattr(f"torch_backend.layers.{module}.ROWS_TRIED", (3, 5))
    assert expert_products.float8_works(CPU)
    assert not caplog.records

    def of_next_row(mat_a: Any, mat_b: Any, *, scale_b: Any, **given: Any) -> torch.Tensor:
        return scaled_grouped_mm(mat_a, mat_b, scale_b=scale_b.roll(1, 1), **given)

    def one_row_late(mat_a: Any, mat_b: Any, *, offs: Any, **given: Any) -> torch.Tensor:
        return scaled_grouped_mm(mat_a, mat_b, offs=torch.where(offs < len(mat_a), offs + 1, offs), **given)

    def refuse(*_: Any, **given: Any) -> torch.Tensor:
        raise RuntimeError("no such product")

    for broken in (of_next_row, one_row_late, refuse):
        expert_products.float8_works.cache_clear()
        monkeypatch.setattr(functional, "scaled_grouped_mm", broken)
        assert not expert_products.float8_works(CPU)
    what = "The product of float8 with experts of float8"
    assert [record.getMessage() for record in caplog.records] == [
        *2 * [f"{what} is wrong with torch {torch.__version__}"],
        f"{what} does not run with torch {torch.__version__}: no such product",
    ]


@pytest.mark.parametrize(("architecture", "chosen", "inner"), [("qwen3_moe", 3, "gated"), ("gpt_oss", 2, "round")])
def test_a_model_computes_with_the_product(
    architecture: str, chosen: int, inner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All products of experts, up to rounding; bit for bit as if each product rounded its own inputs. A token is
    rounded once for all of its experts, and their inner rows by the kernel that gates them. gpt-oss has biases, and
    another gate, after which a kernel rounds."""
    make_tiny_checkpoint(tmp_path, architecture, hidden_size=64, intermediate_size=96, moe_intermediate_size=32)
    monkeypatch.setattr(helpers.torch_paged_model, "NativeOperations", TritonNorms)
    prompts, steps, fp8 = [np.arange(3, 9, dtype=np.int32)], [{0: 5}, {0: 1}], Quantization(FLOAT8_ROWS)
    expected = TorchPagedModel(tmp_path, quantization=fp8, dtype=torch.bfloat16).run(prompts, steps)
    calls: Counter[str] = Counter()

    def counted(name: str) -> Any:
        whole = getattr(TritonRounding, name)

        def call(self: TritonRounding, x: torch.Tensor, *given: Any) -> Any:
            calls[f"{name} {len(x)}"] += 1
            return whole(self, x, *given)

        return call

    monkeypatch.setattr(expert_matrices, "scaled_product_for", lambda *_: float8_product_on(CPU))
    for name in ("round", "gated"):
        monkeypatch.setattr(TritonRounding, name, counted(name))
    model = TorchPagedModel(tmp_path, quantization=fp8, dtype=torch.bfloat16)
    layers, tokens = model.model.config.num_layers, (5, ROWS)
    found = model.run(prompts, steps)
    assert calls == dict.fromkeys(
        [*(f"round {each}" for each in tokens), *(f"{inner} {chosen * each}" for each in tokens)], layers
    )
    for logits, wanted in zip(found, expected, strict=True):
        assert 0 < np.abs(logits - wanted).max() < 0.1 * np.abs(wanted).max()
    calls.clear()
    monkeypatch.setattr(ScaledExperts, "rounding", None)
    separate = TorchPagedModel(tmp_path, quantization=fp8, dtype=torch.bfloat16).run(prompts, steps)
    assert calls == {f"round {chosen * each}": 2 * layers for each in tokens}
    for logits, wanted in zip(found, separate, strict=True):
        np.testing.assert_array_equal(logits, wanted)


def test_results_that_must_not_depend_on_the_step_are_those_of_widened_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_checkpoint(tmp_path, "qwen3_moe", hidden_size=64, intermediate_size=96, moe_intermediate_size=32)
    monkeypatch.setattr(expert_matrices, "scaled_product_for", lambda *_: float8_product_on(CPU))
    for fixed in (False, True):
        model = TorchPagedModel(tmp_path, quantization=Quantization(FLOAT8_ROWS), dtype=torch.bfloat16, fixed=fixed)
        experts = [each for each in model.model.modules() if isinstance(each, ScaledExperts)]
        assert len(experts) == 2 * model.model.config.num_layers
        assert [each.rounding is None for each in experts] == len(experts) * [fixed]
