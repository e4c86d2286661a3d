"""Two forms of one matrix: one that is quicker for few rows, one for more."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

Product = Callable[[torch.Tensor], torch.Tensor]

ROWS_TRIED = (1, 4, 8, 16, 32, 64)
_BYTES_TRIED = 2**26
"""Of the larger form of equal matrices: more than caches hold, so that they are read from memory as in a step."""

_TURNS = 3
_MARGIN = 1.05


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

    Belongs on the thread that runs the model, while nothing else does.
    """
    by_form: dict[Form, list[ByRows]] = defaultdict(list)
    for product in products:
        by_form[product.form].append(product)
    limits = {form: _limit(alike) for form, alike in by_form.items()}
    for form, alike in by_form.items():
        for product in alike:
            product.limit = limits[form]
    return limits


def _limit(alike: list[ByRows]) -> int:
    """The most rows of those tried up to which `many` is nowhere quicker by more than a measurement may err."""
    form, dtype = alike[0].form, alike[0].dtype
    tried = alike[: max(1, _BYTES_TRIED // (form.outputs * form.inputs * dtype.itemsize))]
    limit = 0
    for rows in ROWS_TRIED:
        x = torch.ones((rows, form.inputs), dtype=dtype)
        pairs = [
            (_seconds(x, [each.few for each in tried]), _seconds(x, [each.many for each in tried]))
            for _ in range(_TURNS)
        ]
        few, many = (min(times) for times in zip(*pairs, strict=True))
        if few > many * _MARGIN:
            break
        limit = rows
    return limit


def _seconds(x: torch.Tensor, products: list[Product]) -> float:
    start = time.perf_counter()
    for multiply in products:
        multiply(x)
    return time.perf_counter() - start
