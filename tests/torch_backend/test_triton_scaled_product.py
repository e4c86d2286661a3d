"""The kernel for matrices of 8 bits, in the interpreter, against float64."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import helpers.triton_interpreter
import pytest
import torch
from helpers.triton_interpreter import dependent_launches, shuffled_programs
from torch.nn import functional
from triton.runtime.errors import InterpreterError

from torch_backend.kernels import scaled_product as module
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.scaled_product import (
    fixed_product,
    fixed_tile,
    max_rows,
    product_tile,
    scaled_product,
    split_length,
)

assert helpers.triton_interpreter

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, Chip], torch.Tensor]

CHIP = Chip(90, 132)
INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn
TYPES = (torch.bfloat16, torch.float16, torch.float32)


def numbers(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, columns), generator=torch.Generator().manual_seed(seed)).to(dtype)


def matrix(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Values including the type's maximum and minimum, and scales of all sizes, with very different neighbours."""
    values = (40 * torch.randn((outputs, inputs), generator=torch.Generator().manual_seed(1))).clamp(-127, 127)
    extremes = torch.tensor([-127.0, 127.0]) if dtype == INT8 else torch.tensor([448.0, 2.0**-9])
    values[0, :2] = extremes[:inputs]
    sizes = 10.0 ** (torch.arange(outputs) % 5 - 4)
    return values.to(dtype), sizes * (1 + torch.rand(outputs, generator=torch.Generator().manual_seed(2)))


def assert_right(
    product: Product,
    x: torch.Tensor,
    stored: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None = None,
    chip: Chip = CHIP,
) -> torch.Tensor:
    """Rounded once, after float32 sums in any order, and the bias."""
    found = product(x, *stored, bias, chip)
    weights = stored[0].double() * stored[1][:, None].double()
    exact = functional.linear(x.double(), weights, None if bias is None else bias.double())
    magnitude = functional.linear(x.double().abs(), weights.abs()) + exact.abs()
    assert found.dtype == x.dtype
    least = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    error = (found.double() - exact).abs()
    assert (error <= torch.finfo(x.dtype).eps / 2 * exact.abs() + 2e-6 * magnitude + least).all()
    return found


@pytest.mark.parametrize("rows", [1, 2, 7, 15, 16, 17, 32, 33, 63, 64, 65, 70])
def test_any_number_of_rows(rows: int) -> None:
    """Inputs and outputs that do not fill whole tiles."""
    bias = numbers(1, 70)[0] if rows % 2 else None
    assert_right(scaled_product, numbers(rows, 203), matrix(70, 203, INT8 if rows % 3 else FLOAT8), bias)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (64, 128), (65, 129), (3, 1100), (129, 16), (130, 1153)])
@pytest.mark.parametrize("values", [INT8, FLOAT8], ids=["int8", "float8"])
def test_any_shape(outputs: int, inputs: int, values: torch.dtype) -> None:
    for rows in (3, 66):
        assert_right(scaled_product, numbers(rows, inputs, torch.float16), matrix(outputs, inputs, values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float8_is_read_as_bytes_on_chips_without_it(dtype: torch.dtype) -> None:
    """All values of the type."""
    every = torch.arange(256, dtype=torch.uint8).view(FLOAT8)
    every = every[every.float().isfinite()].repeat(9, 1)
    stored = every, torch.rand(9)
    found = [assert_right(scaled_product, numbers(4, 254, dtype), stored, chip=Chip(chip, 108)) for chip in (80, 90)]
    assert torch.equal(*found)


def test_large_sums_fit_for_every_result_type() -> None:
    """A sum beyond float16's maximum, whose product is within it."""
    x, values = torch.full((2, 512), 3.0).half(), torch.full((16, 512), 127).to(INT8)
    assert_right(scaled_product, x, (values, torch.full((16,), 1e-3)))


@pytest.mark.parametrize("inputs", [200, 1700])
def test_a_row_is_batch_invariant(inputs: int) -> None:
    """Bit for bit, in steps of up to 64 rows; with splits and without, and with programs in any order."""
    x, stored = numbers(64, inputs), matrix(70, inputs, INT8)
    assert (split_length(1, 70, inputs, product_tile(1, CHIP)) < inputs) is (inputs > 1000)
    whole = assert_right(scaled_product, x, stored)
    for first, last in ((0, 1), (5, 22), (30, 64)):
        with shuffled_programs(first):
            part = scaled_product(x[first:last].contiguous(), *stored, None, Chip(80, 108))
        assert torch.equal(part, whole[first:last])


def plain_product(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, chip: Chip
) -> torch.Tensor:
    """For scales of 1."""
    return fixed_product(x, values, None, bias, chip)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("values", [None, INT8, FLOAT8], ids=["plain", "int8", "float8"])
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 203), (7, 301)], ids=["whole", "splits"])
def test_a_row_of_a_fixed_product_has_the_same_bits_among_any_others(
    outputs: int, inputs: int, values: torch.dtype | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any number, at any place of a tile; with programs in any order, and rows multiplied in several parts."""
    monkeypatch.setattr(module, "_MIN_SPLIT", 128)
    assert (split_length(1, outputs, inputs, fixed_tile(dtype)) < inputs) is (outputs == 7)
    rows = 40 if dtype == torch.float32 else 140
    x, bias = numbers(rows, inputs, dtype), numbers(1, outputs, dtype)[0]
    if values is None:
        product, stored = plain_product, (numbers(outputs, inputs, dtype, seed=1), torch.ones(outputs))
    else:
        product, stored = fixed_product, matrix(outputs, inputs, values)
    whole = assert_right(product, x, stored, bias)
    monkeypatch.setattr(module, "_MAX_ROWS", 9)
    for first, last in ((0, 1), (rows - 1, rows), (5, 22), (31, 37)):
        with shuffled_programs(first):
            assert torch.equal(product(x[first:last], *stored, bias, Chip(80, 108)), whole[first:last])


@pytest.mark.parametrize("inputs", [200, 1200])
def test_a_value_that_is_not_finite_affects_only_its_row(inputs: int) -> None:
    x, stored = numbers(20, inputs), matrix(9, inputs, INT8)
    expected = scaled_product(x, *stored, None, CHIP)
    x[3, 5], x[17, inputs - 1] = torch.nan, torch.inf
    found = scaled_product(x, *stored, None, CHIP)
    assert not found[[3, 17]].isfinite().any()
    others = [row for row in range(20) if row not in (3, 17)]
    assert torch.equal(found[others], expected[others])


def test_splits_fill_a_chip_and_are_fixed_per_matrix_for_few_rows() -> None:
    shapes = ((4096, 4096), (6144, 4096), (28_672, 4096), (4096, 14_336), (576, 1536), (7, 5))
    for outputs, inputs in shapes:
        lengths = {split_length(rows, outputs, inputs, product_tile(rows, CHIP)) for rows in (1, 16, 17, 40, 64)}
        assert len(lengths) == 1
        (length,) = lengths
        assert length % 128 == 0
        splits, tiles = -(-inputs // length), -(-outputs // 64)
        assert splits * tiles >= 256 or length < 1024
        assert splits == 1 or splits * tiles < 4 * 256
    assert split_length(1024, 4096, 4096, product_tile(1024, CHIP)) == 4096
    assert split_length(96, 4096, 4096, product_tile(96, CHIP)) == 1024
    assert [max_rows(FLOAT8, Chip(chip, 108)) for chip in (80, 89)] == [256, max_rows(INT8, Chip(80, 108))]


def test_no_rows_launch_nothing_and_other_shapes_are_refused() -> None:
    values, scales = matrix(6, 8, INT8)
    assert scaled_product(numbers(0, 8), values, scales, None, CHIP).shape == (0, 6)
    for wrong in (
        (numbers(2, 7), values, scales),
        (numbers(8, 2).T, values, scales),
        (numbers(2, 8), values, scales[:5]),
        (numbers(2, 6), values.T, scales),
    ):
        with pytest.raises(ValueError, match=r"wanted are contiguous"):
            scaled_product(*wrong, None, CHIP)
    for wrong in ((numbers(2, 8).float(), values, scales), (numbers(2, 8), values.to(torch.int16), scales)):
        with pytest.raises(ValueError, match="no product"):
            scaled_product(*wrong, None, CHIP)
    assert fixed_product(numbers(0, 8), values, scales, None, CHIP).shape == (0, 6)
    weight = numbers(6, 8)
    with pytest.raises(ValueError, match=r"wanted are contiguous"):
        fixed_product(numbers(2, 6), weight.T, None, None, CHIP)
    for wrong in (
        (numbers(2, 8), weight.float(), None),
        (numbers(2, 8), weight, scales),
        (numbers(2, 8), values, None),
    ):
        with pytest.raises(ValueError, match="no product"):
            fixed_product(*wrong, None, CHIP)


@pytest.mark.parametrize("inputs", [200, 1200])
def test_programs_wait_before_they_access_other_kernels_outputs(inputs: int) -> None:
    x, (values, scales) = numbers(3, inputs), matrix(9, inputs, INT8)
    plain = scaled_product(x, values, scales, None, CHIP)
    with dependent_launches(values, scales) as waits:
        dependent = scaled_product(x, values, scales, None, Chip(90, 132, dependent_launches=True))
    assert waits.programs >= 1
    assert torch.equal(dependent, plain)


# -- Planted faults ----------------------------------------------------------------------------------------------------


@contextmanager
def broken(tmp_path: Path, right: str, wrong: str) -> Iterator[ModuleType]:
    """The module with a planted fault."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert right in source
    file = tmp_path / "broken_scaled_product.py"
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


@pytest.mark.parametrize(
    ("right", "wrong", "error"),
    [
        (
            "product *= tl.load(scales + output,",
            "product *= tl.load(scales + (output + 1) % outputs,",
            AssertionError,
        ),
        ("scale = tl.load(scales + output,", "scale = tl.load(scales + (output + 1) % outputs,", AssertionError),
        ("mask=(row < rows)[None, :] & inside[:, None]", "mask=inside[:, None]", InterpreterError),
        ("mask=(output < outputs)[:, None] & inside[None, :]", "mask=inside[None, :]", InterpreterError),
        ("inside = place < inputs", "inside = place >= 0", (AssertionError, InterpreterError)),
        ("wanted = (output < outputs)[:, None] & (row < rows)[None, :]", "wanted = output[:, None] < outputs",
         InterpreterError),
        ("first = split * length", "first = split * INPUTS", AssertionError),
        ("tl.static_range(SPLITS)", "tl.static_range(SPLITS - 1)", AssertionError),
        ("(split * rows + row) * outputs", "(split * rows + row + 1) * outputs", (AssertionError, InterpreterError)),
        ("+= tl.load(bias + output, mask=output", "-= tl.load(bias + output, mask=output", AssertionError),
        ("+= tl.load(bias + output, mask=inside", "-= tl.load(bias + output, mask=inside", AssertionError),
        ("tl.load(of_tokens + row, mask=row < rows", "tl.load(of_tokens + row, mask=row < 2", AssertionError),
        ("tl.load(of_tokens + row)", "tl.load(of_tokens + (row + 1) % rows)", AssertionError),
    ],
)  # fmt: skip
def test_a_fault_is_noticed(right: str, wrong: str, error: type[Exception], tmp_path: Path) -> None:
    """Also in products of int8 with int8, which the same kernels compute."""

    def check(some: ModuleType) -> None:
        of_tokens = torch.tensor([0.5, 2.0, 8.0])

        def of_integers(
            x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, chip: Chip
        ) -> torch.Tensor:
            out = torch.empty((len(x), len(values)), dtype=x.dtype)
            rounded = (x.float() / of_tokens[:, None]).to(INT8)
            some.multiply_and_scale(rounded, of_tokens, values, scales, bias, out, chip)
            return out

        for inputs in (203, 1100):
            stored, bias = matrix(70, inputs, INT8), numbers(1, 70)[0]
            assert_right(some.scaled_product, numbers(3, inputs), stored, bias)
            x = (10 * numbers(3, inputs)).round() * of_tokens[:, None].bfloat16()
            assert_right(of_integers, x, stored, bias)

    check(module)
    with broken(tmp_path, right, wrong) as faulty, pytest.raises(error):
        check(faulty)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("partitioned = rows if tile is None else tile.rows", "partitioned = rows"),
        ("tile=fixed_tile(x.dtype)", "tile=product_tile(len(x), chip)"),
    ],
)
def test_a_partition_that_depends_on_the_number_of_rows_is_noticed(
    right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = numbers(70, 500, torch.float32), numbers(7, 500, torch.float32, seed=1)

    def same_bits(some: ModuleType) -> bool:
        monkeypatch.setattr(some, "_MIN_SPLIT", 128)
        monkeypatch.setattr(some, "_PROGRAMS", 2)
        whole, part = (some.fixed_product(rows, weight, None, None, CHIP) for rows in (x, x[:9]))
        return torch.equal(whole[:9], part)

    assert same_bits(module)
    with broken(tmp_path, right, wrong) as faulty:
        assert not same_bits(faulty)
