"""The kernel for matrices in groups, in the interpreter, against float64."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import helpers.triton_interpreter
import pytest
import torch
from helpers.triton_interpreter import dependent_launches, shuffled_programs
from torch.nn import functional
from triton.runtime.errors import InterpreterError

from torch_backend.kernels import group_product as module
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.group_layout import GroupedWeights, pack_groups
from torch_backend.kernels.group_product import group_product

assert helpers.triton_interpreter

CHIP = Chip(90, 132)
NIBBLES, INT8, FLOAT8 = torch.uint8, torch.int8, torch.float8_e4m3fn
KINDS = [(NIBBLES, False), (NIBBLES, True), (INT8, False), (INT8, True), (FLOAT8, False)]


def numbers(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, columns), generator=torch.Generator().manual_seed(seed)).to(dtype)


def matrix(
    outputs: int, inputs: int, group: int, levels: torch.dtype, zeros: bool, scales: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, GroupedWeights]:
    """Float64 weights, and the same ones packed. Levels are all of a type; neighbouring scales are very different."""
    random, groups = torch.Generator().manual_seed(1), (outputs, inputs // group)
    if levels == FLOAT8:
        found = (40 * torch.randn((outputs, inputs), generator=random)).clamp(-448, 448).to(levels)
    else:
        least, most = (0, 16) if levels == NIBBLES else (-128, 128)
        found = torch.randint(least, most, (outputs, inputs), generator=random).to(levels)
    sizes = 10.0 ** (torch.arange(groups[0] * groups[1]).view(groups) % 3 - 2)
    scale = (sizes * (1 + torch.rand(groups, generator=random))).to(scales)
    zero = torch.randint(0, 17, groups, generator=random).to(levels) if zeros else None
    subtracted = 8.0 if levels == NIBBLES and zero is None else 0.0 if zero is None else zero.double()[..., None]
    weights = (found.double().view(*groups, group) - subtracted) * scale.double()[..., None]
    return weights.view(outputs, inputs), pack_groups(found, scale, zero, group)


def assert_right(
    x: torch.Tensor,
    stored: tuple[torch.Tensor, GroupedWeights],
    bias: torch.Tensor | None = None,
    chip: Chip = CHIP,
    some: ModuleType = module,
) -> torch.Tensor:
    """Rounded once, after float32 sums in any order, and the bias. Levels and zeros are multiplied separately."""
    weights, packed = stored
    found: torch.Tensor = some.group_product(x, packed, bias, chip)
    exact = functional.linear(x.double(), weights, None if bias is None else bias.double())
    most = packed.scales.t().double()[..., None].expand(-1, -1, packed.group).reshape(weights.shape)
    magnitude = functional.linear(x.double().abs(), weights.abs() + 16 * most) + exact.abs()
    assert found.dtype == x.dtype
    error = (found.double() - exact).abs()
    assert (error <= torch.finfo(x.dtype).eps / 2 * exact.abs() + 2e-6 * magnitude).all()
    return found


@pytest.mark.parametrize(("levels", "zeros"), KINDS)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_any_number_of_rows_and_any_shape(group: int, levels: torch.dtype, zeros: bool) -> None:
    """Inputs and outputs that do not fill whole tiles; with splits of inputs and without."""
    shapes = [(1, 1, group), (3, 7, 1152), (17, 70, 3 * group), (64, 3, 128), (200, 5, 128)]
    for rows, outputs, inputs in shapes:
        dtype = torch.float16 if rows == 17 else torch.bfloat16
        scales = {1: torch.float32, 17: torch.float16}.get(rows, torch.bfloat16)
        stored = matrix(outputs, inputs, group, levels, zeros, scales)
        bias = numbers(1, outputs, dtype)[0] if rows in (3, 17) else None
        assert_right(numbers(rows, inputs, dtype), stored, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("levels", "zeros"), KINDS)
def test_packed_weights_are_unpacked_exactly(levels: torch.dtype, zeros: bool, dtype: torch.dtype) -> None:
    for group in (32, 64, 128):
        weights, packed = matrix(5, 3 * group, group, levels, zeros)
        assert torch.equal(packed.widened(dtype), weights.float().to(dtype))


def test_a_weight_takes_little_more_than_its_bits() -> None:
    def bytes_per_weight(group: int, levels: torch.dtype, zeros: bool) -> float:
        return matrix(64, 512, group, levels, zeros)[1].nbytes / (64 * 512)

    assert bytes_per_weight(128, NIBBLES, False) == (64 + 2) / 128 <= 0.56
    assert bytes_per_weight(128, NIBBLES, True) == (64 + 2 + 1) / 128 <= 0.56
    assert bytes_per_weight(32, NIBBLES, False) == (16 + 2) / 32
    assert bytes_per_weight(128, INT8, False) == (128 + 2) / 128


@pytest.mark.parametrize("inputs", [256, 1280])
@pytest.mark.parametrize(("levels", "zeros"), [(NIBBLES, True), (INT8, False)])
def test_a_row_is_batch_invariant(levels: torch.dtype, zeros: bool, inputs: int) -> None:
    """Bit for bit, in steps of up to 64 rows; with splits and without, and with programs in any order."""
    x, stored = numbers(64, inputs), matrix(9, inputs, 64, levels, zeros)
    whole = assert_right(x, stored)
    for first, last in ((0, 1), (5, 22), (30, 62)):
        with shuffled_programs(first):
            part = group_product(x[first:last].contiguous(), stored[1], None, Chip(80, 108))
        assert torch.equal(part, whole[first:last])


def test_a_value_that_is_not_finite_affects_only_its_row() -> None:
    x, (_, packed) = numbers(20, 384), matrix(9, 384, 64, NIBBLES, True)
    expected = group_product(x, packed, None, CHIP)
    x[3, 5], x[17, 383] = torch.nan, torch.inf
    found = group_product(x, packed, None, CHIP)
    assert not found[[3, 17]].isfinite().any()
    others = [row for row in range(20) if row not in (3, 17)]
    assert torch.equal(found[others], expected[others])


def test_float8_is_read_as_bytes_on_chips_without_it() -> None:
    stored = matrix(9, 256, 128, FLOAT8, False)
    found = [assert_right(numbers(4, 256), stored, chip=Chip(chip, 108)) for chip in (80, 90)]
    assert torch.equal(*found)


def test_no_rows_launch_nothing_and_other_shapes_are_refused() -> None:
    _, packed = matrix(6, 128, 64, NIBBLES, True)
    assert group_product(numbers(0, 128), packed, None, CHIP).shape == (0, 6)
    for x in (numbers(2, 64), numbers(128, 2).T):
        with pytest.raises(ValueError, match="wanted is contiguous"):
            group_product(x, packed, None, CHIP)
    with pytest.raises(ValueError, match="no product"):
        group_product(numbers(2, 128).float(), packed, None, CHIP)
    levels, scales = torch.zeros((6, 128), dtype=NIBBLES), torch.ones((6, 2), dtype=torch.float16)
    for wrong, message in (
        ((levels, scales, None, 48), "groups have 48"),
        ((levels, scales, None, 128), "wanted are"),
        ((levels, scales, scales, 64), "zeros in the dtype of levels"),
        ((levels.short(), scales, None, 64), "no product"),
        ((levels, scales.double(), None, 64), "no product"),
        ((levels.to(FLOAT8), scales, levels[:, :2].to(FLOAT8), 64), "have no zeros"),
    ):
        with pytest.raises(ValueError, match=message):
            pack_groups(*wrong)


@pytest.mark.parametrize("inputs", [256, 1280])
def test_programs_wait_before_they_access_other_kernels_outputs(inputs: int) -> None:
    x, (_, packed) = numbers(3, inputs), matrix(9, inputs, 128, NIBBLES, True)
    assert packed.zeros is not None
    plain = group_product(x, packed, None, CHIP)
    with dependent_launches(packed.levels, packed.scales, packed.zeros) as waits:
        dependent = group_product(x, packed, None, replace(CHIP, dependent_launches=True))
    assert waits.programs >= 1
    assert torch.equal(dependent, plain)


# -- Planted faults ----------------------------------------------------------------------------------------------------


@contextmanager
def broken(tmp_path: Path, right: str, wrong: str) -> Iterator[ModuleType]:
    """The module with a planted fault."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert right in source
    file = tmp_path / "broken_group_product.py"
    file.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = found
    try:
        spec.loader.exec_module(found)
        yield found
    finally:
        del sys.modules[file.stem]


FAULTS = {
    "parts of a word swapped": ("words >> (4 * part)", "words >> (4 * (3 - part))"),
    "neighbours swapped": (
        "tl.join(bits.to(tl.int16), (bits >> 16).to(tl.int16))",
        "tl.join((bits >> 16).to(tl.int16), bits.to(tl.int16))",
    ),
    "zero off by one": ("zero - SUBTRACTED", "zero - SUBTRACTED + 1.0"),
    "a constant zero off by one": ("136.0", "137.0"),
    "the scale of the next group": ("at = (start // GROUP)", "at = (start // GROUP + (start + GROUP < last))"),
    "the scale of the next output": (
        "* outputs + output\n    return",
        "* outputs + (output + 1) % outputs\n    return",
    ),
    "scales of the tile before": ("behind = start + INPUTS", "behind = start"),
    "sums of inputs of a part, not of the group": (
        "COMPUTE), tokens, of_ones)",
        "COMPUTE), tokens)",
    ),
    "scales past the last group": ("mask=(output < outputs) & (start < last)", "mask=output < outputs"),
    "outputs past the last": ("mask=wanted_outputs[:, None],", "mask=None,"),
    "the splits overlap": ("first = split * length", "first = split * INPUTS"),
    "the bias is subtracted": ("sums += tl.load(bias", "sums -= tl.load(bias"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, tmp_path: Path) -> None:
    def check(some: ModuleType) -> None:
        for outputs, inputs in ((7, 1280), (65, 384)):
            for zeros in (False, True):
                bias = numbers(1, outputs)[0]
                assert_right(numbers(3, inputs), matrix(outputs, inputs, 128, NIBBLES, zeros), bias, some=some)

    if fault == min(FAULTS):
        check(module)
    with broken(tmp_path, *FAULTS[fault]) as faulty, pytest.raises((AssertionError, InterpreterError)):
        check(faulty)
