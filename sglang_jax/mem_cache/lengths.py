"""How far each row's KV goes, as arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class RowLengths:
    """The lengths of every row's ownership record, as arrays `[rows]`, in tokens.

    `cache_protected_len <= kv_committed_len <= kv_allocated_len`; the first is page aligned. Committed: the KV of
    tokens that are the request's for certain. Allocated: what launched steps may write, drafts among it.

    `kv_planned`: the length once all launched steps have run; where one in flight has drafts, the most that it may be.
    At most `kv_allocated`, and less than it where drafts were wrong: without `drafts` they are one array.
    `first_query`: the first position that the row's last launched step may compute.
    """

    def __init__(self, rows: int, drafts: bool = False) -> None:
        self.cache_protected: NDArray[np.int32] = np.zeros(rows, np.int32)
        self.kv_committed: NDArray[np.int32] = np.zeros(rows, np.int32)
        self.kv_allocated: NDArray[np.int32] = np.zeros(rows, np.int32)
        self.kv_planned: NDArray[np.int32] = np.zeros(rows, np.int32) if drafts else self.kv_allocated
        self.first_query: NDArray[np.int32] = np.zeros(rows, np.int32)

    def start(self, row: int, length: int) -> None:
        """A row begins with a cached prefix of `length` tokens."""
        for column in (self.cache_protected, self.kv_committed, self.kv_allocated, self.kv_planned):
            column[row] = length
        self.first_query[row] = length
