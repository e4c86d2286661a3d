"""The kernel for experts in groups, in the interpreter, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import helpers.triton_interpreter
import pytest
import torch
from helpers.triton_groups import FLOAT4, INT8, KINDS, NIBBLES, broken, matrix, numbers, scales_of
from helpers.triton_interpreter import counted_loads, dependent_launches, shuffled_programs
from torch.nn import functional
from triton.runtime.errors import InterpreterError

from torch_backend.kernels import expert_product as module
from torch_backend.kernels import group_product
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.expert_product import expert_product, tile_table
from torch_backend.kernels.group_layout import GroupedWeights

assert helpers.triton_interpreter

CHIP = Chip(90, 132)


def multiply(
    x: torch.Tensor,
    packed: GroupedWeights,
    sizes: Sequence[int],
    bias: torch.Tensor | None = None,
    chip: Chip = CHIP,
    some: ModuleType = module,
) -> torch.Tensor:
    """The product of the rows of experts, of which each has one of `sizes`; rows behind these are padding."""
    experts = len(sizes)
    rows = some.expert_tile(len(x), experts, packed, chip).rows
    table = some.tile_table(torch.tensor(sizes, dtype=torch.int32), len(x), rows, chip)
    found: torch.Tensor = some.expert_product(x, packed, bias, table, experts, chip)
    return found[: sum(sizes)]


def assert_right(
    x: torch.Tensor,
    stored: tuple[torch.Tensor, GroupedWeights],
    sizes: Sequence[int],
    bias: torch.Tensor | None = None,
    some: ModuleType = module,
) -> torch.Tensor:
    """Rounded once, after float32 sums in any order, and the bias. Levels and zeros are multiplied separately."""
    weights, packed = stored
    found = multiply(x, packed, sizes, bias, some=some)
    assert found.dtype == x.dtype
    first, each = 0, len(weights) // len(sizes)
    for expert, size in enumerate(sizes):
        own, part = x[first : first + size].double(), slice(expert * each, (expert + 1) * each)
        exact = functional.linear(own, weights[part], None if bias is None else bias[expert].double())
        magnitude = functional.linear(own.abs(), weights[part].abs() + 16 * scales_of(packed)[part]) + exact.abs()
        error = (found[first : first + size].double() - exact).abs()
        assert (error <= torch.finfo(x.dtype).eps / 2 * exact.abs() + 2e-6 * magnitude).all()
        first += size
    return found


@pytest.mark.parametrize(("levels", "zeros"), KINDS)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_any_number_of_rows_and_any_shape(group: int, levels: torch.dtype, zeros: bool) -> None:
    """Experts without rows, padding, which may be NaN, and outputs, inputs and rows that do not fill whole tiles."""
    for sizes, padding, outputs, inputs in (
        ([3, 0, 1, 7], 2, 7, 1152),
        ([0, 0, 17, 0], 0, 70, 3 * group),
        ([1, 33, 0], 3, 3, 128),
        ([70, 5], 1, 5, 128),
    ):
        dtype = torch.float16 if padding == 0 else torch.bfloat16
        x = numbers(sum(sizes) + padding, inputs, dtype)
        x[sum(sizes) :] = torch.nan
        bias = numbers(len(sizes), outputs, dtype) if padding in (0, 2) else None
        assert_right(x, matrix(len(sizes) * outputs, inputs, group, levels, zeros), sizes, bias)


@pytest.mark.parametrize("seed", range(3))
def test_tiles_have_each_row_of_their_expert_once(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for rows in (16, 32):
        experts = int(torch.randint(1, 20, (), generator=random))
        sizes = torch.randint(0, 80, (experts,), generator=random, dtype=torch.int32)
        sizes[torch.rand(experts, generator=random) < 0.4] = 0
        table = tile_table(sizes, int(sizes.sum()) + seed, rows, CHIP)
        found = [(expert, row) for expert, first, last in table.tolist() for row in range(first, last)]
        owners = torch.arange(experts).repeat_interleave(sizes).tolist()
        assert found == [(expert, row) for row, expert in enumerate(owners)]
        assert all(last - first <= rows for _, first, last in table.tolist())


def test_as_many_tiles_as_rows_can_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all ways to divide rows among experts, the one that needs most tiles needs exactly the table's. Others have no
    rows, whatever the memory held before."""
    used = partial(torch.full, fill_value=7)
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: used(*shape, **options))
    for rows, tile_rows, most in ((3, 16, [1, 1, 1]), (40, 16, [17, 17, 6]), (2, 16, [1, 1, 0])):
        table = tile_table(torch.tensor(most, dtype=torch.int32), rows, tile_rows, CHIP)
        assert all(first < last for _, first, last in table.tolist())
        assert tile_table(torch.zeros(3, dtype=torch.int32), rows, tile_rows, CHIP).tolist() == [[0, 0, 0]] * len(table)


@pytest.mark.parametrize(("levels", "zeros"), [(NIBBLES, True), (INT8, False), (FLOAT4, False)])
def test_a_row_is_batch_invariant(levels: torch.dtype, zeros: bool) -> None:
    """Bit for bit, whatever other rows its expert and others have, in tiles of 16 to 64 rows, and in any order of
    programs."""
    x, stored = numbers(80, 320), matrix(2 * 9, 320, 32, levels, zeros)
    whole = assert_right(x, stored, [70, 10])
    for places, sizes in (([3], [1, 0]), ([69, 70], [1, 1]), ([*range(9, 20), *range(71, 80)], [11, 9])):
        with shuffled_programs(sizes[0]):
            part = multiply(x[places].contiguous(), stored[1], sizes, chip=Chip(80, 108))
        assert torch.equal(part, whole[places])


def test_experts_without_rows_are_not_read() -> None:
    """As many weights are loaded as for one expert, in addition to what tells programs that they have no rows."""
    x, (_, packed) = numbers(4, 128), matrix(8 * 64, 128, 32, NIBBLES, True)
    with counted_loads() as of_one:
        multiply(x, packed.part(slice(0, 64)), [4])
    with counted_loads() as of_eight:
        multiply(x, packed, [0, 0, 0, 4, 0, 0, 0, 0])
    assert of_one.elements <= of_eight.elements <= of_one.elements + 50


def test_no_rows_launch_nothing_and_other_shapes_are_refused() -> None:
    _, packed = matrix(6, 128, 64, NIBBLES, True)
    assert multiply(numbers(0, 128), packed, [0, 0]).shape == (0, 3)
    table = torch.zeros((1, 3), dtype=torch.int32)
    with pytest.raises(ValueError, match="wanted is contiguous"):
        expert_product(numbers(2, 64), packed, None, table, 2, CHIP)
    with pytest.raises(ValueError, match="6 outputs of 4 experts, and biases None"):
        expert_product(numbers(2, 128), packed, None, table, 4, CHIP)
    with pytest.raises(ValueError, match=r"6 outputs of 2 experts, and biases \[1, 6\]"):
        expert_product(numbers(2, 128), packed, numbers(1, 6), table, 2, CHIP)


def test_programs_wait_before_they_access_other_kernels_outputs() -> None:
    """The table is another kernel's, too."""
    x, (_, packed) = numbers(3, 256), matrix(2 * 9, 256, 128, NIBBLES, True)
    assert packed.zeros is not None
    plain = multiply(x, packed, [2, 1])
    with dependent_launches(packed.levels, packed.scales, packed.zeros) as waits:
        dependent = multiply(x, packed, [2, 1], chip=replace(CHIP, dependent_launches=True))
    assert waits.programs == 3
    assert torch.equal(dependent, plain)


# -- Planted faults ----------------------------------------------------------------------------------------------------

OF_TABLE = {
    "the next expert": ("tl.store(entry, expert, mask=has)", "tl.store(entry, (expert + 1) % experts, mask=has)"),
    "the last tile has too few rows": ("tl.minimum(start + ROWS, end)", "tl.minimum(start + ROWS, end - 1)"),
    "the last tile has too many rows": ("tl.minimum(start + ROWS, end)", "start + ROWS"),
    "a row between tiles is left out": ("number * ROWS\n", "number * (ROWS + 1)\n"),
    "tiles of the expert before are overwritten": ("tl.cumsum(own, 0) - own,", "(tl.cumsum(own, 0) - own) // 2,"),
    "too few tiles": ("count = with_rows + ", "count = with_rows - 1 + "),
}
OF_PRODUCT = {
    "the matrix of the expert before": ("levels += expert.to(tl.int64)", "levels += (expert - 1).to(tl.int64)"),
    "the scales of the first expert": ("scales += expert * outputs", "scales += 0"),
    "the zeros of the first expert": ("zeros += expert * outputs", "zeros += 0"),
    "the bias of the first expert": ("bias += expert * outputs", "bias += 0"),
    "the scale of the next group": ("at = (start // GROUP)", "at = (start // GROUP + (start + GROUP < last))"),
    "scales as of one expert": ("last_row, all_outputs", "last_row, outputs"),
    "neighbours swapped": (
        "tl.join(bits.to(tl.int16), (bits >> 16).to(tl.int16))",
        "tl.join((bits >> 16).to(tl.int16), bits.to(tl.int16))",
    ),
    "rows of the next expert": ("wanted_rows, width = row < last_row", "wanted_rows, width = row < rows"),
    "outputs of the next expert": ("wanted_outputs = output < outputs", "wanted_outputs = output < width"),
    "rows of the tile before": ("row = first_row + tl", "row = tl.maximum(first_row - ROWS, 0) + tl"),
}


@pytest.mark.parametrize("fault", [*OF_TABLE, *OF_PRODUCT])
def test_a_fault_is_noticed(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory is NaN: it may hold the results of an earlier product."""
    empty = torch.empty

    def poisoned(*shape: Any, **options: Any) -> torch.Tensor:
        found = empty(*shape, **options)
        return found.fill_(torch.nan) if found.is_floating_point() else found

    monkeypatch.setattr(torch, "empty", poisoned)

    def check(some: ModuleType) -> None:
        for seed, (levels, zeros) in enumerate([(NIBBLES, True), (FLOAT4, False)]):
            bias = numbers(4, 7)
            stored, x = matrix(4 * 7, 384, 32, levels, zeros), numbers(40, 384)
            with shuffled_programs(seed):
                assert_right(x, stored, [35, 0, 1, 4], bias, some=some)
                assert_right(x[:4], stored, [1, 1, 1, 1], bias, some=some)

    if fault == min(OF_TABLE):
        check(module)
    if fault in OF_TABLE:
        with broken(module, tmp_path, *OF_TABLE[fault]) as faulty, pytest.raises((AssertionError, InterpreterError)):
            check(faulty)
        return
    with broken(group_product, tmp_path, *OF_PRODUCT[fault]) as faulty:
        monkeypatch.setattr(module, "launch", faulty.launch)
        with pytest.raises((AssertionError, InterpreterError)):
            check(module)
