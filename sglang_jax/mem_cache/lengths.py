"""How far each row's KV goes, as arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Index = NDArray[np.intp]
"""Numbers of rows, columns and tokens on the host: arrays that are indexed by numbers of another type convert them at
each use, which costs more than the use."""

ONE: Index = np.array(1, np.intp)
"""To be added to arrays: a Python number is converted at each use as well."""


class RowLengths:
    """The lengths of every row's ownership record, as arrays `[rows]`, in tokens.

    `cache_protected_len <= kv_committed_len <= kv_allocated_len`; the first is page aligned. Committed: the KV of
    tokens that are the request's for certain. Allocated: what launched steps may write, drafts among it.

    `kv_planned`: the length once all launched steps have run; where one in flight has drafts, the most that it may be.
    At most `kv_allocated`, and less than it where drafts were wrong: without `drafts` they are one array.
    `in_question`: how many tokens of that are drafts of steps in flight, any of which may be wrong.
    `first_query`: the first position that the row's last launched step computes; if drafts of the step before turn out
    to be wrong it is `kv_committed`, once that step has finished.
    """

    def __init__(self, rows: int, drafts: bool = False) -> None:
        self._all: Index = np.zeros((6, rows), np.intp)
        self.cache_protected, self.kv_committed, self.kv_allocated, planned, *others = self._all
        self.first_query, self.in_question = others
        self.kv_planned: Index = planned if drafts else self.kv_allocated

    def start(self, row: int, length: int) -> None:
        """A row begins with a cached prefix of `length` tokens."""
        self._all[:, row] = length
        self.in_question[row] = 0
