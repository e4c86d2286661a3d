"""The KV life cycle of running requests: take a row, grow it, share it through the tree, release it. The tree owns a
row's tokens `[0, cache_protected_len)`; the request owns from there to `ceil_page(kv_allocated_len)`. Each group of
layers holds its own pages of them, and a row grows in all groups or in none."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sglang_jax.config import EvictionPolicy
from sglang_jax.mem_cache.build import build_groups, page_tables
from sglang_jax.mem_cache.group import Group
from sglang_jax.mem_cache.kv_validation import KVValidation
from sglang_jax.mem_cache.ledger import request_owner
from sglang_jax.mem_cache.lengths import ONE, Index, RowLengths
from sglang_jax.mem_cache.page_table import PageTable
from sglang_jax.mem_cache.pins import Kept, Pins
from sglang_jax.mem_cache.radix_tree import TOKEN_BYTES, Bookmark, Namespace, Probe, RadixTree
from sglang_jax.mem_cache.row_kv import RowKV
from sglang_jax.runner.plan import Int32, PageDeltas, PoolSpec, SlotCopies

TokenBytes = bytes | memoryview
"""Token ids as the bytes of int32."""

_UNBOUNDED = 2**31 - 1
"""Number of pages if no group grows."""

_MAX_BETWEEN = 8
"""Maximum steps in which some row takes a page between two in which rows give up pages behind their windows."""

_CLIENT_LAG = 32
"""Maximum tokens that a session's turn may be ahead of a client that looks for stop strings: while pages are not short,
windows that far back are kept."""

_LONG_RUN = 8
"""From this many pages per row, rows get their pages as runs, one row at a time."""


@dataclass(frozen=True, slots=True)
class SharedRows:
    """The rows of which several caches have some each, with the same arrays. `serials`: numbers rows in the order in
    which requests get them."""

    lengths: RowLengths
    tables: tuple[PageTable, ...]
    serials: Iterator[int]


class KVCache:
    """Groups of pages, the prefix tree over them, and the rows that use them.

    - `pools`: one per group of layers, with the same page size; `max_rows`, `max_context`: of the page tables.
    - `shared`, `own_rows`: of a cache of one of several ranks (see `DataParallelCache`), and `rank`.
    - `step_tokens`: maximum tokens of a row in one step; `max_context` by default.
    - `drafts`: whether steps may write tokens that are rejected; `state_interval`: see `StateGroup`.
    - `reuse`: False turns the prefix cache off. `debug`: keeps a ledger of owners.
    """

    def __init__(
        self,
        pools: tuple[PoolSpec, ...],
        max_rows: int,
        max_context: int,
        *,
        step_tokens: int | None = None,
        drafts: bool = False,
        state_interval: int = 0,
        reuse: bool = True,
        eviction: EvictionPolicy = EvictionPolicy.LRU,
        debug: bool = False,
        rank: int = 0,
        shared: SharedRows | None = None,
        own_rows: range | None = None,
    ) -> None:
        sizes = {pool.page_size for pool in pools}
        if len(sizes) != 1:
            raise ValueError(f"pages of all groups must hold the same number of tokens, got {sorted(sizes)}")
        (self.page_size,) = sizes
        self.reuse = reuse
        shared = shared or SharedRows(
            RowLengths(max_rows, drafts), page_tables(pools, max_rows, max_context), itertools.count(1)
        )
        own_rows = own_rows or range(max_rows)
        self.rank = rank
        self.lengths = shared.lengths
        most = max_context if step_tokens is None else min(step_tokens, max_context)
        self.groups = build_groups(
            pools,
            self.lengths,
            shared.tables,
            eviction=eviction,
            step_tokens=most,
            state_interval=state_interval if reuse else 0,
            ledger=debug,
        )
        self._growing = [group for group in self.groups if group.grows]
        self._fixed = [group for group in self.groups if not group.grows]
        # Groups that do not grow may evict, which may join nodes; the row has to cover these by then.
        self._fixed_last = sorted(enumerate(self.groups), key=lambda one: not one[1].grows)
        self._shrinking = [group for group in self.groups if group.slack]
        self._drafts = drafts
        self.tree = RadixTree(self.page_size, tuple(group.component for group in self.groups), rank)
        self.pins = Pins(self.tree, self.groups)
        self.open_rows: dict[int, RowKV] = {}
        self.trust = KVValidation(self.tree, self.groups)
        # A step with drafts may advance a row by more than a page.
        self._steps_between = 1 if drafts else min([_MAX_BETWEEN, *(group.slack for group in self._shrinking)])
        self._steps_since_let_go = 0
        self._lag: Index = np.zeros(max_rows, np.intp)
        self._free_rows = list(reversed(own_rows))
        self._num_rows = len(own_rows)
        self._serials = shared.serials
        self._within_page: Index = np.array(self.page_size - 1, np.intp)
        self.launched_step = self.finished_step = -1

    @property
    def in_flight(self) -> bool:
        return self.launched_step > self.finished_step

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def all_rows_free(self) -> bool:
        return len(self._free_rows) == self._num_rows

    @property
    def ranks(self) -> tuple[KVCache, ...]:
        """The caches of the ranks: this one."""
        return (self,)

    @property
    def short_rank(self) -> int:
        """The rank that was short of pages last: this one."""
        return self.rank

    def note_short(self, row: int) -> None:
        """The rank of a row is short of pages."""

    @property
    def shrinks(self) -> bool:
        """Whether rows give up pages while they run."""
        return bool(self._shrinking)

    def of_row(self, row: int) -> KVCache:
        """The cache that has a row: this one."""
        return self

    @property
    def available_pages(self) -> int:
        """Pages that every growing group can give now: free or evictable."""
        if len(self._growing) == 1:
            return self._growing[0].available
        return min([group.available for group in self._growing], default=_UNBOUNDED)

    @property
    def first_growing(self) -> Group | None:
        """The first group that grows; None if all layers keep states."""
        return self._growing[0] if self._growing else None

    @property
    def least_gain(self) -> int:
        """The largest `Group.least_gain`: 0 if every computed page can serve other prompts."""
        return max([group.least_gain for group in self.groups])

    @property
    def retired_pages(self) -> int:
        return sum(group.retired_pages for group in self.groups)

    @property
    def num_evicted(self) -> int:
        return sum(group.num_evicted for group in self.groups)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def too_small_for(self, tokens: int) -> Group | None:
        """A group whose pool is too small for one request of `tokens` tokens, or None."""
        for group in self.groups:
            if group.least(tokens) > group.pool.total:
                return group
        return None

    def probe(self, tokens: bytes, limit: int, namespace: Namespace, bookmark: Bookmark | None = None) -> Probe:
        """The end of the cached prefix of a prompt (int32 bytes), of at most `limit` tokens: see `Request.match_limit`.
        Changes only the `bookmark`."""
        return self.tree.probe(tokens, namespace, limit if self.reuse else 0, bookmark)

    def probes(self, tokens: bytes, limit: int, namespace: Namespace, bookmark: Bookmark | None = None) -> list[Probe]:
        """`probe` of every rank with a free row: one."""
        return [self.probe(tokens, limit, namespace, bookmark)]

    def load_of(self, rank: int) -> int:
        """The load of a rank, in tokens, by which ranks are compared; a single one has none."""
        return 0

    def peek(self, tokens: bytes, limit: int, namespace: Namespace, bookmark: Bookmark | None = None) -> int:
        """Length of the cached prefix of a prompt (int32 bytes), at most `limit`. Changes only the `bookmark`."""
        if bookmark is not None and bookmark.holds(limit if self.reuse else 0):
            return bookmark.length
        return self.probe(tokens, limit, namespace, bookmark).length

    def open_row(
        self, probe: Probe, *, session: bool = False, stops: bool = False, shared_len: int = 0, total: int = 0
    ) -> RowKV:
        """Gives a request a free row that starts with the prefix just probed, and locks that. `session`, `stops`: see
        `RowKV`; `shared_len`: length of a prefix that other prompts probably share; `total`: tokens of the prompt."""
        node = self.tree.claim(probe)
        self.tree.lock(node)
        row = self._free_rows.pop()
        record = RowKV(row, node.namespace, node, self.lengths, next(self._serials), probe.length, session=session)
        record.stops = stops
        record.shared_end = shared_len // self.page_size * self.page_size
        self._lag[row] = _CLIENT_LAG if session and stops else 0
        if probe.length:
            self.lengths.start(record.row, probe.length)
        for group in (*self._growing, *self._fixed) if probe.length else self._fixed:
            group.open(record, node, probe.length // self.page_size)
            group.compare(record, probe.known, total)
            record.on_trust |= group.reads_unproven(record)
        self.branch_at(record, probe.known)
        self.open_rows[record.row] = record
        self.tree.writing.add(record.serial)
        return record

    def branch_at(self, record: RowKV, length: int) -> bool:
        """Ends a chunk after `length` tokens, which another prompt shares, if these are not computed yet and a group
        gains by it. Returns whether it does."""
        if not self.reuse or length <= record.kv_allocated_len:
            return False
        ends = [group.branch_at(record, length) for group in self.groups]
        return any(ends)

    def chunk_end(self, record: RowKV, start: int, end: int, total: int) -> int:
        """The end, as all groups want it, of the chunk `[start, end)` of a prompt of `total` tokens."""
        for group in self.groups if self.reuse else ():
            end = group.chunk_end(record, start, end, total)
        return end

    def extend_row(self, record: RowKV, length: int) -> bool:
        return self.extend_rows(np.array([record.row]), np.array([length]))

    def extend_rows(self, rows: Index, lengths: Index, *, evict: bool = True) -> bool:
        """Allocates up to `lengths` `[rows]` tokens for `rows` `[rows]`, each named once; False, with nothing changed,
        if a group is short of pages. `evict`: whether to evict cached pages."""
        size = self.page_size
        before, held = self.lengths.kv_planned[rows], self.lengths.kv_allocated[rows]
        first = -(-held // size)
        counts = np.maximum(-(-lengths // size) - first, 0)
        total = int(counts.sum())
        if total:
            if not evict and any(total > group.pool.num_free for group in self._growing):
                return False
            if not self._make_room(total):
                return False
            if total >= _LONG_RUN * len(rows):
                self._give_runs(rows, first, counts)
            else:
                starts = np.cumsum(counts) - counts
                self.give(np.repeat(rows, counts), np.arange(total) + np.repeat(first - starts, counts))
        self.lengths.first_query[rows] = before
        self.lengths.kv_allocated[rows] = np.maximum(held, lengths)
        self.lengths.kv_planned[rows] = lengths
        return True

    def extend_decode(
        self, rows: Index, widths: Int32 | None = None, *, evict: bool = True, prompts_wait: bool = False
    ) -> Index | None:
        """Allocates one more token, or `widths` `[rows]` more with drafts, for each of `rows` `[rows]`. `prompts_wait`:
        for rows and memory. Returns the new `kv_planned` `[rows]`; None, with nothing allocated, if pages are short."""
        if widths is not None:
            return self._extend_by(rows, widths, evict, prompts_wait)
        assert self.lengths.kv_planned is self.lengths.kv_allocated, "with drafts every row has a width"
        lengths = self.lengths.kv_allocated[rows]
        crossing = np.bitwise_and(lengths, self._within_page) == 0
        needy = rows[crossing]
        if len(needy):
            held = lengths[crossing]
            if not self._grow(needy, held // self.page_size):
                return None
            self._cross_boundary(needy, held, prompts_wait)
        if self._shrinking:
            self.lengths.first_query[rows] = lengths
        lengths += ONE
        self.lengths.kv_allocated[rows] = lengths
        return lengths

    def make_room(self, count: int) -> bool:
        """Makes room for `count` pages in each growing group, for decode rows of the next step: rows give up pages
        behind their windows, and cached pages are evicted. False if a group is short."""
        if self._shrinking:
            self._let_go_at_intervals(not self._has(count))
        return self._make_room(count)

    def give(self, rows: Index, columns: Index) -> None:
        """Gives `rows[i]` the page of `columns[i]` in each growing group. The caller has made room."""
        for group in self._growing:
            group.table.write(rows, columns, group.take(len(rows), group.owners(rows)))

    def _extend_by(self, rows: Index, widths: Int32, evict: bool, prompts_wait: bool) -> Index | None:
        before = self.lengths.kv_planned[rows]
        lengths = before + widths
        if self._shrinking:
            self._let_go_at_intervals(False)
        if not self.extend_rows(rows, lengths, evict=evict):
            if not self._shrinking or not evict:
                return None
            self._let_go_at_intervals(True)
            if not self.extend_rows(rows, lengths):
                return None
        if self._fixed:
            at_boundary = np.bitwise_and(before, self._within_page) == 0
            self._cross_boundary(rows[at_boundary], before[at_boundary], prompts_wait)
        self.lengths.drafts_in_flight[rows] += widths - ONE
        return lengths

    def _cross_boundary(self, rows: Index, lengths: Index, prompts_wait: bool) -> None:
        for group in self._fixed if len(rows) else ():
            group.cross_boundary(rows, lengths, self.launched_step + 1, prompts_wait and bool(self._free_rows))

    def most_queries(self, rows: Index) -> Index | None:
        if not self._drafts:
            return None
        limits = [most for group in self._fixed if (most := group.most_queries(rows)) is not None]
        return np.minimum.reduce(limits) if limits else None

    def shorten(self, rows: Index, widths: Int32, counts: Int32) -> None:
        """A step with `widths` queries of `rows` has finished, of which `counts` were accepted: `[rows]` each."""
        self.lengths.kv_planned[rows] -= widths - counts
        self.lengths.drafts_in_flight[rows] -= widths - ONE

    def give_up_drafts(self) -> bool:
        """Frees the pages that rows hold for rejected drafts; False if there are none. No step may be in flight."""
        rows = self._all_rows()
        first = -(-self.lengths.kv_planned[rows] // self.page_size)
        last = -(-self.lengths.kv_allocated[rows] // self.page_size)
        held = first < last
        if not held.any():
            return False
        rows = rows[held]
        for group in self._growing:
            group.free_columns(rows, first[held], last[held])
        self.lengths.kv_allocated[rows] = self.lengths.kv_planned[rows]
        return True

    def _let_go_at_intervals(self, short: bool) -> None:
        """Makes all rows give up pages at intervals of steps in which some row takes a page, or at once if pages are
        `short`. Checking all rows costs little more than checking one."""
        self._steps_since_let_go += 1
        if short or self._steps_since_let_go >= self._steps_between:
            self._steps_since_let_go = 0
            self.let_go(self._all_rows(), tight=short)

    def relieve_sessions(self) -> bool:
        return self.pins.relieve(self._growing)

    def let_go(self, rows: Index, *, tight: bool = False) -> None:
        """Gives up pages of `rows` `[rows]` that neither a step in flight nor a later one reads. The next step must not
        be planned with them yet. `tight`: down to the page; otherwise windows may keep a few of the tree's pages."""
        if self._shrinking:
            # A request that ends inserts its committed tokens.
            reading = self.lengths.kv_committed[rows]
            if self.in_flight:  # the accepted drafts of the step before it are known by now
                reading = np.minimum(reading, self.lengths.first_query[rows])
            if not tight:
                reading = np.maximum(reading - self._lag[rows], 0)
            for group in self._shrinking:
                group.let_go(rows, reading, self.open_rows, tight)

    def cache_prefix(self, record: RowKV, tokens: TokenBytes, length: int, step: int | None) -> None:
        """Inserts the whole pages of the first `length` tokens (int32 bytes) that a request has computed into the tree,
        and a state if the row has the one at that length. If the tree has pages of the same prefix, the row is switched
        to these, and its own retire: they are free after `step`, the last one that may touch them (None: at once).
        Nothing is inserted after a dead prefix."""
        length = length // self.page_size * self.page_size
        protected = record.cache_protected_len
        locked = record.locked_node
        if not self.reuse or length <= protected or locked.dead:
            return
        row = record.row
        first, last = protected // self.page_size, length // self.page_size
        runs = tuple([group.run(record, first, last, step is not None) for group in self.groups])
        run = bytes(tokens[protected * TOKEN_BYTES : length * TOKEN_BYTES])
        added = self.tree.insert(locked, run, runs, request_owner(row), record.serial)
        repointed = [group.share(record, added, first, runs[number], step) for number, group in self._fixed_last]
        record.locked_node = added.node
        self.lengths.cache_protected[row] = length
        if any(repointed):
            if step is not None:
                record.repointed = step
        elif record.proven:
            self.trust.add(record)

    def release_kv_cache(self, record: RowKV, tokens: TokenBytes, *, insert: bool, kept: Kept | None = None) -> None:
        """Releases a request's row and KV; finish, retract, abort and close all end here. `tokens`: int32 bytes of at
        least the committed tokens. `insert`: insert their whole pages into the tree, as far as groups can use them.
        `kept`: the part that its session keeps. No step in flight may use the row."""
        most = record.kv_committed_len if kept is None else min(record.kv_committed_len, kept.length)
        if insert and self.reuse:
            for group in self.groups:
                most = group.keep_end(record, most)
            self.cache_prefix(record, tokens, most, None)
        if kept is not None:
            self.pins.move(kept, record)
        allocated = self.pages_for(record.kv_allocated_len)
        for group in self.groups:
            group.release(record, allocated)
        self.tree.writing.remove(record.serial)
        self.tree.join_path(record.locked_node, self.pages_for(record.cache_protected_len - record.matched))
        self.tree.unlock(record.locked_node)
        self._free_row(record.row)

    def launched(self, step: int) -> None:
        """Step `step` is in flight, with all tokens by which rows were extended."""
        self.launched_step = step

    def settle(self, step: int) -> None:
        """Step `step` has finished: frees pages that retired until then, and makes its source states evictable."""
        self.finished_step = step
        for group in self.groups:
            group.settle(step)

    def flush(self) -> None:
        for pin in list(self.pins.held):
            self.pins.let_go(pin)
        for group in self.groups:
            self.tree.evict(group.component, group.component.evictable)

    def take_deltas(self) -> tuple[PageDeltas, ...]:
        """Page-table entries that changed since the last call, of each group."""
        return tuple([group.table.take_deltas() for group in self.groups])

    def take_copies(self, rows: Index, step: int) -> tuple[SlotCopies, ...]:
        if not self._fixed:
            return ()
        return tuple([copies for group in self._fixed for copies in group.take_copies(rows, step)])

    def _free_row(self, row: int) -> None:
        self.lengths.start(row, 0)
        del self.open_rows[row]
        self._free_rows.append(row)

    def _all_rows(self) -> Index:
        return np.fromiter(self.open_rows, np.intp, len(self.open_rows))

    def _grow(self, rows: Index, columns: Index) -> bool:
        if not self.make_room(len(columns)):
            return False
        self.give(rows, columns)
        return True

    def _has(self, count: int) -> bool:
        return all(count <= group.pool.num_free or count <= group.available for group in self._growing)

    def _make_room(self, count: int) -> bool:
        """Evicts until every growing group has `count` free pages; False, with nothing changed, if one cannot."""
        if not self._has(count):
            return False
        for group in self._growing:
            shortfall = count - group.pool.num_free
            if shortfall > 0:
                group.num_evicted += self.tree.evict(group.component, shortfall)
        return True

    def _give_runs(self, rows: Index, first: Index, counts: Index) -> None:
        """Gives each row `counts` pages from column `first`, `[rows]` each."""
        for row, column, count in zip(rows.tolist(), first.tolist(), counts.tolist(), strict=True):
            if count:
                for group in self._growing:
                    group.table.write_run(row, column, group.take(count, request_owner(row)))
