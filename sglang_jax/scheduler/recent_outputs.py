"""An index of the recent outputs of each namespace. If the last tokens of a request occur in another's output, it gets
the text from there on as a hint (`HintUpdate`), which the device searches for drafts like the request's own text."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from sglang_jax.mem_cache.lengths import Index
from sglang_jax.mem_cache.radix_tree import Namespace
from sglang_jax.runner.plan import HINT_TOKENS, HintUpdate, Int32
from sglang_jax.scheduler.rows import Rows

KEY_TOKENS = 4
"""Length of the key by which a place is found, in tokens."""

MAX_TOKENS = 1 << 15
"""Maximum tokens kept per namespace, the latest ones."""

MAX_NAMESPACES = 32
"""Maximum namespaces, the most recently used: 32 of them take 20 MB."""

_SLOTS = 2 * MAX_TOKENS
_END = -1
"""Separates outputs; not a token, so no match and no hint reaches from one output into another."""

_AHEAD = 16
"""Minimum tokens of a hint that its row has not passed; with fewer, a hint that reaches further replaces it."""

_NOWHERE = -1


class OutputsOfNamespace:
    """A ring of the tokens of one namespace's recent outputs, and for each hash of `KEY_TOKENS` tokens the latest place
    with it. A place grows with each token; `ring[place % MAX_TOKENS]` is its token, and is compared with the key, so
    places with the same hash only hide each other. Adding a token writes to two arrays; a search reads a few tokens,
    however many are kept."""

    def __init__(self, begin: int = 0) -> None:
        self._ring: Int32 = np.full(MAX_TOKENS, _END, np.int32)
        self._places: NDArray[np.int64] = np.full(_SLOTS, _NOWHERE, np.int64)
        self._begin = begin
        self.end = begin

    def add(self, tokens: Int32) -> None:
        """Adds an output `[n]`, with a few tokens before it."""
        tokens = np.append(tokens[-(MAX_TOKENS - 1) :], np.int32(_END))
        places = self.end + np.arange(len(tokens))
        self._ring[places % MAX_TOKENS] = tokens
        self.end += len(tokens)
        if len(tokens) > KEY_TOKENS:
            keys = np.lib.stride_tricks.sliding_window_view(tokens[:-1], KEY_TOKENS)
            self._places[_hashes(keys)] = places[KEY_TOKENS - 1 : -1]  # the last of equal hashes wins

    def find(self, keys: Int32) -> NDArray[np.int64]:
        """The latest place of the last token of each of `keys` `[n, KEY_TOKENS]`; -1 for a key that does not occur."""
        places = self._places[_hashes(keys)]
        kept = places - (KEY_TOKENS - 1) >= max(self.end - MAX_TOKENS, self._begin)
        same = (self._ring[(places[:, None] + _BACK) % MAX_TOKENS] == keys).all(axis=1)
        return np.where(kept & same, places, _NOWHERE)

    def hint(self, place: int) -> Int32:
        """The text from the key at a place on, at most `HINT_TOKENS` tokens."""
        first = place - (KEY_TOKENS - 1)
        tokens = self._ring[np.arange(first, min(first + HINT_TOKENS, self.end)) % MAX_TOKENS]
        ends = np.flatnonzero(tokens == _END)
        return tokens[: ends[0]] if len(ends) else tokens


_BACK = np.arange(1 - KEY_TOKENS, 1)
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64)
_SHIFT = np.uint64(64 - _SLOTS.bit_length() + 1)


def _hashes(keys: Int32) -> NDArray[np.intp]:
    """Slots of `keys` `[n, KEY_TOKENS]` (multiply-shift hashing, Dietzfelbinger 1996)."""
    sums: NDArray[np.uint64] = (keys.astype(np.uint64) * _FACTORS).sum(axis=1, dtype=np.uint64)
    return (sums >> _SHIFT).astype(np.intp)


class RecentOutputs:
    """The recent outputs of all namespaces, searched only for rows of the same namespace, and the rows' hints."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._of: OrderedDict[Namespace, OutputsOfNamespace] = OrderedDict()
        self._begin = 0
        # The part of the ring that each row's hint covers.
        self._covered_from: NDArray[np.int64] = np.full(len(rows.requests), _NOWHERE, np.int64)
        self._covered_to = self._covered_from.copy()
        self._pending: dict[int, HintUpdate] = {}

    def __len__(self) -> int:
        return len(self._of)

    def add(self, namespace: Namespace, tokens: Int32) -> None:
        found = self._of.get(namespace)
        if found is None:
            if len(self._of) == MAX_NAMESPACES:
                _, oldest = self._of.popitem(last=False)
                self._begin = max(self._begin, oldest.end)
            found = self._of[namespace] = OutputsOfNamespace(self._begin)
        self._of.move_to_end(namespace)
        found.add(tokens)

    def look(self, rows: Index) -> Index:
        """Searches for the last tokens of `rows` that the host knows. Returns the rows that get a hint."""
        if not self._of:
            return rows[:0]
        hinted: list[int] = []
        for namespace, own in self._by_namespace(rows).items():
            outputs = self._of[namespace]
            self._of.move_to_end(namespace)
            ends = self._rows.num_tokens[own]
            keys = self._rows.tokens[own[:, None], ends[:, None] + (_BACK - 1)]
            places = outputs.find(keys)
            here = (self._covered_from[own] <= places) & (places + _AHEAD <= self._covered_to[own])
            for row, place in zip(*(part[(places >= 0) & ~here].tolist() for part in (own, places)), strict=True):
                hint = outputs.hint(place)
                end = place - (KEY_TOKENS - 1) + len(hint)
                if len(hint) > KEY_TOKENS and end != self._covered_to[row]:
                    self._pending[row] = HintUpdate(row, hint)
                    self._covered_from[row], self._covered_to[row] = place, end
                    hinted.append(row)
        return np.array(hinted, np.intp)

    def _by_namespace(self, rows: Index) -> dict[Namespace, Index]:
        """Those of `rows` that are long enough and whose namespace has outputs."""
        found: dict[Namespace, list[int]] = {}
        for row in rows[self._rows.num_tokens[rows] >= KEY_TOKENS].tolist():
            namespace = self._rows.at(row).namespace
            if namespace in self._of:
                found.setdefault(namespace, []).append(row)
        return {namespace: np.array(own, np.intp) for namespace, own in found.items()}

    def take(self) -> tuple[HintUpdate, ...]:
        """Removes and returns the hints that the runner does not have yet."""
        if not self._pending:
            return ()
        pending, self._pending = tuple(self._pending.values()), {}
        return pending

    def reset_rows(self, rows: Index) -> None:
        """Forgets the hints of these rows: they have other requests now."""
        self._covered_from[rows] = self._covered_to[rows] = _NOWHERE
        for row in rows.tolist():
            self._pending.pop(row, None)

    def clear(self) -> None:
        self._of.clear()
