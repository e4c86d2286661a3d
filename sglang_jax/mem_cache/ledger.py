"""A record of the owner of each page, for debugging. Every page has exactly one owner; each move names both sides."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int32]
Owners = NDArray[np.int64]

_KIND_BITS = 3


class OwnerKind(IntEnum):
    FREE = 0
    PAD = 1
    REQUEST = 2
    NODE = 3
    RETIRED = 4


_NODE = int(OwnerKind.NODE)
_REQUEST = int(OwnerKind.REQUEST)
FREE = int(OwnerKind.FREE)
PAD = int(OwnerKind.PAD)
RETIRED = int(OwnerKind.RETIRED)
"""Of a page that its owner gave up, but that a step in flight may still touch."""


class OwnershipError(RuntimeError):
    """A page was moved by another than its owner: a defect of the engine."""


def request_owner(row: int) -> int:
    return (row << _KIND_BITS) | _REQUEST


def request_owners(rows: NDArray[np.intp]) -> Owners:
    return (rows << _KIND_BITS) | _REQUEST


def node_owner(node_id: int) -> int:
    return (node_id << _KIND_BITS) | _NODE


def describe_owner(code: int) -> str:
    kind, number = OwnerKind(code & ((1 << _KIND_BITS) - 1)), code >> _KIND_BITS
    match kind:
        case OwnerKind.REQUEST:
            return f"the request in row {number}"
        case OwnerKind.NODE:
            return f"tree node {number}"
        case OwnerKind.FREE:
            return "the free stack"
        case OwnerKind.PAD:
            return "the padding"
        case OwnerKind.RETIRED:
            return "a step in flight"


class PageLedger:
    def __init__(self, num_pages: int) -> None:
        self.owners: Owners = np.full(num_pages, FREE, np.int64)
        self.owners[0] = PAD

    def move(self, pages: Pages, source: int | Owners, target: int | Owners) -> None:
        """Records that `pages` `[pages]` move from `source` to `target` (one code, or one per page). Raises
        `OwnershipError`."""
        wrong = np.nonzero(self.owners[pages] != source)[0]
        if len(wrong):
            first = int(wrong[0])
            page = int(pages[first])
            claimed = source if isinstance(source, int) else int(source[first])
            raise OwnershipError(
                f"page {page} belongs to {describe_owner(int(self.owners[page]))}, "
                f"but {describe_owner(claimed)} tried to give it away"
            )
        if len(np.unique(pages)) != len(pages):
            raise OwnershipError(f"pages given away twice in one call: {sorted(pages.tolist())}")
        self.owners[pages] = target

    def count(self, kind: OwnerKind) -> int:
        return int(np.count_nonzero((self.owners & ((1 << _KIND_BITS) - 1)) == int(kind)))
