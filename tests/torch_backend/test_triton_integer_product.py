"""Products of int8 with int8 on GPUs, in the interpreter, against exact integers."""

from __future__ import annotations

import helpers.triton_interpreter
import pytest
import torch
from helpers.triton_interpreter import dependent_launches, shuffled_programs

from torch_backend.kernels import integer_product as kernels
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.rounding import round_rows

assert helpers.triton_interpreter

CHIP = Chip(90, 132)
TYPES = [torch.bfloat16, torch.float16]


def integer_product(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, chip: Chip
) -> torch.Tensor:
    rounded = round_rows(x, torch.int8, chip.dependent_launches)
    return kernels.integer_product(rounded, values, scales, bias, chip)


def numbers(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Tokens of different sizes."""
    found = torch.randn((rows, columns), generator=torch.Generator().manual_seed(rows))
    return (found * 2.0 ** (torch.arange(rows) % 9 - 4)[:, None]).to(dtype)


def matrix(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(-128, 128, (outputs, inputs), generator=generator).to(torch.int8)
    return values, 10.0 ** (torch.arange(outputs) % 5 - 4) * (1 + torch.rand(outputs, generator=generator))


def expected(
    x: torch.Tensor, stored: tuple[torch.Tensor, torch.Tensor], bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Integers, and the float32 operations on them."""
    of_tokens = x.float().abs().amax(-1, keepdim=True) / 127
    rounded = (x.float() / torch.where(of_tokens == 0, 1.0, of_tokens)).round().long()
    product = (rounded @ stored[0].long().t()).float() * of_tokens * stored[1]
    return (product if bias is None else product + bias.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33, 64, 65, 70])
def test_products_are_exact_after_the_rounding_of_inputs(rows: int, dtype: torch.dtype) -> None:
    """In a kernel or by torch, with splits and without."""
    x = numbers(rows, 200, dtype)
    bias = numbers(1, 72, dtype)[0] if rows % 2 else None
    assert torch.equal(integer_product(x, *matrix(72, 200), bias, CHIP), expected(x, matrix(72, 200), bias))
    x, bias = numbers(rows, 1160, dtype), numbers(1, 9, dtype)[0] if rows % 2 else None
    assert torch.equal(integer_product(x, *matrix(9, 1160), bias, CHIP), expected(x, matrix(9, 1160), bias))


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (64, 128), (65, 129), (3, 1000), (130, 1153)])
def test_any_shape(outputs: int, inputs: int) -> None:
    x, stored = numbers(5, inputs), matrix(outputs, inputs)
    assert torch.equal(integer_product(x, *stored, None, CHIP), expected(x, stored))


@pytest.mark.parametrize("inputs", [200, 1160])
def test_a_row_is_the_same_whatever_other_rows_there_are(inputs: int) -> None:
    x, stored = numbers(80, inputs), matrix(70, inputs)
    whole = integer_product(x, *stored, None, CHIP)
    for first, last in ((0, 1), (5, 22), (30, 80)):
        with shuffled_programs(first):
            part = integer_product(x[first:last].contiguous(), *stored, None, Chip(80, 108))
        assert torch.equal(part, whole[first:last])


def test_the_largest_sums_do_not_overflow() -> None:
    inputs = 32_768
    x, values = torch.full((1, inputs), -3.0).bfloat16(), torch.full((2, inputs), -128).to(torch.int8)
    found = integer_product(x, values, torch.ones(2), None, CHIP)
    assert torch.equal(found, torch.full((1, 2), 3.0 * 128 * inputs).bfloat16())


@pytest.mark.parametrize("rows", [20, 70])
def test_a_value_that_is_not_finite_affects_only_its_row(rows: int) -> None:
    x, stored = numbers(rows, 200), matrix(9, 200)
    whole = integer_product(x, *stored, None, CHIP)
    x[3, 5], x[17, 199], x[8, 0] = torch.nan, torch.inf, -torch.inf
    found = integer_product(x, *stored, None, CHIP)
    assert found[[3, 8, 17]].isnan().all()
    others = [row for row in range(rows) if row not in (3, 8, 17)]
    assert torch.equal(found[others], whole[others])


def test_zeros_stay_zeros() -> None:
    x = torch.zeros((3, 40)).bfloat16()
    x[1, :8] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0])
    x[2, 7] = -torch.finfo(torch.bfloat16).tiny
    found = integer_product(x, *matrix(9, 40), None, CHIP)
    assert torch.equal(found, expected(x, matrix(9, 40)))
    assert not found[0].any()


def test_no_rows_launch_nothing() -> None:
    assert integer_product(numbers(0, 8), *matrix(6, 8), None, CHIP).shape == (0, 6)


@pytest.mark.parametrize("inputs", [200, 1160])
@pytest.mark.parametrize("rows", [3, 66])
def test_programs_wait_before_they_access_other_kernels_outputs(rows: int, inputs: int) -> None:
    x, (values, scales) = numbers(rows, inputs), matrix(9, inputs)
    plain = integer_product(x, values, scales, None, CHIP)
    with dependent_launches(values, scales) as waits:
        dependent = integer_product(x, values, scales, None, Chip(90, 132, dependent_launches=True))
    assert waits.programs >= rows
    assert torch.equal(dependent, plain)
