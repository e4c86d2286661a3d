"""Products with matrices of 8 bits against float64, including GPUs' as far as torch computes them on a CPU."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional
from triton.errors import TritonError

from sglang_jax.checkpoint.encoding import ActivationScales
from sglang_jax.checkpoint.quantization import FLOAT8_ROWS, INT8_ROWS
from torch_backend.layers import scaled_products
from torch_backend.layers.scaled_products import float8_product_on, multiply_widened, product_for

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_inputs_are_rounded_by_a_scale_of_their_token(rows: int) -> None:
    """Tokens of any size, each number within float8's rounding: half of an eighth of it. Zeros stay zeros."""
    generator = torch.Generator().manual_seed(rows)
    sizes = 10.0 ** torch.linspace(-30, 30, rows)[:, None]
    x = (torch.randn((rows, 64), generator=generator) * sizes).to(torch.bfloat16)
    x[rows // 2] = 0
    values = (100 * torch.randn((48, 64), generator=generator)).to(torch.float8_e4m3fn)
    scales = torch.rand(48, generator=generator) / 100
    weights = values.double() * scales[:, None].double()
    exact = functional.linear(x.double(), weights)
    magnitude = functional.linear(x.double().abs(), weights.abs())
    # numbers far below a token's maximum are multiples of the smallest step, 2 ** -9 of a scale
    least = 2.0**-10 / 448 * x.double().abs().amax(-1, keepdim=True) * weights.abs().sum(-1)
    found = float8_product_on(CPU)(x, values, scales).double()
    assert ((found - exact).abs() <= magnitude / 16 + least + magnitude / 128).all()
    assert not found[rows // 2].any()
    widened = multiply_widened(x, values, scales).double()
    assert ((widened - exact).abs() <= magnitude / 128).all()


def test_sums_beyond_float16_are_scaled_first() -> None:
    """Values of hundreds and ordinary numbers: a sum of them exceeds 65,504, and the product does not."""
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn((5, 512), generator=generator).abs()).half()
    values = torch.full((16, 512), 448.0).to(torch.float8_e4m3fn)
    scales = torch.rand(16, generator=generator) / 1000
    found = multiply_widened(x, values, scales).double()
    exact = functional.linear(x.double(), values.double() * scales[:, None].double())
    assert exact.max() / scales.max() > torch.finfo(torch.float16).max
    assert ((found - exact).abs() <= exact / 512).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_bias_is_added_before_numbers_are_rounded(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, bias = torch.randn((3, 64), generator=generator).to(dtype), torch.randn(48, generator=generator).to(dtype)
    values = (30 * torch.randn((48, 64), generator=generator)).to(torch.int8)
    scales = torch.rand(48, generator=generator) / 100
    exact = functional.linear(x.double(), values.double() * scales[:, None].double(), bias.double())
    found = multiply_widened(x, values, scales, bias)
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() <= 4 * torch.finfo(dtype).eps).all()


def test_each_matrix_has_the_quickest_product_that_works_and_the_log_names_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scaled_products._log_product.cache_clear()
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(scaled_products, "float8_works", lambda device: True)
    monkeypatch.setattr(scaled_products, "kernel_works", lambda *_: True)
    monkeypatch.setattr(scaled_products, "integers_work", lambda *_: True)
    monkeypatch.setattr(scaled_products, "kernel_product_on", lambda device: _kernel)
    monkeypatch.setattr(scaled_products, "integer_product_on", lambda device: _integers)
    monkeypatch.setattr(scaled_products, "float8_product_on", lambda device: _float8)
    plain_inputs = replace(FLOAT8_ROWS, activations=ActivationScales.NONE)
    rounded = replace(INT8_ROWS, activations=ActivationScales.TOKEN)
    bfloat16 = torch.bfloat16
    cases = [
        (FLOAT8_ROWS, (32, 64), GPU, bfloat16, _float8),
        (FLOAT8_ROWS, (32, 64), CPU, bfloat16, multiply_widened),
        (FLOAT8_ROWS, (32, 72), GPU, bfloat16, _kernel),
        (FLOAT8_ROWS, (32, 64), GPU, torch.float16, _kernel),
        (FLOAT8_ROWS, (32, 64), GPU, torch.float32, multiply_widened),
        (plain_inputs, (32, 64), GPU, bfloat16, _kernel),
        (INT8_ROWS, (32, 64), GPU, bfloat16, _kernel),
        (INT8_ROWS, (32, 64), CPU, bfloat16, multiply_widened),
        (rounded, (32, 72), GPU, bfloat16, _integers),
        (replace(rounded, activations=ActivationScales.TENSOR), (32, 64), GPU, torch.float16, _integers),
        (rounded, (32, 68), GPU, bfloat16, _kernel),
        (rounded, (32, 64), GPU, torch.float32, multiply_widened),
        (rounded, (32, 64), CPU, bfloat16, multiply_widened),
    ]
    for encoding, shape, device, dtype, expected in 2 * cases:
        assert product_for(encoding, shape, device, dtype) is expected
    kernel, widened = "by a kernel that widens them in registers", "after they are widened to {}, in each product"
    assert [record.getMessage() for record in caplog.records] == [
        "Matrices of float8_e4m3fn are multiplied as float8, by torch's scaled_mm; inputs are rounded to float8",
        f"Matrices of float8_e4m3fn are multiplied {widened.format('bfloat16')}",
        f"Matrices of float8_e4m3fn are multiplied {kernel}",
        f"Matrices of float8_e4m3fn are multiplied {widened.format('float32')}",
        f"Matrices of int8 are multiplied {kernel}",
        f"Matrices of int8 are multiplied {widened.format('bfloat16')}",
        "Matrices of int8 are multiplied as int8, by a kernel or torch's _int_mm; inputs are rounded to int8",
        f"Matrices of int8 are multiplied {widened.format('float32')}",
    ]
    monkeypatch.setattr(scaled_products, "integers_work", lambda *_: False)
    assert product_for(rounded, (32, 64), GPU, bfloat16) is _kernel
    monkeypatch.setattr(scaled_products, "kernel_works", lambda *_: False)
    assert product_for(rounded, (32, 64), GPU, bfloat16) is multiply_widened
    scaled_products._log_product.cache_clear()


def _kernel(
    x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    raise AssertionError("chosen, and not called")


_integers, _float8 = object(), object()


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel runs in the interpreter, as if for an H100."""
    import helpers.triton_interpreter  # noqa: F401

    from torch_backend.kernels.chip import Chip

    monkeypatch.setattr(Chip, "of", lambda device: Chip(90, 132))
    scaled_products.kernel_works.cache_clear()
    scaled_products.integers_work.cache_clear()
    scaled_products.float8_works.cache_clear()


@pytest.mark.usefixtures("interpreted")
def test_the_kernel_serves_steps_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows are multiplied with widened values."""
    from torch_backend.kernels import scaled_product

    generator = torch.Generator().manual_seed(0)
    x, values = torch.randn((5, 64), generator=generator).bfloat16(), torch.ones((16, 64), dtype=torch.int8)
    scales, bias = torch.rand(16, generator=generator), torch.randn(16, generator=generator).bfloat16()
    multiply = scaled_products.kernel_product_on(CPU)
    expected = multiply_widened(x, values, scales, bias)
    assert (multiply(x, values, scales, bias) - expected).abs().max() <= 2 * torch.finfo(x.dtype).eps * 64
    monkeypatch.setattr(scaled_product, "max_rows", lambda values, chip: 4)
    assert torch.equal(scaled_products.kernel_product_on(CPU)(x, values, scales, bias), expected)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kind", ["int8", "float8", "integers", "float8 inputs"])
def test_a_product_that_is_wrong_or_fails_is_rejected(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "integers":
        name, what = "integer_product_on", "The product of int8 with int8"
        tried = partial(scaled_products.integers_work, CPU, torch.bfloat16)
    elif kind == "float8 inputs":
        name, what = "float8_product_on", "The product of float8 with float8"
        tried = partial(scaled_products.float8_works, CPU)
    else:
        values = torch.int8 if kind == "int8" else torch.float8_e4m3fn
        name, what = "kernel_product_on", f"Triton's kernel for matrices of {values}"
        tried = partial(scaled_products.kernel_works, CPU, values, torch.bfloat16)
    assert tried()
    assert not caplog.records
    right = vars(scaled_products)[name](CPU)

    def of_next_row(*given: Any) -> torch.Tensor:
        x, stored, scales, bias = given
        return right(x, stored, scales.roll(1), bias) if len(x) == 64 else right(*given)

    def refuse(*_: Any) -> torch.Tensor:
        raise TritonError("no such product")

    for broken in (of_next_row, lambda *given: right(*given).fill_(torch.nan), refuse):
        tried.func.cache_clear()
        monkeypatch.setattr(scaled_products, name, lambda device, broken=broken: broken)
        assert not tried()
    assert [record.getMessage() for record in caplog.records] == [
        *2 * [f"{what} is wrong with torch {torch.__version__}"],
        f"{what} does not run with torch {torch.__version__}: no such product",
    ]
    tried.func.cache_clear()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("capability", "tried"), [((8, 0), True), ((9, 0), True), ((10, 0), False), ((12, 0), False)])
def test_int8_is_not_multiplied_with_int8_on_blackwell(
    capability: tuple[int, int], tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(scaled_products, "_works", lambda *_: True)
    assert scaled_products.integers_work(GPU, torch.bfloat16) is tried
    scaled_products.integers_work.cache_clear()
