"""The lengths of each row's KV, as arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.intp]
"""The dtype of rows, columns and tokens on the host: numpy converts another dtype at each use, which costs more than
the use."""

ONE: Index = np.array(1, np.intp)
"""For additions to arrays: numpy converts a Python number at each use, too."""


class RowLengths:
    """The lengths of every row, as arrays `[rows]`, in tokens. `cache_protected <= kv_committed <= kv_allocated`; the
    first is page aligned.

    - `cache_protected`: tokens whose pages the tree owns. `kv_committed`: tokens that certainly belong to the request.
      `kv_allocated`: tokens that launched steps may write, drafts included.
    - `kv_planned`: the maximum length after all launched steps. It is below `kv_allocated` after rejected drafts;
      without `drafts`, they are one array. `drafts_in_flight`: how many of these tokens are drafts of steps in flight.
    - `first_query`: the first position that the row's last launched step computes. If drafts of the previous step are
      rejected, it is `kv_committed` after that step.
    """

    def __init__(self, rows: int, drafts: bool = False) -> None:
        self._all: Index = np.zeros((6, rows), np.intp)
        self.cache_protected, self.kv_committed, self.kv_allocated, planned, *others = self._all
        self.first_query, self.drafts_in_flight = others
        self.kv_planned: Index = planned if drafts else self.kv_allocated

    def start(self, row: int, length: int) -> None:
        self._all[:, row] = length
        self.drafts_in_flight[row] = 0
