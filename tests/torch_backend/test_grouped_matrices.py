"""Matrices in groups that a GPU keeps so: loaded, rearranged, multiplied, and tied."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.gguf_blocks import GROUPS, make_gguf_in_groups, make_mixed_gguf
from helpers.grouped_checkpoints import Grouped, make_grouped_checkpoint
from helpers.quantized_checkpoints import write_plain_twin
from helpers.torch_paged_model import TorchPagedModel
from helpers.torch_ranks import on_threads, thread_ranks
from triton.errors import TritonError

from sglang_jax.checkpoint.group_blocks import GroupType, Levels, Scales
from torch_backend.kernels.group_layout import GroupedWeights
from torch_backend.layers import grouped
from torch_backend.layers.expert_matrices import GroupedExperts
from torch_backend.layers.grouped import GroupedMatrix, multiply_widened, pack_blocks, product_for
from torch_backend.weights import matrices_as_stored, weight_bytes

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
KIND = GroupType(Levels.INT4, 64, Scales.FLOAT16, zeros=True)
KINDS = [
    GroupType(levels, size, scales, zeros)
    for size, scales in ((32, Scales.FLOAT32), (64, Scales.FLOAT16), (128, Scales.BFLOAT16))
    for levels, zeros in (
        *((levels, zeros) for levels in (Levels.INT4, Levels.INT8) for zeros in (False, True)),
        (Levels.FLOAT8_E4M3, False),
    )
]
MXFP4 = GroupType(Levels.FLOAT4_E2M1, 32, Scales.POWER_OF_TWO)
NVFP4 = GroupType(Levels.FLOAT4_E2M1, 16, Scales.FLOAT32)


def blocks_of(kind: GroupType, outputs: int, groups: int) -> torch.Tensor:
    """Any levels of the type except NaN."""
    random = np.random.default_rng(0)
    levels = random.integers(0, 2**kind.levels.bits, (outputs, groups * kind.weights), np.uint8)
    zeros = random.integers(0, 17, (outputs, groups), np.uint8)
    if kind.levels is Levels.FLOAT8_E4M3:
        levels[levels & 127 == 127] = 0
    scales = random.uniform(-2, 2, (outputs, groups))
    if kind.scales is Scales.POWER_OF_TWO:
        scales = 2.0 ** np.rint(4 * scales)
    scales = scales.astype(kind.scales.dtype)
    dtype = kind.levels.dtype
    return torch.from_numpy(kind.join(levels.view(dtype), scales, zeros.view(dtype) if kind.zeros else None))


@pytest.mark.parametrize("kind", [*KINDS, MXFP4, NVFP4], ids=lambda kind: f"{kind.value}")
def test_blocks_are_rearranged_without_a_change(kind: GroupType) -> None:
    blocks = blocks_of(kind, 5, 4)
    exact = kind.unpack(blocks.numpy())
    numbers = torch.tensor([3, 0, 3], dtype=torch.int32)
    weights = pack_blocks(kind, blocks)
    offsets = 0 if exact.offsets is None else np.rint(exact.offsets / exact.scales)[..., None]
    levels = np.array(exact.table)[exact.levels] if exact.table else exact.levels
    levels = levels.reshape(5, 4, -1).astype(np.float32) - exact.zero
    expected = torch.from_numpy(((levels + offsets) * exact.scales[..., None]).reshape(5, -1))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(weights.widened(dtype), expected.to(dtype))
        assert torch.equal(weights.rows(numbers, dtype), expected.to(dtype)[numbers])


ALL = ("qwen3", {"head_dim": 32, "intermediate_size": 96})


@pytest.mark.parametrize(
    ("kind", "architecture", "changes", "kept"),
    [
        (Grouped.INT4_ZEROS, *ALL, 8),
        (Grouped.GPTQ, "qwen2", {"hidden_size": 64, "intermediate_size": 96}, 8),  # biases
        (Grouped.GPTQ_8, *ALL, 8),
        (Grouped.AWQ, *ALL, 8),
        (Grouped.FP8, *ALL, 8),
        (Grouped.GPTQ_ORDER, *ALL, 0),
        (Grouped.CT_NVFP4, *ALL, 8),
        (Grouped.INT4, "qwen3_moe", {"head_dim": 32, "moe_intermediate_size": 32}, 8),
        (Grouped.MXFP4, "gpt_oss", {"hidden_size": 64, "intermediate_size": 96}, 4),  # of experts only
    ],
)
def test_a_model_computes_as_with_widened_matrices(
    kind: Grouped, architecture: str, changes: dict[str, Any], kept: int, tmp_path: Path
) -> None:
    """And its matrices are in memory once, in groups: four for each of two layers, of which two may be of experts."""
    weights = make_grouped_checkpoint(tmp_path / "a", architecture, kind, **changes)
    plain = TorchPagedModel(write_plain_twin(tmp_path / "a", weights, tmp_path / "b"))
    model = TorchPagedModel(tmp_path / "a", keeps_groups=True)
    found = [each for each in model.model.modules() if isinstance(each, GroupedMatrix | GroupedExperts)]
    assert len(found) == kept
    assert all(each.values.is_meta for each in found)
    if kept:
        names = set(matrices_as_stored(model.model, model.model.config).values())
        assert names == {found[0].kind.value}
        assert weight_bytes(model.model) < weight_bytes(plain.model)
    prompts = [np.arange(first, last, dtype=np.int32) for first, last in ((3, 20), (40, 45))]
    steps = [{0: 16, 1: 4}, {0: 1, 1: 1}]
    for logits, wanted in zip(model.run(prompts, steps), plain.run(prompts, steps), strict=True):
        assert np.abs(logits - wanted).max() < 2e-4 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("kind", "architecture", "changes", "groups"),
    [
        (Grouped.AWQ, "qwen2", {"hidden_size": 128, "intermediate_size": 384}, {2: {128, 64}, 4: {128, 32}}),
        (
            Grouped.FP8,
            "deepseek_v3",
            {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128},
            {2: {128, 64}, 4: {128, 64, 32}},
        ),
    ],
)
def test_parts_that_cut_groups_are_in_smaller_ones(
    kind: Grouped,
    architecture: str,
    changes: dict[str, Any],
    groups: dict[int, set[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank has 8 or 4 bits of its part of down matrices, and the scales of that part."""
    monkeypatch.setattr("helpers.grouped_checkpoints.SIZE", 128)
    changes |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    weights = make_grouped_checkpoint(tmp_path / "a", architecture, kind, **changes)
    prompts = [np.arange(first, last, dtype=np.int32) for first, last in ((3, 20), (40, 45))]
    steps = [{0: 16, 1: 4}, {0: 1, 1: 1}]
    plain = TorchPagedModel(write_plain_twin(tmp_path / "a", weights, tmp_path / "b")).run(prompts, steps)
    for size, sizes in groups.items():
        models = [TorchPagedModel(tmp_path / "a", keeps_groups=True, parallel=rank) for rank in thread_ranks(size)]
        found = [each for each in models[0].model.modules() if isinstance(each, GroupedMatrix | GroupedExperts)]
        assert {each.kind.weights for each in found} == sizes
        of_first, *_ = on_threads([partial(model.run, prompts, steps) for model in models])
        for logits, wanted in zip(of_first, plain, strict=True):
            assert np.abs(logits - wanted).max() < 2e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("tied", [False, True])
def test_gguf_files_in_groups_stay_so(tied: bool, tmp_path: Path) -> None:
    """Types whose blocks are a scale and levels; others are widened."""
    prompts = [np.arange(first, last, dtype=np.int32) for first, last in ((3, 20), (40, 45))]
    steps = [{0: 16, 1: 4}, {0: 1, 1: 1}]
    for kind in GROUPS:
        file = make_gguf_in_groups(tmp_path, kind, tied=tied)
        model = TorchPagedModel(file, keeps_groups=True)
        found = {each for each in model.model.modules() if isinstance(each, GroupedMatrix)}
        assert len(found) == 2 * 4 + 1  # with the head
        for logits, wanted in zip(model.run(prompts, steps), TorchPagedModel(file).run(prompts, steps), strict=True):
            assert np.abs(logits - wanted).max() < 2e-4 * np.abs(wanted).max()
    mixed = TorchPagedModel(make_mixed_gguf(tmp_path, tied=tied), keeps_groups=True)
    assert not [each for each in mixed.model.modules() if isinstance(each, GroupedMatrix)]


def test_a_tied_head_in_groups_is_the_table() -> None:
    blocks = blocks_of(KIND, 6, 2)
    matrix = GroupedMatrix(KIND, 128, 6, (), bias=False, dtype=torch.float32)
    matrix.values = torch.nn.Parameter(blocks, requires_grad=False)
    matrix.pack()
    expected = pack_blocks(KIND, blocks).widened(torch.float32)
    x = torch.randn((3, 128), generator=torch.Generator().manual_seed(0))
    assert torch.equal(matrix.rows(torch.tensor([5, 1])), expected[[5, 1]])
    assert torch.equal(matrix.multiply(x), x @ expected.T)


def test_a_gpu_has_the_kernel_where_it_works_and_the_log_names_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    grouped._log_product.cache_clear()
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(grouped, "kernel_works", lambda *_: True)
    monkeypatch.setattr(grouped, "kernel_product_on", lambda device: _kernel)
    for _ in range(2):
        assert product_for(KIND, GPU, torch.bfloat16) is _kernel
        assert product_for(KIND, CPU, torch.bfloat16) is multiply_widened
        assert product_for(KIND, GPU, torch.float32) is multiply_widened
    monkeypatch.setattr(grouped, "kernel_works", lambda *_: False)
    assert product_for(KIND, GPU, torch.bfloat16) is multiply_widened
    name = "Matrices of int4 in groups of 64 with zeros are multiplied"
    assert [record.getMessage() for record in caplog.records] == [
        f"{name} by a kernel that widens them in registers",
        f"{name} after they are widened to bfloat16, in each product",
        f"{name} after they are widened to float32, in each product",
    ]
    grouped._log_product.cache_clear()


def _kernel(x: torch.Tensor, weights: GroupedWeights, bias: torch.Tensor | None = None) -> torch.Tensor:
    raise AssertionError("chosen, and not called")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel runs in the interpreter, as if for an H100."""
    import helpers.triton_interpreter  # noqa: F401

    from torch_backend.kernels.chip import Chip

    monkeypatch.setattr(Chip, "of", lambda device: Chip(90, 132))
    grouped.kernel_works.cache_clear()


@pytest.mark.usefixtures("interpreted")
def test_the_kernel_serves_steps_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows are multiplied with widened weights."""
    from torch_backend.kernels import group_product

    weights = pack_blocks(KIND, blocks_of(KIND, 6, 2))
    x, bias = torch.randn((5, 128), generator=torch.Generator().manual_seed(0)).bfloat16(), torch.ones(6).bfloat16()
    expected = multiply_widened(x, weights, bias)
    near = grouped.kernel_product_on(CPU)(x, weights, bias)
    assert 0 < (near - expected).abs().max() <= 0.02 * expected.abs().max()
    monkeypatch.setattr(group_product, "MAX_ROWS", 4)
    assert torch.equal(grouped.kernel_product_on(CPU)(x, weights, bias), expected)


@pytest.mark.usefixtures("interpreted")
def test_a_kernel_that_is_wrong_or_fails_is_rejected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grouped, "ROWS_TRIED", (3, 5))
    monkeypatch.setattr("torch_backend.layers.scaled_products.ROWS_TRIED", (3, 5))
    assert grouped.kernel_works(KIND, CPU, torch.bfloat16)
    assert not caplog.records
    right = grouped.kernel_product_on(CPU)

    def of_next_group(x: torch.Tensor, weights: GroupedWeights, bias: torch.Tensor | None = None) -> torch.Tensor:
        rolled = GroupedWeights(weights.levels, weights.scales.roll(1, 0), weights.zeros, weights.group)
        return right(x, rolled if len(x) == 5 else weights, bias)

    def refuse(*_: Any) -> torch.Tensor:
        raise TritonError("no such product")

    for broken in (of_next_group, lambda *given: right(*given).fill_(torch.nan), refuse):
        grouped.kernel_works.cache_clear()
        monkeypatch.setattr(grouped, "kernel_product_on", lambda device, broken=broken: broken)
        assert not grouped.kernel_works(KIND, CPU, torch.bfloat16)
    what = f"Triton's kernel for matrices of {KIND.value}"
    assert [record.getMessage() for record in caplog.records] == [
        *2 * [f"{what} is wrong with torch {torch.__version__}"],
        f"{what} does not run with torch {torch.__version__}: no such product",
    ]
    grouped.kernel_works.cache_clear()
