"""Two forms of one matrix: one that is quicker for few rows, one for more."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

Product = Callable[[torch.Tensor], torch.Tensor]

ROWS_TRIED = (1, 8, 16, 32, 64)
_BYTES_TRIED = 2**25
"""Of the larger form of equal matrices: more than caches hold, so that they are read from memory as in a step."""

_TURNS = 2
_GAIN = 0.95
"""Of the time of `many`: what `few` takes at most where it is worth having."""


@dataclass(frozen=True, slots=True)
class Form:
    """What is measured once for all products that have it. `gated`: the matrix is gate and up."""

    outputs: int
    inputs: int
    bits: int
    gated: bool


class ByRows:
    """A `Matrix`, or a gated product: `few` of at most `limit` rows, `many` of more."""

    def __init__(self, form: Form, few: Product, many: Product, dtype: torch.dtype) -> None:
        self.form = form
        self.few, self.many = few, many
        self.dtype = dtype
        self.limit = 0

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """The product, by the form for so many rows."""
        return self.few(x) if len(x) <= self.limit else self.many(x)


def set_limits(products: Iterable[ByRows]) -> dict[Form, int]:
    """Measures which form is quicker, for products of each form, and sets their limits: what was found.

    What counts is the processor time of one thread, which other processes change little. With all threads a loaded
    machine would make a call wait for whoever is not running. Several threads share the memory's bandwidth, which
    favours the smaller form more than is measured here.
    """
    by_form: dict[Form, list[ByRows]] = defaultdict(list)
    for product in products:
        by_form[product.form].append(product)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        limits = {form: _limit(alike) for form, alike in by_form.items()}
    finally:
        torch.set_num_threads(threads)
    for form, alike in by_form.items():
        for product in alike:
            product.limit = limits[form]
    return limits


def _limit(alike: list[ByRows]) -> int:
    """The most rows of those tried up to which `few` is quicker by more than a measurement may err."""
    form, dtype = alike[0].form, alike[0].dtype
    tried = alike[: max(1, _BYTES_TRIED // (form.outputs * form.inputs * dtype.itemsize))]
    limit = 0
    for rows in ROWS_TRIED:
        x = torch.ones((rows, form.inputs), dtype=dtype)
        times = [(_seconds(each.few, x), _seconds(each.many, x)) for _ in range(_TURNS) for each in tried]
        few, many = (sorted(of_form)[len(times) // 2] for of_form in zip(*times, strict=True))
        if few > many * _GAIN:
            break
        limit = rows
    return limit


def _seconds(multiply: Product, x: torch.Tensor) -> float:
    """Processor time of one call."""
    start = time.thread_time()
    multiply(x)
    return time.thread_time() - start
