"""Products with matrices and experts in groups against float64, and whether other rows change a bit of a row's
result."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from gpu.bench import Bench, Row, Table
from gpu.checks import Comparison, exact, short
from sglang_jax.checkpoint.group_blocks import GroupType, Levels, Scales
from torch_backend.kernels.group_layout import GroupedWeights
from torch_backend.layers.grouped import multiply_widened, random_weights

_KINDS = (
    *(GroupType(Levels.INT4, size, Scales.BFLOAT16, zeros) for size in (32, 64, 128) for zeros in (False, True)),
    GroupType(Levels.INT8, 128, Scales.BFLOAT16),
    GroupType(Levels.INT8, 32, Scales.FLOAT32, zeros=True),
    GroupType(Levels.FLOAT8_E4M3, 128, Scales.FLOAT32),
    GroupType(Levels.FLOAT4_E2M1, 32, Scales.POWER_OF_TWO),
)
_SIZES = ((3, 0, 1, 12), (1, 0, 0, 0), (40, 0, 0, 5), (0, 300, 2, 700))
"""Rows of each expert."""


def run(bench: Bench) -> Iterator[Table]:
    """A table for matrices and, with Triton, one for experts. Without Triton, matrices are widened first."""
    matrices: list[Row] = []
    experts: list[Row] = []
    for kind in _KINDS[-1:] if bench.small else _KINDS:
        for outputs, inputs in ((72, 128),) if bench.small else ((4096, 4096), (80, 1152)):
            weights = _random(bench, kind, outputs, inputs)
            for tokens in (3,) if bench.small else (1, 16, 17, 33, 64, 65, 257, 1000):
                matrices += _matrix(bench, kind, weights, tokens)
        if bench.kernels.name != "triton":
            continue
        for outputs, inputs in ((72, 128),) if bench.small else ((2048, 1024), (80, 1152)):
            weights = _random(bench, kind, len(_SIZES[0]) * outputs, inputs)
            for sizes in _SIZES[:1] if bench.small else _SIZES:
                experts += _experts(bench, kind, weights, sizes)
    yield Table(f"products with matrices in groups ({bench.kernels.name}) against float64", matrices)
    if experts:
        yield Table(f"products of experts in groups ({bench.kernels.name}) against float64", experts)


def _random(bench: Bench, kind: GroupType, outputs: int, inputs: int) -> GroupedWeights:
    return random_weights(kind, outputs, inputs, torch.Generator().manual_seed(0)).to(bench.device)


def _matrix(bench: Bench, kind: GroupType, weights: GroupedWeights, tokens: int) -> Iterator[Row]:
    wide = weights.widened(torch.float64)
    outputs, inputs = wide.shape
    for dtype in (dtype for dtype in bench.dtypes if dtype != torch.float32):
        x, bias = bench.normal(tokens, inputs, dtype=dtype), bench.normal(outputs, dtype=dtype)
        found = _multiply(bench, x, weights, bias)
        expected = functional.linear(x.double(), wide, bias.double())
        case = f"{short(dtype)} {tokens} x {inputs} x {outputs}"
        yield Comparison.of(found, expected, dtype).row(kind.value, case)
        if 1 < tokens <= 64:
            alone = _multiply(bench, x[1:2], weights, bias)
            yield exact(f"{kind.value}: a row by itself", case, alone, found[1:2])


def _experts(bench: Bench, kind: GroupType, weights: GroupedWeights, sizes: tuple[int, ...]) -> Iterator[Row]:
    experts = len(sizes)
    matrices = weights.widened(torch.float64).view(experts, -1, weights.inputs)
    outputs, inputs = matrices.shape[1:]
    for dtype in (dtype for dtype in bench.dtypes if dtype != torch.float32):
        x, bias = bench.normal(sum(sizes), inputs, dtype=dtype), bench.normal(experts, outputs, dtype=dtype)
        found = _multiply_experts(bench, x, weights, bias, sizes)
        parts = zip(x.double().split(sizes), matrices, bias.double(), strict=True)
        expected = torch.cat([functional.linear(own, matrix, added) for own, matrix, added in parts])
        case = f"{short(dtype)} {sizes} x {inputs} x {outputs}"
        yield Comparison.of(found, expected, dtype).row(kind.value, case)
        chosen = max(range(experts), key=lambda expert: sizes[expert])
        last = sum(sizes[: chosen + 1]) - 1
        one = tuple(int(each == chosen) for each in range(experts))
        alone = _multiply_experts(bench, x[last : last + 1], weights, bias, one)
        yield exact(f"{kind.value}: a row by itself", case, alone, found[last : last + 1])


def _multiply(bench: Bench, x: torch.Tensor, weights: GroupedWeights, bias: torch.Tensor) -> torch.Tensor:
    if bench.kernels.name != "triton":
        return multiply_widened(x, weights, bias)
    from torch_backend.kernels.group_product import group_product

    return group_product(x, weights, bias, bench.chip)


def _multiply_experts(
    bench: Bench, x: torch.Tensor, weights: GroupedWeights, bias: torch.Tensor, sizes: tuple[int, ...]
) -> torch.Tensor:
    from torch_backend.kernels.expert_product import expert_product, expert_tile, tile_table

    rows = expert_tile(len(x), len(sizes), weights, bench.chip).rows
    of_experts = torch.tensor(sizes, dtype=torch.int32, device=bench.device)
    table = tile_table(of_experts, len(x), rows, bench.chip)
    return expert_product(x, weights, bias, table, len(sizes), bench.chip)
