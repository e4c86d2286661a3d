"""Products with matrices of 8 bits against float64, and whether other rows change a bit of a row's result."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from gpu.bench import Bench, Row, Table
from gpu.checks import Comparison, exact, short
from gpu.products import Product, products, random_matrix


def run(bench: Bench) -> Iterator[Table]:
    """One table."""
    rows: list[Row] = []
    for product in products(bench):
        for outputs, inputs in ((80, 208),) if bench.small else ((4096, 4096), (6144, 4096), (4096, 14_336), (80, 208)):
            for tokens in (3, 66) if bench.small else (1, 16, 17, 33, 64, 65, 257, 1000):
                rows += _product(bench, product, outputs, inputs, tokens)
    yield Table(f"products with 8 bits ({bench.kernels.name}) against float64", rows)


def _product(bench: Bench, product: Product, outputs: int, inputs: int, tokens: int) -> Iterator[Row]:
    values, scales = random_matrix(bench, outputs, inputs, product.values)
    x, bias = bench.normal(tokens, inputs, dtype=product.dtype), bench.normal(outputs, dtype=product.dtype)
    found = product.multiply(x, values, scales, bias)
    meant = _rounded(x, product.values) if product.rounds else x.double()
    expected = functional.linear(meant, values.double() * scales[:, None].double(), bias.double())
    what = f"{product.name}: {short(product.values)}"
    case = f"{short(product.dtype)} {tokens} x {inputs} x {outputs}"
    yield Comparison.of(found, expected, product.dtype).row(what, case)
    if 1 < tokens <= product.alike:
        alone = product.multiply(x[1:2].contiguous(), values, scales, bias)
        yield exact(f"{what}: a row by itself", case, alone, found[1:2])


def _rounded(x: torch.Tensor, values: torch.dtype) -> torch.Tensor:
    """The inputs after rounding."""
    largest = 127.0 if values == torch.int8 else torch.finfo(values).max
    scales = x.float().abs().amax(-1, keepdim=True) / largest
    quotients = x.float() / scales
    rounded = quotients.round() if values == torch.int8 else quotients.clamp(-largest, largest).to(values)
    return rounded.double() * scales.double()
