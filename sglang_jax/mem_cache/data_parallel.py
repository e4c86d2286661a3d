"""The caches of several ranks under one scheduler, for data-parallel attention: each rank computes the attention of its
rows, so it has separate pools, a prefix tree and pins. Rows and page tables are numbered through all ranks, pages
from 0 on each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sglang_jax.mem_cache.build import page_tables
from sglang_jax.mem_cache.group import Group
from sglang_jax.mem_cache.kv_cache import KVCache, SharedRows, TokenBytes
from sglang_jax.mem_cache.kv_validation import KVValidation
from sglang_jax.mem_cache.lengths import ONE, Index, RowLengths
from sglang_jax.mem_cache.pins import Kept, Pin
from sglang_jax.mem_cache.radix_tree import Bookmark, Namespace, Probe
from sglang_jax.mem_cache.row_kv import RowKV
from sglang_jax.runner.plan import Int32, PageDeltas, PoolSpec, RunnerSpec, SlotCopies


class DataParallelCache:
    """`KVCache` for rows that are divided among `ranks` ranks, in runs of the same length. `options`: see there. A
    request stays on the rank that gave it a row; its KV serves later requests of that rank."""

    def __init__(
        self, pools: tuple[PoolSpec, ...], max_rows: int, max_context: int, *, ranks: int, **options: Any
    ) -> None:
        self._rows_of_rank = max_rows // ranks
        self.lengths = RowLengths(max_rows)
        self._tables = page_tables(pools, max_rows, max_context)
        shared = SharedRows(self.lengths, self._tables, itertools.count(1))
        self.ranks = tuple(
            KVCache(
                pools,
                max_rows,
                max_context,
                rank=rank,
                shared=shared,
                own_rows=range(rank * self._rows_of_rank, (rank + 1) * self._rows_of_rank),
                **options,
            )
            for rank in range(ranks)
        )
        self.open_rows: dict[int, RowKV] = {}
        self.pins = PinsOfRanks(self.ranks)
        self.trust = _Trust(self)
        self.short_rank = 0
        self._first = self.ranks[0]
        self._prompts: Index = np.zeros(max_rows, np.intp)
        self._within_page: Index = np.array(self._first.page_size - 1, np.intp)

    @property
    def page_size(self) -> int:
        return self._first.page_size

    @property
    def reuse(self) -> bool:
        return self._first.reuse

    @property
    def least_gain(self) -> int:
        return self._first.least_gain

    @property
    def launched_step(self) -> int:
        return self._first.launched_step

    @property
    def finished_step(self) -> int:
        return self._first.finished_step

    @property
    def num_free_rows(self) -> int:
        return len(self.lengths.kv_allocated) - len(self.open_rows)

    @property
    def retired_pages(self) -> int:
        return sum(one.retired_pages for one in self.ranks)

    @property
    def num_evicted(self) -> int:
        return sum(one.num_evicted for one in self.ranks)

    def of_row(self, row: int) -> KVCache:
        return self.ranks[row // self._rows_of_rank]

    def note_short(self, row: int) -> None:
        self.short_rank = self.of_row(row).rank

    def pages_for(self, tokens: int) -> int:
        return self._first.pages_for(tokens)

    def too_small_for(self, tokens: int) -> Group | None:
        return self._first.too_small_for(tokens)

    def probes(self, tokens: bytes, limit: int, namespace: Namespace, bookmark: Bookmark | None = None) -> list[Probe]:
        """`probe` of each rank with a free row."""
        return [one.probe(tokens, limit, namespace, _of_rank(bookmark, one)) for one in self.ranks if one.num_free_rows]

    def peek(self, tokens: bytes, limit: int, namespace: Namespace, bookmark: Bookmark | None = None) -> int:
        """The longest cached prefix on any rank."""
        length = max(one.peek(tokens, limit, namespace, _of_rank(bookmark, one)) for one in self.ranks)
        if bookmark is not None:
            bookmark.length = length
            bookmark.visited = sum(one.visited for one in bookmark.of_ranks.values())
        return length

    def load_of(self, rank: int) -> int:
        """Tokens of KV that the rows of a rank have, or will have after their prompts: a decode step reads so many."""
        mine = slice(rank * self._rows_of_rank, (rank + 1) * self._rows_of_rank)
        return int(np.maximum(self._prompts[mine], self.lengths.kv_allocated[mine]).sum())

    def open_row(
        self, probe: Probe, *, session: bool = False, stops: bool = False, shared_len: int = 0, total: int = 0
    ) -> RowKV:
        cache = self.ranks[probe.rank]
        record = cache.open_row(probe, session=session, stops=stops, shared_len=shared_len, total=total)
        self.open_rows[record.row] = record
        self._prompts[record.row] = total
        return record

    def branch_at(self, record: RowKV, length: int) -> bool:
        return self.of_row(record.row).branch_at(record, length)

    def chunk_end(self, record: RowKV, start: int, end: int, total: int) -> int:
        return self.of_row(record.row).chunk_end(record, start, end, total)

    def extend_rows(self, rows: Index, lengths: Index) -> bool:
        """See `KVCache.extend_rows`. The caller knows what each rank can give: if one is short, all are."""
        granted = {cache.extend_rows(rows[mine], lengths[mine]) for cache, mine in self._divide(rows)}
        assert len(granted) == 1, "a rank was asked for pages that it does not have"
        return granted.pop()

    def extend_decode(
        self, rows: Index, widths: Int32 | None = None, *, evict: bool = True, prompts_wait: bool = False
    ) -> Index | None:
        """See `KVCache.extend_decode`; `short_rank` is then the rank that is short. Ranks have no drafts."""
        assert widths is None, "ranks have no drafts"
        lengths: Index = self.lengths.kv_allocated[rows]
        crossing = np.bitwise_and(lengths, self._within_page) == 0
        needy = rows[crossing]
        if len(needy) and not self._grow(needy, lengths[crossing] // self.page_size):
            return None
        if self._first.shrinks:
            self.lengths.first_query[rows] = lengths
        lengths += ONE
        self.lengths.kv_allocated[rows] = lengths
        return lengths

    def _grow(self, rows: Index, columns: Index) -> bool:
        """All ranks make room before any gives a page."""
        parts = list(self._divide(rows))
        for cache, mine in parts:
            if not cache.make_room(int(np.count_nonzero(mine))):
                self.short_rank = cache.rank
                return False
        for cache, mine in parts:
            cache.give(rows[mine], columns[mine])
        return True

    def most_queries(self, rows: Index) -> Index | None:
        return None

    def shorten(self, rows: Index, widths: Int32, counts: Int32) -> None:
        raise AssertionError("ranks have no drafts")

    def give_up_drafts(self) -> bool:
        return False

    def relieve_sessions(self) -> bool:
        """Of the rank that is short of pages."""
        return self.ranks[self.short_rank].relieve_sessions()

    def let_go(self, rows: Index, *, tight: bool = False) -> None:
        if self._first.shrinks:
            for cache, mine in self._divide(rows):
                cache.let_go(rows[mine], tight=tight)

    def cache_prefix(self, record: RowKV, tokens: TokenBytes, length: int, step: int | None) -> None:
        self.of_row(record.row).cache_prefix(record, tokens, length, step)

    def release_kv_cache(self, record: RowKV, tokens: TokenBytes, *, insert: bool, kept: Kept | None = None) -> None:
        """A session keeps its KV on the rank of its last turn only."""
        cache = self.of_row(record.row)
        if kept is not None:
            self.pins.leave_others(kept.pin, cache)
        cache.release_kv_cache(record, tokens, insert=insert, kept=kept)
        self._prompts[record.row] = 0
        del self.open_rows[record.row]

    def launched(self, step: int) -> None:
        for one in self.ranks:
            one.launched(step)

    def settle(self, step: int) -> None:
        for one in self.ranks:
            one.settle(step)

    def flush(self) -> None:
        for one in self.ranks:
            one.flush()

    def take_deltas(self) -> tuple[PageDeltas, ...]:
        """Pages are those of the row's rank."""
        return tuple([table.take_deltas() for table in self._tables])

    def take_copies(self, rows: Index, step: int) -> tuple[SlotCopies, ...]:
        return ()

    def _divide(self, rows: Index) -> Iterator[tuple[KVCache, Any]]:
        """Each rank that has some of `rows` `[n]`, and which of them, bool `[n]`."""
        ranks = rows // self._rows_of_rank
        for rank in np.unique(ranks).tolist():
            yield self.ranks[rank], ranks == rank


def _of_rank(bookmark: Bookmark | None, cache: KVCache) -> Bookmark | None:
    return None if bookmark is None else bookmark.of_ranks.setdefault(cache.rank, Bookmark())


class PinsOfRanks:
    """See `Pins`. The pin of a session is on the rank of its last turn."""

    def __init__(self, ranks: Sequence[KVCache]) -> None:
        self._ranks = ranks

    @property
    def held(self) -> dict[Pin, None]:
        return {pin: None for one in self._ranks for pin in one.pins.held}

    @property
    def num_let_go(self) -> int:
        return sum(one.pins.num_let_go for one in self._ranks)

    @property
    def share(self) -> float:
        return self._ranks[0].pins.share

    @share.setter
    def share(self, share: float) -> None:
        for one in self._ranks:
            one.pins.share = share

    def shorten(self, pin: Pin, length: int) -> None:
        for one in self._ranks:
            if pin in one.pins.held:
                one.pins.shorten(pin, length)

    def let_go(self, pin: Pin) -> None:
        for one in self._ranks:
            if pin in one.pins.held:
                one.pins.let_go(pin)

    def keep_within_share(self) -> None:
        for one in self._ranks:
            one.pins.keep_within_share()

    def leave_others(self, pin: Pin, cache: KVCache) -> None:
        """Lets a pin go that is on another rank than that of `cache`."""
        if pin not in cache.pins.held:
            self.let_go(pin)


class _Trust:
    """See `KVValidation`."""

    def __init__(self, cache: DataParallelCache) -> None:
        self._cache = cache

    def prove(self, record: RowKV, step: int) -> bool:
        return self._cache.of_row(record.row).trust.prove(record, step)

    def distrust(self, record: RowKV) -> None:
        self._cache.of_row(record.row).trust.distrust(record)

    @staticmethod
    def read_bad_kv(record: RowKV) -> bool:
        return KVValidation.read_bad_kv(record)


AnyCache = KVCache | DataParallelCache


def cache_of(spec: RunnerSpec, **options: Any) -> AnyCache:
    """The cache for a runner's pools and rows; `options`: see `KVCache`. Raises `ValueError` as
    `RunnerSpec.check_ranks`."""
    sizes = spec.pools, spec.max_rows, spec.max_context
    if spec.dp_ranks == 1:
        return KVCache(*sizes, **options)
    spec.check_ranks()
    del options["drafts"], options["state_interval"]
    return DataParallelCache(*sizes, ranks=spec.dp_ranks, **options)
