"""Products of a fixed number of rows: a library chooses the order of its sums by the shape of a product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

TILE_ROWS = (16, 128)
"""Rows of a tile, for few rows and for many. Measured on 2 cores of an EPYC with bfloat16 units: a layer of
SmolLM2-135M takes 1.9 times as long for 16 rows as for one, and in tiles of 128 rows as long as a whole prompt."""

_ROLLS = (1, 5)
"""By how many places rows are moved, to find out whether a result depends on a row's place in its tile."""


@dataclass(frozen=True, slots=True)
class RowTiles:
    """A product of tiles of `sizes` rows, ascending; the last tile is filled up with zeros."""

    product: Callable[[torch.Tensor], torch.Tensor]
    sizes: tuple[int, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x [T, ...]` → `[T, ...]`."""
        rows, smallest = len(x), self.sizes[0]
        if rows == smallest:
            return self.product(x)
        padded = functional.pad(x, (*(0, 0) * (x.dim() - 1), 0, -rows % smallest))
        found, first = [], 0
        while first < len(padded):
            size = max(size for size in self.sizes if size == smallest or size <= len(padded) - first)
            found.append(self.product(padded[first : first + size]))
            first += size
        return torch.cat(found)[:rows] if found else self.product(x)


def sizes_of_tiles(product: Callable[[torch.Tensor], torch.Tensor], inputs: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Sizes of tiles in which a row's result depends neither on its place nor on the size: both `TILE_ROWS` if they
    give the same bits, else the smaller one, else single rows. Tried with random rows."""
    few, many = TILE_ROWS
    x = torch.randn((many, inputs), generator=torch.Generator().manual_seed(0)).to(dtype)

    def of(size: int, roll: int = 0) -> torch.Tensor:
        return RowTiles(product, (size,))(x.roll(roll, 0)).roll(-roll, 0)

    small = of(few)
    if not all(torch.equal(small, of(few, roll)) for roll in _ROLLS):
        return (1,)
    if all(torch.equal(small, of(many, roll)) for roll in (0, *_ROLLS)):
        return TILE_ROWS
    return (few,)
