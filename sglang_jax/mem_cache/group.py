"""A cache group: layers that share pages of one kind, with a pool, a page table and a component of the tree. It holds
columns `[held_from, allocated)` of a row in its page table; the tree owns those below `cache_protected_len`, and the
request the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from sglang_jax.mem_cache.component import PooledComponent
from sglang_jax.mem_cache.ledger import RETIRED, Owners, Pages, request_owner, request_owners
from sglang_jax.mem_cache.lengths import Index, RowLengths
from sglang_jax.mem_cache.page_table import PageTable
from sglang_jax.mem_cache.radix_tree import Insertion, Node, Probe
from sglang_jax.mem_cache.row_kv import RowKV
from sglang_jax.mem_cache.window_kv import WindowKV
from sglang_jax.runner.plan import PoolSpec, SlotCopies

_SLACK = 8
"""A row may keep one Nth of a window in pages that it no longer needs, while pages are not short: giving up pages one
by one would cost the host as much as the rest of a step."""


class Group(ABC):
    """Takes, shares, retires and frees pages of one pool. Subclasses differ by the lifetime of pages.

    - `lengths`: of the rows, shared by all groups; `component`: of the tree; `table`: of the rows' pages.
    - `grows`: `KVCache` gives rows pages as they grow. Otherwise a row has a fixed number, and the group makes room
      itself.
    - `slack`: pages that a row may keep without need while pages are not short; 0 if it never gives up any.
    - `least_gain`: minimum tokens that a cached entry must save if it serves only at one length; otherwise 0.
    """

    grows: ClassVar[bool] = True
    slack: int = 0
    least_gain: int = 0

    def __init__(self, spec: PoolSpec, component: PooledComponent, lengths: RowLengths, table: PageTable) -> None:
        self.spec = spec
        self.name = spec.name
        self.page_size = spec.page_size
        self.pool = component.pool
        self.component = component
        self.table = table
        self.lengths = lengths
        self.num_evicted = 0
        self._retired: deque[tuple[int, Pages]] = deque()

    @property
    def unit(self) -> str:
        """The unit of `max_tokens` and `used_tokens`."""
        return "token"

    @property
    def available(self) -> int:
        """Pages that can be given now: free or evictable."""
        return self.pool.num_free + self.component.evictable

    @property
    def max_tokens(self) -> int:
        return self.pool.total * self.page_size

    @property
    def used_tokens(self) -> int:
        """Tokens of pages that are neither free nor evictable."""
        return self.max_tokens - self.available * self.page_size

    @property
    def session_tokens(self) -> int:
        return self.component.session * self.page_size

    @property
    def usage(self) -> float:
        return self.used_tokens / self.max_tokens

    @property
    def size(self) -> str:
        """The size of the pool, for error messages."""
        return str(self.max_tokens)

    @property
    def remedy(self) -> str:
        """The options that enlarge the pool, for error messages."""
        return "max_total_tokens"

    @property
    def retired(self) -> list[Pages]:
        """Runs of pages without an owner that a step in flight may still touch."""
        return [pages for _, pages in self._retired]

    @property
    def retired_pages(self) -> int:
        return sum(len(pages) for pages in self.retired)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def available_beside(self, probe: Probe) -> int:
        """Pages that can be given after a request has locked the probed prefix."""
        return self.available - self.component.lockable(probe.node, probe.covered)

    def available_without_sessions(self, probe: Probe) -> int:
        """The same, if sessions kept no pages."""
        kept = self.component.lockable(probe.node, probe.covered, without_sessions=True)
        return self.available + self.component.spare - kept

    @abstractmethod
    def held_from(self, row: int) -> int:
        """The first column that the row holds."""

    def owned_from(self, row: int) -> int:
        """The first column that the request owns, after those of the tree."""
        return max(int(self.lengths.cache_protected[row]) // self.page_size, self.held_from(row))

    def owned(self, record: RowKV, allocated: int) -> Pages:
        """The pages that the request owns, of its row's first `allocated` columns."""
        return self.table.run(record.row, self.owned_from(record.row), allocated)

    @abstractmethod
    def least(self, tokens: int) -> int:
        """Minimum pages for a request of `tokens` tokens to run at all."""

    @abstractmethod
    def prompt_need(self, tokens: int, cached: int) -> int:
        """Pages that a prompt of `tokens` needs in addition to its cached prefix of `cached` tokens."""

    @abstractmethod
    def rest_need(self, tokens: int, row: int) -> int:
        """Further pages that a prompt of `tokens`, which is being computed in a row, needs."""

    @abstractmethod
    def output_need(self, known: Index | int, left: Index | int) -> int:
        """Tokens of this group that requests with `known` `[n]` tokens, or one request, need to sample `left` `[n]`
        more, in total."""

    @abstractmethod
    def open(self, record: RowKV, node: Node, pages: int) -> None:
        """A row starts with the prefix of `pages` pages that ends at `node`; 0 pages only if rows do not grow."""

    def compare(self, record: RowKV, known: int, total: int) -> None:  # noqa: B027
        """A row has opened for a prompt of `total` tokens, of which the tree has the keys of the first `known`."""

    def branch_at(self, record: RowKV, length: int) -> bool:
        """Ends a chunk after `length` tokens, which another prompt shares, if that is worth it. Returns whether it
        is."""
        return False

    def chunk_end(self, record: RowKV, start: int, end: int, total: int) -> int:
        """The end of the chunk `[start, end)` of a prompt of `total` tokens at which an entry can be cached."""
        return end

    def most_queries(self, rows: Index) -> Index | None:
        """Maximum queries of decode rows `rows` `[rows]` in a step with drafts, which may be 0; None for no limit."""
        return None

    def cross_boundary(self, rows: Index, lengths: Index, step: int, wanted: bool) -> None:  # noqa: B027
        """In `step`, decode rows `rows` continue after `lengths` tokens, whole pages: `[rows]` both. `wanted`: whether
        waiting requests, which have precedence, need memory."""

    def take_copies(self, rows: Index, step: int) -> tuple[SlotCopies, ...]:
        """The states that `rows` `[rows]`, the sequences of `step`, start with and that are not in their own slots."""
        return ()

    def let_go(self, rows: Index, reading: Index, records: Mapping[int, RowKV], tight: bool) -> None:  # noqa: B027
        """Gives up pages that no query of `rows` `[rows]` from position `reading` `[rows]` on sees. If not `tight`,
        only in rows with more than `slack` of them."""

    def keep_end(self, record: RowKV, most: int) -> int:
        """How many of the first `most` tokens of a request that ends, which are committed, to insert."""
        return most

    def reads_unproven(self, record: RowKV) -> bool:
        """Whether a row that has just started reads entries whose proof does not follow from that of its nodes."""
        return False

    def prove(self, record: RowKV) -> None:  # noqa: B027
        """The row's sample was finite. The tree proves nodes; the group proves further entries that the row read."""

    def in_doubt(self, record: RowKV, node: Node, last: int) -> bool:
        """Whether a proven `node`, whose pages end at column `last`, has unproven entries that the row used."""
        return False

    def run(self, record: RowKV, first: int, last: int, continues: bool) -> Pages:
        """The pages `[columns]` that the row gives the tree for columns `[first, last)`, 0 for none. `continues`: the
        request continues."""
        return self.table.run(record.row, first, last)

    def pin(self, node: Node, pages: int) -> None:  # noqa: B027
        """A session depends on the prefix of `pages` pages, at least one, that ends at `node`, where a request may
        start. The tree has locked it."""

    def unpin(self, node: Node, pages: int) -> None:  # noqa: B027
        """Takes one `pin` of this very node back, before the tree's lock goes."""

    @abstractmethod
    def share(self, record: RowKV, added: Insertion, first: int, own: Pages, step: int | None) -> bool:
        """The row's columns from `first`, with pages `own` `[pages]`, were inserted; the record is not updated yet.
        Switches the row to pages that the tree had before, and retires its own copies until `step`. Returns whether
        there are any."""

    @abstractmethod
    def release(self, record: RowKV, allocated: int) -> None:
        """Releases the pages of a request's first `allocated` columns."""

    def take(self, count: int, owner: int | Owners) -> Pages:
        """Takes free pages for a request. The caller has made room."""
        pages = self.pool.alloc(count, owner)
        assert pages is not None, f"{count} pages are wanted of the {self.pool.num_free} free ones"
        return pages

    def settle(self, step: int) -> None:
        """Step `step` has finished: frees pages that retired until then."""
        while self._retired and self._retired[0][0] <= step:
            self.pool.free(self._retired.popleft()[1], RETIRED)

    def _repoint(self, row: int, node: Node, first: int, own: Pages, there: int, step: int | None) -> bool:
        """Switches a row's columns from `first` to the tree's pages, the first `there` of which were in the tree
        before."""
        mine = own[:there]
        theirs = self.component.collect(node, len(own))[:there]
        (differ,) = np.nonzero((mine != theirs) & (mine > 0))
        if len(differ) == 0:
            return False
        begin, end = int(differ[0]), int(differ[-1]) + 1
        if end - begin == len(differ):
            self.table.write_run(row, first + begin, theirs[begin:end])
        else:
            self.table.write(np.full(len(differ), row), first + differ, theirs[differ])
        self._retire(mine[differ], request_owner(row), step)
        return True

    def _retire(self, pages: Pages, owner: int, step: int | None) -> None:
        if step is None:
            self.pool.free(pages, owner)
            return
        if self.pool.ledger is not None:
            self.pool.ledger.move(pages, owner, RETIRED)
        self._retired.append((step, pages))

    def _free_own(self, row: int, allocated: int) -> None:
        first = self.owned_from(row)
        if allocated > first:
            self.pool.free(self.table.run(row, first, allocated), request_owner(row))
        self.table.clear(row, allocated)

    def owners(self, rows: Index) -> int | Owners:
        """Owner codes of the requests in `rows`, for the pool, which ignores them without a ledger."""
        return 0 if self.pool.ledger is None else request_owners(rows)

    def free_columns(self, rows: Index, first: Index, last: Index) -> None:
        """Frees pages of requests, columns `[first, last)` of `rows`, all `[rows]`."""
        counts = np.maximum(last - first, 0)
        total = int(counts.sum())
        if total == 0:
            return
        columns = first
        if total != len(rows) or counts.max() > 1:
            rows = np.repeat(rows, counts)
            starts = np.cumsum(counts) - counts
            columns = np.arange(total) + np.repeat(first - starts, counts)
        self.pool.free(self.table.take_out(rows, columns), self.owners(rows))


class FullGroup(Group):
    """Layers that see all of a row's tokens."""

    def held_from(self, row: int) -> int:
        return 0

    def owned_from(self, row: int) -> int:
        return int(self.lengths.cache_protected[row]) // self.page_size

    def least(self, tokens: int) -> int:
        return self.pages_for(tokens)

    def prompt_need(self, tokens: int, cached: int) -> int:
        return self.pages_for(tokens) - cached // self.page_size

    def rest_need(self, tokens: int, row: int) -> int:
        return self.pages_for(tokens) - self.pages_for(int(self.lengths.kv_allocated[row]))

    def output_need(self, known: Index | int, left: Index | int) -> int:
        return left if isinstance(left, int) else int(left.sum())

    def open(self, record: RowKV, node: Node, pages: int) -> None:
        self.table.write_run(record.row, 0, self.component.collect(node, pages))

    def share(self, record: RowKV, added: Insertion, first: int, own: Pages, step: int | None) -> bool:
        there = added.already_there // self.page_size
        return there > 0 and self._repoint(record.row, added.node, first, own, there, step)

    def release(self, record: RowKV, allocated: int) -> None:
        self._free_own(record.row, allocated)


class WindowGroup(Group):
    """Layers that see a row's last `spec.window` tokens. A row holds the columns that a query from its current page on
    may see, and gives up earlier ones when the last step that reads them has finished: apart from `slack`, it holds at
    most `reach + 2` pages and those of two steps of `step_tokens` tokens. Windows are counted from the start of a page,
    since the prefix that a request inserts ends at one."""

    component: WindowKV

    def __init__(
        self, spec: PoolSpec, component: WindowKV, lengths: RowLengths, table: PageTable, step_tokens: int
    ) -> None:
        super().__init__(spec, component, lengths, table)
        self.window = component.window
        self.reach = component.reach
        self.slack = max(self.reach // _SLACK, 1)
        self._held_from: Index = np.zeros(len(lengths.kv_allocated), np.intp)
        self._most = min(self.reach + 2 * (self.pages_for(step_tokens) + 1), self.pool.total)

    @property
    def size(self) -> str:
        return f"{self.max_tokens} in layers with a window of {self.window}"

    @property
    def remedy(self) -> str:
        return "swa_full_tokens_ratio or max_total_tokens"

    def held_from(self, row: int) -> int:
        return int(self._held_from[row])

    def least(self, tokens: int) -> int:
        return min(self.pages_for(tokens), self.reach + 1)

    def prompt_need(self, tokens: int, cached: int) -> int:
        pages = cached // self.page_size
        return min(self.pages_for(tokens) - pages, self._most - min(pages, self.reach))

    def rest_need(self, tokens: int, row: int) -> int:
        allocated = self.pages_for(int(self.lengths.kv_allocated[row]))
        return min(self.pages_for(tokens) - allocated, max(self._most - allocated + self.held_from(row), 0))

    def output_need(self, known: Index | int, left: Index | int) -> int:
        return int(np.minimum(left, np.maximum((self.reach + 1) * self.page_size - known, 0)).sum())

    def open(self, record: RowKV, node: Node, pages: int) -> None:
        row, held = record.row, min(pages, self.reach)
        self._held_from[row] = pages - held
        self.component.cover(node, held)
        self.table.write_run(row, pages - held, self.component.collect(node, held))

    def pin(self, node: Node, pages: int) -> None:
        self.component.cover(node, min(pages, self.reach), session=True)

    def unpin(self, node: Node, pages: int) -> None:
        self.component.uncover(node, min(pages, self.reach), session=True)
        self.component.give_back()

    def share(self, record: RowKV, added: Insertion, first: int, own: Pages, step: int | None) -> bool:
        # Pages of the prefix before `first` stay covered, and new ones are covered already.
        row, there = record.row, added.already_there // self.page_size
        if there == 0:
            return False
        repointed = self._repoint(row, added.node, first, own, there, step)
        covered = min(there, first + there - self.held_from(row))
        if covered > 0:
            above = added.node if there == len(own) else added.node.parent
            assert above is not None
            self.component.cover(above, covered)
        return repointed

    def release(self, record: RowKV, allocated: int) -> None:
        self._free_own(record.row, allocated)
        self._uncover(record, self.held_from(record.row))
        self._held_from[record.row] = 0

    def let_go(self, rows: Index, reading: Index, records: Mapping[int, RowKV], tight: bool) -> None:
        needed = reading // self.page_size - self.reach
        held = self._held_from[rows]
        behind = needed - held >= (1 if tight else self.slack)
        if not np.count_nonzero(behind):
            return
        rows, needed, held = rows[behind], needed[behind], held[behind]
        protected = self.lengths.cache_protected[rows] // self.page_size
        (covering,) = (held < protected).nonzero()
        if len(covering):
            before, after = (protected - held)[covering], (protected - needed)[covering]
            for row, old, new in zip(rows[covering].tolist(), before.tolist(), after.tolist(), strict=True):
                node = records[row].locked_node
                self.component.cover(node, new)
                self.component.uncover(node, old)
            self.component.give_back()
            held = np.maximum(held, protected)
        self.free_columns(rows, held, needed)
        self._held_from[rows] = needed

    def reads_unproven(self, record: RowKV) -> bool:
        last = record.matched // self.page_size
        for node in record.locked_node.path():
            if self.in_doubt(record, node, last):
                return True
            last -= node.length
        return False

    def prove(self, record: RowKV) -> None:
        last = record.cache_protected_len // self.page_size
        # The sample is of the token after the committed ones, or of the next if the first sample proved nothing.
        read_from = max(record.kv_committed_len - self.window + 1, 0)
        self.component.prove(record.locked_node, last - self.pages_for(read_from))

    def in_doubt(self, record: RowKV, node: Node, last: int) -> bool:
        # Unproven pages that the row started with may come from unproven pages before them, and so on.
        pages = last if record.on_trust else last - record.matched // self.page_size + self.reach
        return self.component.in_doubt(node, pages)

    def _uncover(self, record: RowKV, held_from: int) -> None:
        count = record.cache_protected_len // self.page_size - held_from
        if count > 0:
            self.component.uncover(record.locked_node, count)
            self.component.give_back()
