"""Rows rounded to 8 bits, in the interpreter: against torch's operations and float64; and at the end of a norm or a
gated activation, where the bits must be those of both kernels after each other."""

from __future__ import annotations

import helpers.triton_interpreter
import pytest
import torch
from helpers.triton_interpreter import counted_loads, dependent_launches, shuffled_programs

from sglang_jax.architectures.kinds.feed_forward import Activation
from torch_backend.kernels import gated_activation
from torch_backend.kernels.operations import TritonOperations, TritonRounding
from torch_backend.kernels.rounding import round_rows
from torch_backend.rounded_rows import RoundedRows

assert helpers.triton_interpreter

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice")

OPERATIONS = TritonOperations()
FLOAT8 = torch.float8_e4m3fn
LARGEST = {torch.int8: 127.0, FLOAT8: 448.0}
VALUES = pytest.mark.parametrize("values", [torch.int8, FLOAT8], ids=["int8", "float8"])
TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "f16", "f32"])
EPS = 1e-5


def numbers(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Rows of different sizes."""
    found = torch.randn((rows, columns), generator=torch.Generator().manual_seed(seed))
    return (found * 2.0 ** (torch.arange(rows) % 9 - 4)[:, None]).to(dtype)


def odd_rows(columns: int, dtype: torch.dtype) -> torch.Tensor:
    """An ordinary row, zeros, the largest and the smallest numbers, one number, NaN, infinity."""
    x = numbers(8, columns, dtype)
    x[1] = 0
    x[2] = x[2].sign() * torch.finfo(dtype).max
    x[3] = x[3].sign() * torch.finfo(dtype).tiny
    x[4] = 0
    x[4, -1] = -3
    x[5, columns // 2] = torch.nan
    x[6, -1] = torch.inf
    return x


def rounded(x: torch.Tensor, values: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales by torch's operations."""
    wide = x.float()
    scales = wide.abs().amax(-1) / LARGEST[values]
    scales = torch.where(wide.isfinite().all(-1), scales, torch.nan)
    if values == torch.int8:
        levels = (wide / torch.where(scales == 0, 1.0, scales)[:, None]).round().nan_to_num(0.0)
        return levels.to(values), scales
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).tiny, scales)
    return (wide / scales[:, None]).clamp(-448, 448).to(values), scales


def assert_same(found: RoundedRows, values: torch.Tensor, scales: torch.Tensor) -> None:
    rows = len(scales)
    assert len(found) == rows
    torch.testing.assert_close(found.scales, scales, rtol=0, atol=0, equal_nan=True)
    own = found.values[:rows]
    assert own.dtype == values.dtype
    torch.testing.assert_close(own.float(), values[:rows].float(), rtol=0, atol=0, equal_nan=True)


@VALUES
@TYPES
@pytest.mark.parametrize("columns", [1, 63, 8193])
def test_rows_are_rounded_as_torch_rounds(columns: int, dtype: torch.dtype, values: torch.dtype) -> None:
    x = odd_rows(columns, dtype)
    found = round_rows(x, values)
    assert found.dtype == dtype
    assert_same(found, *rounded(x, values))


@VALUES
def test_numbers_are_within_half_a_step(values: torch.dtype) -> None:
    """Against float64, for the kernel that is fused with a norm. A float8 step is 2 ** -3 of a number, or 2 ** -9."""
    x, weight = numbers(5, 300), numbers(1, 300, seed=1)[0]
    found = TritonRounding(values).rms_norm(x, weight, EPS)
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    scale = normed.abs().amax(-1, keepdim=True) / LARGEST[values]
    step = scale if values == torch.int8 else torch.maximum(normed.abs() / 8, scale * 2.0**-9)
    error = (found.values[:5].double() * found.scales[:, None].double() - normed).abs()
    of_norm = 2.0**-8 * (normed.abs() + normed.abs().amax(-1, keepdim=True))  # bfloat16's rounding of both
    assert (error <= step / 2 + of_norm).all()
    assert error.max() > 0


def test_ties_go_to_even() -> None:
    halves = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0]]).bfloat16()
    found = round_rows(halves, torch.int8)
    assert found.values[0].tolist() == [127, 0, 2, 2, 0, -2, -2, -127]
    sixteenths = torch.tensor([[448.0, 17.0, 19.0, -17.0, -19.0, 2.0**-10, 3 * 2.0**-10]]).bfloat16()
    found = round_rows(sixteenths, FLOAT8)
    assert found.values[0].tolist() == [448, 16, 20, -16, -20, 0, 2.0**-8]


@VALUES
@TYPES
@pytest.mark.parametrize("hidden", [1, 63, 576, 5120])
def test_a_norm_rounds_as_the_norm_and_then_the_rounding(hidden: int, dtype: torch.dtype, values: torch.dtype) -> None:
    x, weight, rounding = odd_rows(hidden, dtype), numbers(1, hidden, dtype, 1)[0], TritonRounding(values)
    normed = OPERATIONS.rms_norm(x, weight, EPS)
    assert_same(rounding.rms_norm(x, weight, EPS), *rounded(normed, values))
    residual = numbers(8, hidden, dtype, seed=2)
    normed, total = OPERATIONS.add_rms_norm(x.clone(), residual.clone(), weight, EPS)
    given = x.clone()
    found, summed = rounding.add_rms_norm(x, residual, weight, EPS)
    assert_same(found, *rounded(normed, values))
    torch.testing.assert_close(summed, total, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(x, given, rtol=0, atol=0, equal_nan=True)
    alone, _ = rounding.add_rms_norm(x[:1], numbers(8, hidden, dtype, seed=2)[:1], weight, EPS)
    assert_same(alone, found.values[:1], found.scales[:1])


@VALUES
@TYPES
@pytest.mark.parametrize("intermediate", [1, 100, 1025])
def test_a_gate_rounds_as_the_gate_and_then_the_rounding(
    intermediate: int, dtype: torch.dtype, values: torch.dtype
) -> None:
    gate_up, rounding = odd_rows(2 * intermediate, dtype), TritonRounding(values)
    for activation, operation in (
        (Activation.SILU, OPERATIONS.silu_mul),
        (Activation.GELU_TANH, OPERATIONS.gelu_mul),
    ):
        with shuffled_programs(1):
            found = rounding.gated(gate_up, activation)
        assert_same(found, *rounded(operation(gate_up), values))


@VALUES
def test_longer_rows_of_a_gate_are_rounded_by_a_second_kernel(
    values: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is then read three more times, at 2 bytes."""
    gate_up, rounding = numbers(3, 200), TritonRounding(values)
    with counted_loads() as fused:
        expected = rounding.gated(gate_up, Activation.SILU)
    monkeypatch.setattr(gated_activation, "_LARGEST_ROW", 99)
    with counted_loads() as separate:
        found = rounding.gated(gate_up, Activation.SILU)
    assert_same(found, expected.values, expected.scales)
    assert (fused.elements, separate.elements) == (3 * 200, 3 * 200 + 2 * 3 * 100)


@VALUES
def test_nothing_but_the_rows_is_read_and_written(values: torch.dtype) -> None:
    """Each number once, and the weight once for each row."""
    x, residual, weight = numbers(3, 100), numbers(3, 100, seed=1), numbers(1, 100)[0]
    for residuals, loads in ((0, 2), (1, 3)):
        with counted_loads() as counted:
            if residuals:
                TritonRounding(values).add_rms_norm(x, residual, weight, EPS)
            else:
                TritonRounding(values).rms_norm(x, weight, EPS)
        assert counted.elements == loads * 300


def test_int8_has_room_for_the_rows_of_a_product() -> None:
    """cuBLAS has been seen to refuse numbers of rows that are odd."""
    for rows, room in ((1, 32), (32, 32), (33, 64)):
        assert round_rows(numbers(rows, 8), torch.int8).values.shape == (room, 8)
        assert round_rows(numbers(rows, 8), FLOAT8).values.shape == (rows, 8)


@VALUES
def test_no_rows_launch_nothing(values: torch.dtype) -> None:
    rounding, empty, weight = TritonRounding(values), torch.empty(0, 64), torch.ones(64)
    assert rounding.round(empty).values.shape == (0, 64)
    assert rounding.rms_norm(empty, weight, EPS).values.shape == (0, 64)
    assert len(rounding.add_rms_norm(empty, empty.clone(), weight, EPS)[0]) == 0
    assert rounding.gated(empty, Activation.SILU).values.shape == (0, 32)


def test_wrong_shapes_are_refused() -> None:
    x, rounding = numbers(4, 64), TritonRounding(FLOAT8)
    with pytest.raises(ValueError, match=r"strides \[1, 4\]"):
        round_rows(numbers(64, 4).T, FLOAT8)
    with pytest.raises(ValueError, match=r"the weight torch.float32 \[63\]"):
        rounding.rms_norm(x, torch.ones(63), EPS)
    with pytest.raises(ValueError, match="residual"):
        rounding.add_rms_norm(x, x.half(), torch.ones(64), EPS)
    with pytest.raises(ValueError, match="gate and up"):
        rounding.gated(numbers(4, 63), Activation.SILU)


@VALUES
def test_programs_wait_before_they_access_other_kernels_outputs(values: torch.dtype) -> None:
    x, weight = numbers(3, 64), torch.linspace(0.5, 1.5, 64)
    plain, early = TritonRounding(values), TritonRounding(values, dependent=True)
    expected = [
        plain.round(x),
        plain.rms_norm(x, weight, EPS),
        plain.add_rms_norm(x, x.clone(), weight, EPS)[0],
        plain.gated(x, Activation.SILU),
    ]
    with dependent_launches(weight) as waits:
        found = [
            early.round(x),
            early.rms_norm(x, weight, EPS),
            early.add_rms_norm(x, x.clone(), weight, EPS)[0],
            early.gated(x, Activation.SILU),
        ]
    assert waits.programs == 4 * 3
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other.values, other.scales)
