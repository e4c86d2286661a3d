"""The KV life cycle of running requests: take a row, grow it, share it through the tree, release it.

The tree owns a row's tokens `[0, cache_protected_len)`; the request owns from there to
`ceil_page(kv_allocated_len)`. Nothing else stores these facts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_jax.config import EvictionPolicy
from sglang_jax.mem_cache.full_kv import FullKV
from sglang_jax.mem_cache.ledger import RETIRED, PageLedger, Pages, request_owner, request_owners
from sglang_jax.mem_cache.page_pool import PagePool
from sglang_jax.mem_cache.page_table import PageTable
from sglang_jax.mem_cache.radix_tree import TOKEN_BYTES, Namespace, Node, Probe, RadixTree
from sglang_jax.runner.plan import Int32, PageDeltas, PoolSpec


class RowLengths:
    """The lengths of every row's ownership record, as arrays `[rows]`, in tokens.

    `cache_protected_len <= kv_committed_len <= kv_allocated_len`; the first is page aligned. Committed: the KV of
    tokens that are the request's for certain. Allocated: what launched steps may write.
    """

    def __init__(self, rows: int) -> None:
        self.cache_protected: NDArray[np.int32] = np.zeros(rows, np.int32)
        self.kv_committed: NDArray[np.int32] = np.zeros(rows, np.int32)
        self.kv_allocated: NDArray[np.int32] = np.zeros(rows, np.int32)


@dataclass(slots=True)
class RowKV:
    """One request's ownership record: its row, and the node it locks (the lock receipt).

    The lengths live in the arrays of `RowLengths`, so that a decode batch advances them at once. `serial` tells records
    of the same row apart. `proven`: what was drawn from this row's KV was finite. `repointed`: the last step that was
    launched with copies of the row's own, in whose place it reads somebody else's since.
    """

    row: int
    namespace: Namespace
    receipt: Node
    lengths: RowLengths
    serial: int = 0
    proven: bool = False
    repointed: int = -1

    @property
    def cache_protected_len(self) -> int:
        return int(self.lengths.cache_protected[self.row])

    @property
    def kv_committed_len(self) -> int:
        return int(self.lengths.kv_committed[self.row])

    @property
    def kv_allocated_len(self) -> int:
        return int(self.lengths.kv_allocated[self.row])


class KVCache:
    """Pages, page table and prefix tree of one pool, and the rows that use them.

    **Arguments:**

    - `pool`: size of the pool; `max_rows`, `max_context`: of the page table.
    - `reuse`: False turns prefix reuse off: nothing matches and nothing is inserted, all else is the same.
    - `debug`: keep a ledger of owners.
    """

    def __init__(
        self,
        pool: PoolSpec,
        max_rows: int,
        max_context: int,
        *,
        reuse: bool = True,
        eviction: EvictionPolicy = EvictionPolicy.LRU,
        debug: bool = False,
    ) -> None:
        self.page_size = pool.page_size
        self.reuse = reuse
        ledger = PageLedger(pool.num_pages) if debug else None
        self.pool = PagePool(pool.num_pages, pool.page_size, ledger)
        self.full = FullKV(self.pool, eviction)
        self.tree = RadixTree(pool.page_size, (self.full,))
        self.table = PageTable(max_rows, -(-max_context // pool.page_size))
        self.lengths = RowLengths(max_rows)
        self.open_rows: dict[int, RowKV] = {}
        self.num_evicted = 0
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._serial = 0
        self._retired: deque[tuple[int, Pages]] = deque()

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def all_rows_free(self) -> bool:
        """No request has a row."""
        return len(self._free_rows) == len(self.table.pages)

    @property
    def available_pages(self) -> int:
        """Pages that could be handed out now: free, or evictable."""
        return self.pool.num_free + self.full.evictable

    @property
    def retired(self) -> list[Pages]:
        """Runs of pages that nobody owns but a step in flight may still touch."""
        return [pages for _, pages in self._retired]

    @property
    def retired_pages(self) -> int:
        """How many pages are retired."""
        return sum(len(pages) for pages in self.retired)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def probe(self, tokens: bytes, limit: int, namespace: Namespace) -> Probe:
        """Where the cached prefix of a prompt (int32 bytes) ends. Changes nothing.

        `limit`: most tokens that may be matched: one less than the prompt (a token must run to give logits), less where
        prompt logprobs are wanted.
        """
        return self.tree.probe(self._matchable(tokens, limit) if self.reuse else b"", namespace)

    def peek(self, tokens: bytes, limit: int, namespace: Namespace) -> int:
        """Tokens of a prompt (int32 bytes), at most `limit`, whose KV is cached. Changes nothing."""
        return self.probe(tokens, limit, namespace).length

    def available_beside(self, probe: Probe) -> int:
        """Pages that could be handed out once a request holds the prefix that was probed."""
        return self.available_pages - self.full.lockable(probe.node, probe.covered)

    def open_row(self, probe: Probe) -> RowKV:
        """Gives a request a row that starts with the prefix that was just probed, locked. A row must be free."""
        node = self.tree.claim(probe)
        self.tree.lock(node)
        self._serial += 1
        record = RowKV(self._free_rows.pop(), node.namespace, node, self.lengths, self._serial)
        if probe.length:
            row = record.row
            self.lengths.cache_protected[row] = probe.length
            self.lengths.kv_committed[row] = probe.length
            self.lengths.kv_allocated[row] = probe.length
            self.table.write_run(row, 0, self.full.collect(node))
        self.open_rows[record.row] = record
        return record

    def extend_row(self, record: RowKV, length: int) -> bool:
        """`extend_rows` for one."""
        return self.extend_rows(np.array([record.row], np.int32), np.array([length], np.int32))

    def extend_rows(self, rows: Int32, lengths: Int32) -> bool:
        """Allocates up to `lengths` `[rows]` tokens for `rows` `[rows]`, each named once; False, and nothing is taken,
        if pages are short."""
        size = np.int32(self.page_size)
        first = -(-self.lengths.kv_allocated[rows] // size)
        counts = -(-lengths // size) - first
        total = int(counts.sum())
        if total:
            repeated = np.repeat(rows, counts)
            pages = self._take(total, request_owners(repeated))
            if pages is None:
                return False
            starts = np.cumsum(counts) - counts
            columns = np.arange(total, dtype=np.int32) + np.repeat(first - starts, counts).astype(np.int32)
            self.table.write(repeated, columns, pages)
        self.lengths.kv_allocated[rows] = lengths
        return True

    def extend_decode(self, rows: Int32) -> Int32 | None:
        """Allocates one more token for each of `rows` `[rows]`, or for none of them: then None.

        Returns the new `kv_allocated_len` of each, `[rows]`.
        """
        lengths = self.lengths.kv_allocated[rows]
        crossing = (lengths & (self.page_size - 1)) == 0
        if crossing.any():
            needy = rows[crossing]
            pages = self._take(len(needy), request_owners(needy))
            if pages is None:
                return None
            self.table.write(needy, lengths[crossing] // np.int32(self.page_size), pages)
        lengths += 1
        self.lengths.kv_allocated[rows] = lengths
        return lengths

    def cache_prefix(self, record: RowKV, tokens: bytes, length: int, step: int | None) -> None:
        """Puts the first `length` of a request's tokens (int32 bytes), which it has computed, in the tree up to the
        page floor.

        Where the tree has the same prefix from someone else, the row is re-pointed at that copy and the request's own
        pages retire: they are free once `step`, the last one that may touch them, has finished (None: at once). What
        follows a dead prefix stays the request's own.
        """
        length = length // self.page_size * self.page_size
        protected = record.cache_protected_len
        receipt = record.receipt
        if not self.reuse or length <= protected or receipt.dead:
            return
        row = record.row
        first, last = protected // self.page_size, length // self.page_size
        own = self.table.run(row, first, last)
        owner = request_owner(row)
        run = tokens[protected * TOKEN_BYTES : length * TOKEN_BYTES]
        added = self.tree.insert(receipt, run, (own,), owner, record.serial)
        if receipt.parent is None:
            self.tree.lock(added.node)
        else:
            self.tree.extend_lock(receipt, added.node)
        record.receipt = added.node
        if added.already_there:
            duplicates = own[: added.already_there // self.page_size]
            theirs = self.full.collect(added.node)[first : first + len(duplicates)]
            self.table.write_run(row, first, theirs)
            self._retire(duplicates, owner, step)
            if step is not None:
                record.repointed = step
        elif record.proven:
            self.tree.prove(added.node)
        self.lengths.cache_protected[row] = length

    def prove(self, record: RowKV, step: int) -> bool:
        """What a row drew in `step` was finite: all that it read, and what it will still add, is fit to be shared.

        False, and nothing is proven, if the step read copies of the row's own in place of what it depends on now.
        """
        if record.repointed >= step:
            return False
        record.proven = True
        self.tree.prove(record.receipt)
        return True

    def distrust(self, record: RowKV) -> None:
        """A row drew something that is not finite: nothing that it computed, or read unproven, is matched again. Who
        depends on such KV keeps it until it lets go."""
        top = None
        for node in record.receipt.path():
            if not node.dead and (node.writer == record.serial or not node.proven):
                top = node
        if top is not None:
            self.tree.cut(top)

    @staticmethod
    def borrowed_trouble(record: RowKV) -> bool:
        """True where a row reads KV that somebody else computed and that was cut off since."""
        return any(node.dead and node.writer != record.serial for node in record.receipt.path())

    def release_kv_cache(self, record: RowKV, tokens: bytes, *, insert: bool) -> None:
        """The one way a request gives its KV up: finish, retract, abort and close all end here.

        `tokens`: int32 bytes of at least the committed tokens; with `insert` their whole pages are kept in the tree. No
        step in flight may use the row.
        """
        if insert:
            self.cache_prefix(record, tokens, record.kv_committed_len, None)
        first = record.cache_protected_len // self.page_size
        allocated = self.pages_for(record.kv_allocated_len)
        if allocated > first:
            self.pool.free(self.table.run(record.row, first, allocated), request_owner(record.row))
        self.tree.unlock(record.receipt)
        self._free_row(record.row, allocated)

    def settle(self, step: int) -> None:
        """Step `step` has finished: what was retired until then is free."""
        while self._retired and self._retired[0][0] <= step:
            self.pool.free(self._retired.popleft()[1], RETIRED)

    def flush(self) -> None:
        """Evicts everything that no request depends on."""
        self.tree.evict(self.full, self.full.evictable)

    def take_deltas(self) -> PageDeltas:
        """Page-table entries that changed since the last call."""
        return self.table.take_deltas()

    def _matchable(self, tokens: bytes, limit: int) -> bytes:
        return tokens[: max(limit, 0) // self.page_size * self.page_size * TOKEN_BYTES]

    def _take(self, count: int, owner: int | NDArray[np.int64]) -> Pages | None:
        shortfall = count - self.pool.num_free
        if shortfall > 0:
            if shortfall > self.full.evictable:
                return None
            self.num_evicted += self.tree.evict(self.full, shortfall)
        return self.pool.alloc(count, owner)

    def _retire(self, pages: Pages, owner: int, step: int | None) -> None:
        if step is None:
            self.pool.free(pages, owner)
            return
        if self.pool.ledger is not None:
            self.pool.ledger.move(pages, owner, RETIRED)
        self._retired.append((step, pages))

    def _free_row(self, row: int, columns: int) -> None:
        for column in (self.lengths.cache_protected, self.lengths.kv_committed, self.lengths.kv_allocated):
            column[row] = 0
        self.table.clear(row, columns)
        del self.open_rows[row]
        self._free_rows.append(row)
