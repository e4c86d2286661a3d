"""The kernel for matrices in groups, in the interpreter, against float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import helpers.triton_interpreter
import pytest
import torch
from helpers.triton_groups import FLOAT4, FLOAT8, INT8, KINDS, NIBBLES, broken, float4, matrix, numbers, scales_of
from helpers.triton_interpreter import dependent_launches, shuffled_programs
from torch.nn import functional
from triton.runtime.errors import InterpreterError

from torch_backend.kernels import group_product as module
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.group_layout import FLOAT4 as FLOATS
from torch_backend.kernels.group_layout import GroupedWeights, pack_groups
from torch_backend.kernels.group_product import group_product

assert helpers.triton_interpreter

CHIP = Chip(90, 132)


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
    magnitude = functional.linear(x.double().abs(), weights.abs() + 16 * scales_of(packed)) + exact.abs()
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


def test_floats_of_4_bits_have_scales_of_any_dtype() -> None:
    """As NVFP4 has them, in float32, for groups of 16."""
    random = torch.Generator().manual_seed(0)
    for rows, outputs, inputs in ((1, 1, 16), (17, 70, 208), (3, 7, 1152), (200, 5, 128)):
        levels = torch.randint(16, (outputs, inputs), generator=random).to(NIBBLES)
        scales = 10.0 ** torch.randint(-3, 0, (outputs, inputs // 16), generator=random)
        scales *= 1 + torch.rand(scales.shape, generator=random)
        packed = pack_groups(levels, scales, None, 16, floats=True)
        wide = torch.tensor(FLOATS).double()[levels.int()] * scales.double().repeat_interleave(16, 1)
        assert torch.equal(packed.widened(torch.float32), wide.float())
        dtype = torch.float16 if rows == 17 else torch.bfloat16
        assert_right(numbers(rows, inputs, dtype), (wide, packed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("levels", "zeros"), KINDS)
def test_packed_weights_are_unpacked_exactly(levels: torch.dtype, zeros: bool, dtype: torch.dtype) -> None:
    for group in (32, 64, 128):
        weights, packed = matrix(5, 3 * group, group, levels, zeros)
        assert torch.equal(packed.widened(dtype), weights.float().to(dtype))


@pytest.mark.parametrize(("dtype", "first", "count"), [(torch.bfloat16, 0, 255), (torch.float16, 117, 16)])
def test_every_float_of_4_bits_times_every_power_of_two_is_exact(dtype: torch.dtype, first: int, count: int) -> None:
    """Each row of inputs chooses a level; an output for each scale. In float16, those that it can hold."""
    levels = torch.arange(16, dtype=NIBBLES).repeat(count, 2)
    exponents = (first + torch.arange(count)[:, None]).to(NIBBLES)
    packed = pack_groups(levels, exponents, None, 32, floats=True)
    for size in (1.0, 2.0**60) if dtype == torch.bfloat16 else (1.0,):
        x = size * torch.eye(16, 32, dtype=dtype)
        exact = float4(levels, exponents)[:, :16].t() * size
        assert torch.equal(group_product(x, packed, None, CHIP), exact.to(dtype))


def test_a_weight_takes_little_more_than_its_bits() -> None:
    def bytes_per_weight(group: int, levels: torch.dtype, zeros: bool) -> float:
        return matrix(64, 512, group, levels, zeros)[1].nbytes / (64 * 512)

    assert bytes_per_weight(128, NIBBLES, False) == (64 + 2) / 128 <= 0.56
    assert bytes_per_weight(128, NIBBLES, True) == (64 + 2 + 1) / 128 <= 0.56
    assert bytes_per_weight(32, NIBBLES, False) == (16 + 2) / 32
    assert bytes_per_weight(32, FLOAT4, False) == (16 + 1) / 32
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
    with pytest.raises(ValueError, match="have no zeros"):
        pack_groups(levels, scales, levels[:, :2], 64, floats=True)
    with pytest.raises(ValueError, match=r"are uint8, got torch\.int8"):
        pack_groups(levels.to(INT8), scales, None, 64, floats=True)


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
        "* width + output\n    return",
        "* width + (output + 1) % width\n    return",
    ),
    "scales of the tile before": ("behind = start + INPUTS", "behind = start"),
    "sums of inputs of a part, not of the group": (
        "COMPUTE), tokens, of_ones)",
        "COMPUTE), tokens)",
    ),
    "scales past the last group": ("mask=wanted & (start < last)", "mask=wanted"),
    "outputs past the last": ("mask=wanted_outputs[:, None],", "mask=None,"),
    "the splits overlap": ("first = split * length", "first = split * INPUTS"),
    "the sign of a float is lost": ("& -0x7FFF8000", "& 0x7F"),
    "a float's bits one place off": ("words << (6 - 4 * part)", "words << (7 - 4 * part)"),
    "a float's exponent off by one": ("2.0**126", "2.0**125"),
    "the smallest power of two is 0": ("tl.where(scale == 0, 0x00400000, ", "tl.where(scale == 0, 0, "),
    "the bias is subtracted": ("sums += tl.load(bias", "sums -= tl.load(bias"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_noticed(fault: str, tmp_path: Path) -> None:
    def check(some: ModuleType) -> None:
        for outputs, inputs in ((7, 1280), (65, 384)):
            bias = numbers(1, outputs)[0]
            for zeros in (False, True):
                assert_right(numbers(3, inputs), matrix(outputs, inputs, 128, NIBBLES, zeros), bias, some=some)
        smallest = torch.zeros((5, 4), dtype=NIBBLES)
        levels = torch.arange(16, dtype=NIBBLES).repeat(5, 8)
        packed = pack_groups(levels, smallest, None, 32, floats=True)
        assert_right(2.0**100 * numbers(3, 128), (float4(levels, smallest), packed), some=some)

    if fault == min(FAULTS):
        check(module)
    with broken(module, tmp_path, *FAULTS[fault]) as faulty, pytest.raises((AssertionError, InterpreterError)):
        check(faulty)
