"""Products whose results do not depend on the number of rows.

A library chooses the order of its sums by the shape of a product, so a token's result may depend on how many others are
multiplied with it. On a CPU, a product here has one of at most two numbers of rows, whatever the step has, and both are
compared before they are used. On a GPU, one kernel with one tile multiplies any number of rows.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable

import torch

from torch_backend.layers.matrix import PlainMatrix, ScaledMatrix
from torch_backend.layers.matrix_by_size import Product
from torch_backend.layers.row_tiles import RowTiles, sizes_of_tiles
from torch_backend.layers.scaled_products import fixed_plain_product, fixed_product_for

logger = logging.getLogger(__name__)


class FixedRows:
    """Chooses products for the matrices of a model on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sizes: dict[Hashable, tuple[int, ...]] = {}

    def use(self, matrix: PlainMatrix | ScaledMatrix) -> None:
        """On a GPU, gives a matrix a product with one tile."""
        if self.device.type == "cpu":
            return
        if isinstance(matrix, PlainMatrix):
            matrix.product = fixed_plain_product(self.device)
        else:
            matrix.product = fixed_product_for(matrix.encoding, matrix.shape, self.device, matrix.dtype)

    def in_tiles(self, product: Product, inputs: int, dtype: torch.dtype, kind: Hashable) -> Product:
        """On a CPU, the product in tiles; those of one `kind` have the same sizes. `inputs`, `dtype`: of its rows."""
        if self.device.type != "cpu":
            return product
        if kind not in self._sizes:
            self._sizes[kind] = sizes_of_tiles(product, inputs, dtype)
        return RowTiles(product, self._sizes[kind])

    def log(self) -> None:
        """Logs how many kinds of products have tiles of which sizes."""
        if self._sizes:
            found = Counter(self._sizes.values())
            named = ", ".join(f"{count} of {' and '.join(map(str, sizes))}" for sizes, count in sorted(found.items()))
            logger.info("Products have a fixed number of rows, for results that do not depend on the batch: %s", named)
