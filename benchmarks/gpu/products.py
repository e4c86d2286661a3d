"""Products with matrices of 8 bits, as computed by a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from gpu.bench import Bench
from torch_backend.layers.scaled_products import RoundedProduct, float8_works, multiply_float8, multiply_widened

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Product:
    """A product of inputs `dtype` and values `values`. `rounds`: inputs are rounded to the type of values. `alike`:
    a row is the same, bit for bit, for any number of rows up to this."""

    name: str
    multiply: Multiply
    dtype: torch.dtype
    values: torch.dtype
    rounds: bool = False
    alike: int = 0


def products(bench: Bench) -> Iterator[Product]:
    """The device's products, for each input type of 16 bits."""
    for dtype in bench.dtypes:
        if dtype == torch.float32:
            continue
        for values in (torch.int8, torch.float8_e4m3fn):
            yield Product("widened", multiply_widened, dtype, values)
            if bench.kernels.name == "triton":
                yield _kernel(bench, dtype, values)
        if bench.kernels.name == "triton":
            if dtype == torch.bfloat16 and float8_works(bench.device):
                yield _float8(bench, dtype)
            yield _integers(bench, dtype)


def _kernel(bench: Bench, dtype: torch.dtype, values: torch.dtype) -> Product:
    from torch_backend.kernels.scaled_product import scaled_product

    chip = bench.chip
    return Product("kernel", lambda *given: scaled_product(*given, chip), dtype, values, alike=64)


def _float8(bench: Bench, dtype: torch.dtype) -> Product:
    from torch_backend.kernels.operations import TritonRounding

    values = torch.float8_e4m3fn
    product = RoundedProduct(TritonRounding(values, bench.chip.dependent_launches), multiply_float8)
    return Product("scaled_mm", product, dtype, values, rounds=True)


def _integers(bench: Bench, dtype: torch.dtype) -> Product:
    from torch_backend.kernels.integer_product import integer_product
    from torch_backend.kernels.operations import TritonRounding

    chip, many = bench.chip, 2**31
    rounding = TritonRounding(torch.int8, chip.dependent_launches)
    product = RoundedProduct(rounding, lambda *given: integer_product(*given, chip))
    return Product("int8 inputs", product, dtype, torch.int8, rounds=True, alike=many)


def random_matrix(bench: Bench, outputs: int, inputs: int, values: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Values, and scales that differ from row to row."""
    numbers = (40 * bench.normal(outputs, inputs, dtype=torch.float32)).clamp(-127, 127).to(values)
    return numbers, (0.5 + torch.arange(outputs, device=bench.device) % 7) / 1000
