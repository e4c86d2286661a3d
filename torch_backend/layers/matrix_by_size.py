"""Chooses between two forms of one matrix: one that is faster for few rows, one for more."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from sglang_jax.checkpoint.encoding import Encoding

Product = Callable[[torch.Tensor], torch.Tensor]

ROWS_TRIED = (1, 8, 16, 32, 64)
_BYTES_TRIED = 2**25
"""Bytes of equal matrices to measure: more than caches hold, so that they are read from memory as in a step."""

_TURNS = 2
_GAIN = 0.95
"""Maximum time of `small_batch`, as a share of that of `large_batch`, at which it is used."""


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """The shape of products that are measured together. `gated`: the matrix is gate and up."""

    outputs: int
    inputs: int
    encoding: Encoding
    gated: bool


class MatrixBySize:
    """A `Matrix`, or a gated product: `small_batch` for at most `limit` rows, `large_batch` for more."""

    def __init__(self, form: MatrixShape, small_batch: Product, large_batch: Product, dtype: torch.dtype) -> None:
        self.form = form
        self.small_batch, self.large_batch = small_batch, large_batch
        self.dtype = dtype
        self.limit = 0

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self.small_batch(x) if len(x) <= self.limit else self.large_batch(x)


def set_limits(products: Iterable[MatrixBySize]) -> dict[MatrixShape, int]:
    """Measures which form is faster for each shape, sets the limits of the products, and returns them. The processor
    time of one thread is measured, on which other processes have little influence; with all threads on a loaded
    machine, a call would wait for threads that are not running. Several threads share the memory bandwidth, which
    favours the smaller form more than is measured here."""
    by_form: dict[MatrixShape, list[MatrixBySize]] = defaultdict(list)
    for product in products:
        by_form[product.form].append(product)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        limits = {form: _limit(group) for form, group in by_form.items()}
    finally:
        torch.set_num_threads(threads)
    for form, group in by_form.items():
        for product in group:
            product.limit = limits[form]
    return limits


def _limit(group: list[MatrixBySize]) -> int:
    """The largest number of rows tried up to which `small_batch` is faster by more than the error of measurement."""
    form, dtype = group[0].form, group[0].dtype
    tried = group[: max(1, _BYTES_TRIED // (form.outputs * form.inputs * dtype.itemsize))]
    limit = 0
    for rows in ROWS_TRIED:
        x = torch.ones((rows, form.inputs), dtype=dtype)
        times = [
            (_seconds(each.small_batch, x), _seconds(each.large_batch, x)) for _ in range(_TURNS) for each in tried
        ]
        small_batch, large_batch = (sorted(of_form)[len(times) // 2] for of_form in zip(*times, strict=True))
        if small_batch > large_batch * _GAIN:
            break
        limit = rows
    return limit


def _seconds(multiply: Product, x: torch.Tensor) -> float:
    start = time.thread_time()
    multiply(x)
    return time.thread_time() - start
