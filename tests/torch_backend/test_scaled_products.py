"""Products with matrices of 8 bits against float64, also those of GPUs, as far as torch computes them on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from sglang_jax.checkpoint.encoding import ActivationScales
from sglang_jax.checkpoint.quantization import FLOAT8_ROWS, INT8_ROWS
from torch_backend.layers import scaled_products
from torch_backend.layers.scaled_products import float8_works, multiply_float8, multiply_widened, product_for

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_inputs_are_rounded_by_a_scale_of_their_token(rows: int) -> None:
    """Tokens of any size, none of which is off by more than float8's rounding: half of an eighth of each number. One of
    zeros stays so."""
    generator = torch.Generator().manual_seed(rows)
    sizes = 10.0 ** torch.linspace(-30, 30, rows)[:, None]
    x = (torch.randn((rows, 64), generator=generator) * sizes).to(torch.bfloat16)
    x[rows // 2] = 0
    values = (100 * torch.randn((48, 64), generator=generator)).to(torch.float8_e4m3fn)
    scales = torch.rand(48, generator=generator) / 100
    weights = values.double() * scales[:, None].double()
    exact = functional.linear(x.double(), weights)
    magnitude = functional.linear(x.double().abs(), weights.abs())
    # Numbers far below a token's largest are multiples of the least: 2 ** -9 of a scale.
    least = 2.0**-10 / 448 * x.double().abs().amax(-1, keepdim=True) * weights.abs().sum(-1)
    found = multiply_float8(x, values, scales).double()
    assert ((found - exact).abs() <= magnitude / 16 + least + magnitude / 128).all()
    assert not found[rows // 2].any()
    widened = multiply_widened(x, values, scales).double()
    assert ((widened - exact).abs() <= magnitude / 128).all()


def test_sums_that_float16_has_no_room_for_are_scaled_first() -> None:
    """Values of hundreds and ordinary numbers: a sum of them passes 65,504, and the product does not."""
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn((5, 512), generator=generator).abs()).half()
    values = torch.full((16, 512), 448.0).to(torch.float8_e4m3fn)
    scales = torch.rand(16, generator=generator) / 1000
    found = multiply_widened(x, values, scales).double()
    exact = functional.linear(x.double(), values.double() * scales[:, None].double())
    assert exact.max() / scales.max() > torch.finfo(torch.float16).max
    assert ((found - exact).abs() <= exact / 512).all()


def test_float8_is_multiplied_where_the_checkpoint_the_shape_and_the_gpu_allow_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scaled_products, "float8_works", lambda device: True)
    plain_inputs = replace(FLOAT8_ROWS, activations=ActivationScales.NONE)
    cases = [
        (FLOAT8_ROWS, (32, 64), GPU, torch.bfloat16, multiply_float8),
        (FLOAT8_ROWS, (32, 64), CPU, torch.bfloat16, multiply_widened),
        (FLOAT8_ROWS, (32, 72), GPU, torch.bfloat16, multiply_widened),
        (FLOAT8_ROWS, (32, 64), GPU, torch.float16, multiply_widened),
        (plain_inputs, (32, 64), GPU, torch.bfloat16, multiply_widened),
        (INT8_ROWS, (32, 64), GPU, torch.bfloat16, multiply_widened),
    ]
    for encoding, shape, device, dtype, expected in cases:
        assert product_for(encoding, shape, device, dtype) is expected


def test_what_is_wrong_or_cannot_be_multiplied_is_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    assert float8_works(CPU)
    for broken in (lambda *_: 1.1 * multiply_float8(*_), lambda *_: multiply_float8(*_).fill_(torch.nan), _refuse):
        float8_works.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(scaled_products, "multiply_float8", broken)
            assert not float8_works(CPU)
    float8_works.cache_clear()


def _refuse(*_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such product")
