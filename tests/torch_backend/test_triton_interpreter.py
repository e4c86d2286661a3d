"""The interpreter of the kernel tests: its errors are corrected, and it is strict where it was lenient."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from helpers.triton_interpreter import shuffled_programs


@triton.jit
def _scale_add(x, y, out, n, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = lanes < n
    a = tl.load(x + lanes, mask=keep, other=0.0)
    b = tl.load(y + lanes, mask=keep, other=0.0)
    tl.store(out + lanes, a * b + a, mask=keep)


@triton.jit
def _dot(a, b, out, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)
    at = rows[:, None] * SIZE + rows[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def _convert(x, out, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(out + lanes, tl.load(x + lanes, mask=lanes < n, other=0.0).to(out.dtype.element_ty), mask=lanes < n)


@triton.jit
def _extremes(x, out, BLOCK: tl.constexpr):
    values = tl.load(x + tl.arange(0, BLOCK))
    tl.store(out, tl.max(values, 0))
    tl.store(out + 1, tl.sum(values.to(tl.float32), 0).to(out.dtype.element_ty))


@triton.jit
def _loop(out, n):
    total = tl.program_id(0) * 0
    for i in range(0, n):
        total += i.to(tl.int32)
    tl.store(out, total)


@triton.jit
def _last_program(out):
    tl.store(out, tl.program_id(0) * 10 + tl.program_id(1))


@triton.jit
def _unmasked(x, out, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(out + lanes, tl.load(x + SHIFT + lanes))


@triton.jit
def _without_other(x, out, n, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    tl.store(out + lanes, tl.load(x + lanes, mask=lanes < n))


def test_bfloat16_arithmetic_rounds_once_per_operation() -> None:
    x, y = torch.randn(2, 100).bfloat16().unbind()
    out = torch.empty(100, dtype=torch.bfloat16)
    _scale_add[(2,)](x, y, out, 100, BLOCK=64)
    assert torch.equal(out, x * y + x)


def test_bfloat16_dot_sums_in_float32() -> None:
    a, b = torch.randn(2, 16, 16).bfloat16().unbind()
    out = torch.empty(16, 16)
    _dot[(1,)](a.contiguous(), b.contiguous(), out, SIZE=16)
    torch.testing.assert_close(out, a.float() @ b.float())


def test_an_element_of_a_product_does_not_depend_on_the_rest() -> None:
    """The same bits at another place of the matrix and in a smaller one, which BLAS does not give on some CPUs."""
    a, b = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)).unbind()
    a[:, 16:], b[16:] = 0, 0
    whole, shifted, small = torch.empty(64, 64), torch.empty(64, 64), torch.empty(16, 16)
    _dot[(1,)](a, b, whole, SIZE=64)
    _dot[(1,)](a.roll(5, 0), b.roll(11, 1), shifted, SIZE=64)
    _dot[(1,)](a[:16, :16].contiguous(), b[:16, :16].contiguous(), small, SIZE=16)
    assert torch.equal(shifted, whole.roll((5, 11), (0, 1)))
    assert torch.equal(small, whole[:16, :16])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_conversions_equal_those_of_torch(dtype: torch.dtype) -> None:
    x = torch.cat([torch.randn(200) * 2.0**e for e in range(-12, 7)])
    out = torch.empty(x.shape, dtype=dtype)
    _convert[(1,)](x, out, x.numel(), BLOCK=4096)
    assert torch.equal(out.float(), x.to(dtype).float())
    back = torch.empty_like(x)
    _convert[(1,)](out, back, x.numel(), BLOCK=4096)
    assert torch.equal(back, out.float())


def test_float8_saturates() -> None:
    out = torch.empty(2, dtype=torch.float8_e4m3fn)
    _convert[(1,)](torch.tensor([1e4, -1e4]), out, 2, BLOCK=2)
    assert out.tolist() == [448.0, -448.0]


def test_reductions_of_bfloat16_and_of_nan() -> None:
    out = torch.empty(2, dtype=torch.bfloat16)
    _extremes[(1,)](torch.tensor([-3.0, -1.5, -2.0, -7.0]).bfloat16(), out, BLOCK=4)
    assert out.tolist() == [-1.5, -13.5]


def test_loop_variables_are_tensors() -> None:
    out = torch.empty(1, dtype=torch.int32)
    _loop[(1,)](out, 5)
    assert out.item() == 10


def test_programs_run_in_the_order_drawn() -> None:
    last = []
    for seed in [None, *range(5)]:
        out = torch.empty(1, dtype=torch.int32)
        with shuffled_programs(seed):
            _last_program[(3, 4)](out)
        last.append(out.item())
    assert last[0] == 23
    assert len(set(last)) > 2


@pytest.mark.parametrize(("shift", "message"), [(1, "1 of 8 lanes"), (-2, "2 of 8 lanes")])
def test_access_outside_of_the_tensors_is_an_error(shift: int, message: str) -> None:
    with pytest.raises(Exception, match=f"load out of bounds: {message}"):
        _unmasked[(1,)](torch.zeros(8), torch.zeros(8), SHIFT=shift, BLOCK=8)
    with pytest.raises(Exception, match="store out of bounds: 4 of 8 lanes"):
        _unmasked[(1,)](torch.zeros(8), torch.zeros(4), SHIFT=0, BLOCK=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_masked_lanes_without_other_hold_poison(dtype: torch.dtype) -> None:
    out = torch.empty(4, dtype=dtype)
    _without_other[(1,)](torch.ones(4, dtype=dtype), out, 3, BLOCK=4)
    assert out[:3].tolist() == [1, 1, 1]
    assert out[3].isnan() if dtype.is_floating_point else out[3] > 2**29
