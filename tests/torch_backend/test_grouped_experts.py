"""Experts in groups that a GPU keeps so: rearranged, multiplied by the kernel in a whole model, and the fallback."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import helpers.triton_interpreter
import numpy as np
import pytest
import torch
from helpers.grouped_checkpoints import Grouped, make_grouped_checkpoint
from helpers.torch_paged_model import TorchPagedModel
from triton.errors import TritonError

from sglang_jax.checkpoint.group_blocks import GroupType, Levels, Scales
from torch_backend.kernels import expert_product as kernels
from torch_backend.kernels.chip import Chip
from torch_backend.layers import expert_matrices, expert_products
from torch_backend.layers.expert_products import SortedRows, kernel_product_on, pack_experts, product_for
from torch_backend.layers.grouped import pack_blocks

assert helpers.triton_interpreter

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MXFP4 = GroupType(Levels.FLOAT4_E2M1, 32, Scales.POWER_OF_TWO)
KINDS = [MXFP4, GroupType(Levels.INT4, 64, Scales.FLOAT16, zeros=True), GroupType(Levels.INT8, 32, Scales.FLOAT32)]

CACHES = expert_products.kernel_works, expert_products.log_product


@pytest.fixture(autouse=True)
def h100(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are interpreted as if for an H100."""
    monkeypatch.setattr(Chip, "of", lambda device: Chip(90, 132))
    yield
    for each in CACHES:
        each.cache_clear()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.value}")
def test_experts_are_packed_one_above_the_other(kind: GroupType) -> None:
    random = torch.Generator().manual_seed(0)
    blocks = torch.randint(100, 120, (3, 5, 4, kind.nbytes), generator=random).to(torch.uint8)
    whole = pack_experts(kind, blocks).widened(torch.float32).view(3, 5, -1)
    for expert in range(3):
        assert torch.equal(whole[expert], pack_blocks(kind, blocks[expert]).widened(torch.float32))


@pytest.mark.parametrize(
    ("architecture", "kind"), [("gpt_oss", Grouped.MXFP4), ("qwen3_moe", Grouped.GPTQ_ZEROS)], ids=["mxfp4", "gptq"]
)
def test_a_model_computes_with_the_kernel(
    architecture: str, kind: Grouped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, all products of experts, up to rounding. One table of tiles serves both products of a layer."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    make_grouped_checkpoint(tmp_path, architecture, kind, **sizes)
    prompts, steps = [np.arange(3, 9, dtype=np.int32)], [{0: 5}, {0: 1}]
    widened = TorchPagedModel(tmp_path, keeps_groups=True, dtype=torch.bfloat16)
    expected = widened.run(prompts, steps)
    calls: list[str] = []

    def counted(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*given: Any) -> torch.Tensor:
            calls.append(function.__name__)
            return function(*given)

        return call

    for function in (kernels.expert_product, kernels.tile_table):
        monkeypatch.setattr(kernels, function.__name__, counted(function))
    monkeypatch.setattr(expert_matrices, "product_for", lambda *_: kernel_product_on(CPU))
    model = TorchPagedModel(tmp_path, keeps_groups=True, dtype=torch.bfloat16)
    found = model.run(prompts, steps)
    assert calls == ["tile_table", *2 * ["expert_product"]] * len(steps) * model.model.config.num_layers
    for logits, wanted in zip(found, expected, strict=True):
        assert np.abs(logits - wanted).max() < 0.03 * np.abs(wanted).max()


def test_a_gpu_has_the_kernel_where_it_works_and_the_log_names_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(expert_products, "kernel_works", lambda *_: True)
    for _ in range(2):
        assert product_for(MXFP4, GPU, torch.bfloat16) is not None
        assert product_for(MXFP4, CPU, torch.bfloat16) is None
        assert product_for(MXFP4, GPU, torch.float32) is None
    monkeypatch.setattr(expert_products, "kernel_works", lambda *_: False)
    assert product_for(MXFP4, GPU, torch.bfloat16) is None
    name = "Experts of float4_e2m1fn in groups of 32 are multiplied"
    assert [record.getMessage() for record in caplog.records] == [
        f"{name} by a kernel that widens them in registers",
        f"{name} after all are widened to bfloat16, in each product",
        f"{name} after all are widened to float32, in each product",
    ]


def test_a_kernel_that_is_wrong_or_fails_is_rejected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in ("expert_products", "scaled_products"):
        monkeypatch.setattr(f"torch_backend.layers.{module}.ROWS_TRIED", (3, 5))
    kind = GroupType(Levels.INT8, 128, Scales.FLOAT32)
    assert expert_products.kernel_works(kind, CPU, torch.bfloat16)
    assert not caplog.records
    right = kernel_product_on(CPU)

    def of_next_expert(x: torch.Tensor, *given: Any) -> torch.Tensor:
        weights, bias, rows = given
        return right(x, weights, bias, SortedRows(rows.experts, rows.sizes.flip(0)) if len(x) == 5 else rows)

    def refuse(*_: Any) -> torch.Tensor:
        raise TritonError("no such product")

    for broken in (of_next_expert, lambda *given: right(*given).fill_(torch.nan), refuse):
        expert_products.kernel_works.cache_clear()
        monkeypatch.setattr(expert_products, "kernel_product_on", lambda device, broken=broken: broken)
        assert not expert_products.kernel_works(kind, CPU, torch.bfloat16)
    what = f"Triton's kernel for experts of {kind.value}"
    assert [record.getMessage() for record in caplog.records] == [
        *2 * [f"{what} is wrong with torch {torch.__version__}"],
        f"{what} does not run with torch {torch.__version__}: no such product",
    ]
