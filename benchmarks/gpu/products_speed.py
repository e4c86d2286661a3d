"""Products with matrices of 8 bits next to those of bfloat16, and as a share of the time to read them."""

from __future__ import annotations

from collections.abc import Iterator

from torch.nn import functional

from gpu.bench import Bench, Row, Table, share
from gpu.checks import short
from gpu.products import products, random_matrix

_MATRICES = ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336))
"""Of a layer of Llama 3 8B."""


def run(bench: Bench) -> Iterator[Table]:
    """A table for each number of rows."""
    for tokens in (2,) if bench.small else (1, 16, 64, 256, 1024, 4096):
        rate = bench.rates.copy_bytes_per_second / 1e9
        title = f"products of {tokens} rows ({bench.kernels.name}), copy {rate:.4g} GB/s"
        yield Table(title, list(_rows(bench, tokens)))


def _rows(bench: Bench, tokens: int) -> Iterator[Row]:
    for outputs, inputs in ((96, 64),) if bench.small else _MATRICES:
        x = bench.normal(tokens, inputs)
        plain = bench.normal(outputs, inputs)
        plain_seconds = bench.stopwatch.seconds(lambda x=x, plain=plain: functional.linear(x, plain))
        for product in products(bench):
            if product.dtype != bench.dtype:
                continue
            values, scales = random_matrix(bench, outputs, inputs, product.values)
            seconds = bench.stopwatch.seconds(
                lambda x=x, values=values, scales=scales, product=product: product.multiply(x, values, scales, None)
            )
            yield {
                "matrix": f"{outputs} x {inputs}",
                "values": short(product.values),
                "product": product.name,
                "us": seconds * 1e6,
                f"{short(bench.dtype)} us": plain_seconds * 1e6,
                "speed-up": round(plain_seconds / seconds, 2),
                "share of copy": share(values.nbytes / seconds, bench.rates.copy_bytes_per_second),
            }
