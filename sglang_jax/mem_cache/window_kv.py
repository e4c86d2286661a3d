"""Pages of sliding-window attention: a node may lose the pages at its head, or all of them, and stay in the tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_jax.mem_cache.component import Passed, PooledComponent
from sglang_jax.mem_cache.eviction import EvictionOrder
from sglang_jax.mem_cache.ledger import Pages, node_owner
from sglang_jax.mem_cache.page_pool import PagePool
from sglang_jax.mem_cache.radix_tree import Node


@dataclass(slots=True)
class WindowPages:
    """The pages of a node: those at the end of its key, `[pages]`; the pages before them were evicted.

    - `covers`: how many requests and sessions depend on its last n pages, by n; `covered`: the largest n.
      `session_covers`, `kept`: the same for sessions only. `spare`: pages on which only sessions depend.
    - `proven`: number of its last pages that a finite sample has read.
    """

    pages: Pages
    covers: dict[int, int] = field(default_factory=dict)
    covered: int = 0
    proven: int = 0
    session_covers: dict[int, int] = field(default_factory=dict)
    kept: int = 0
    spare: int = 0

    def covered_by_requests(self) -> int:
        """The largest number of its last pages on which a request depends."""
        if not self.session_covers:
            return self.covered
        return max([n for n, all_of in self.covers.items() if all_of > self.session_covers.get(n, 0)], default=0)


class WindowKV(PooledComponent):
    """The component of layers that see the last `window` tokens.

    - A query sees its own token, so the token after a prefix sees `window - 1` tokens of it. A match ends only where
      the pages with these tokens, `reach` in number and at least one, are all in the tree.
    - A request covers the last pages of the prefix that it depends on, at most `reach`, and fewer as it advances. In
      each node they are the last ones, so `uncover` finds the same pages after a split.
    - Eviction takes uncovered pages from the head of any node, and leaves the node: its other pages, and those of other
      components, may still be of use. A request that recomputes the lost pages gives the node its own.
    """

    complete = False

    def __init__(self, pool: PagePool, order: EvictionOrder, window: int) -> None:
        super().__init__(pool, order)
        self.window = window
        self.reach = max(-(-(window - 1) // pool.page_size), 1)

    def held(self, node: Node) -> WindowPages:
        value: WindowPages = node.values[self._index]
        return value

    def pages(self, node: Node) -> Pages:
        return self.held(node).pages

    def attach_pages(self, node: Node, pages: Pages, previous_owner: int) -> None:
        live = pages if pages[0] else pages[np.count_nonzero(pages == 0) :]
        count = len(live)
        if self.pool.ledger is not None:
            self._move(live, previous_owner, node_owner(node.id))
        node.values.append(WindowPages(live, {count: 1} if count else {}, count))
        self.protected += count

    def fill(self, node: Node, pages: Pages, previous_owner: int) -> None:
        value = self.held(node)
        missing = pages[: len(pages) - len(value.pages)]
        taken = missing[np.count_nonzero(missing == 0) :]
        if len(taken) == 0:
            return
        self._move(taken, previous_owner, node_owner(node.id))
        value.pages = np.concatenate((taken, value.pages))
        self.evictable += len(taken)
        self._rank(node, value)

    def split(self, upper: Node, lower: Node) -> None:
        value, rest = self.held(lower), lower.length
        above = max(len(value.pages) - rest, 0)
        covers, value.covers = _divided(value.covers, rest)
        session_covers, value.session_covers = _divided(value.session_covers, rest)
        self._move(value.pages[:above], node_owner(lower.id), node_owner(upper.id))
        covered, proven, kept = (max(count - rest, 0) for count in (value.covered, value.proven, value.kept))
        head = WindowPages(value.pages[:above], covers, covered, proven, session_covers, kept)
        upper.values.append(head)
        value.pages = value.pages[above:]
        value.covered, value.proven, value.kept = (min(n, rest) for n in (value.covered, value.proven, value.kept))
        self._count_spare(head)
        self._count_spare(value)
        self._rank(upper, head)
        self._rank(lower, value)

    def may_join(self, upper: Node, lower: Node) -> bool:
        return not len(self.held(upper).pages) or len(self.held(lower).pages) == lower.length

    def join(self, upper: Node, lower: Node) -> None:
        head, value, rest = self.held(upper), self.held(lower), lower.length
        if not len(head.pages):
            return
        self._move(head.pages, node_owner(upper.id), node_owner(lower.id))
        self.order.discard(upper)
        value.pages = np.concatenate((head.pages, value.pages))
        value.covers = _united(head.covers, value.covers, rest)
        value.session_covers = _united(head.session_covers, value.session_covers, rest)
        value.covered, value.kept = max(value.covers, default=0), max(value.session_covers, default=0)
        self.spare -= head.spare
        self._count_spare(value)
        if value.proven == rest:
            value.proven += head.proven
        self._rank(lower, value)

    def last_start(self, passed: Sequence[Passed], index: int) -> int:
        # From the end: recently computed pages are mostly there, so looking back over one window is enough.
        held, reach = self.held, self.reach
        place, run = index, 0
        while place >= 0 and run < reach:
            node, pages = passed[place]
            gone = node.length - len(held(node).pages)
            place -= 1
            if gone == 0:
                run += pages
            elif run + pages - gone < reach:  # ends after the gap have no whole window, and neither has this node's end
                index, run = place, 0
            else:
                break
        return index

    def accepts_end(self, node: Node) -> bool:
        place, missing, each = self._index, self.reach, node
        while missing > 0 and each.parent is not None:
            live = len(each.values[place].pages)
            missing -= live
            if live < each.length:
                return missing <= 0
            each = each.parent
        return True

    def collect(self, node: Node, count: int) -> Pages:
        pages = np.zeros(count, np.int32)
        while count > 0:
            length, live = node.length, self.held(node).pages[-count:]
            pages[count - len(live) : count] = live
            count -= length
            assert node.parent is not None
            node = node.parent
        return pages

    def cover(self, node: Node, count: int, *, session: bool = False) -> None:
        """Protects the last `count` pages of the prefix that ends at `node`, all in the tree, for a request or a
        session."""
        while count > 0:
            value, here = self.held(node), min(count, node.length)
            value.covers[here] = value.covers.get(here, 0) + 1
            if session:
                value.session_covers[here] = value.session_covers.get(here, 0) + 1
                self._keep(value, max(value.kept, here))
            more = here - value.covered
            if more > 0:
                assert here <= len(value.pages), f"tree node {node.id} has lost pages of a window that is to be covered"
                value.covered = here
                self.evictable -= more
                self.protected += more
                self._rank(node, value)
            self._count_spare(value)
            count -= here
            assert node.parent is not None
            node = node.parent

    def uncover(self, node: Node, count: int, *, session: bool = False) -> None:
        """Takes one `cover` of this very node and count back."""
        while count > 0:
            value, here = self.held(node), min(count, node.length)
            requests = value.covers.get(here, 0)
            if requests <= 0 or (session and not value.session_covers.get(here)):
                raise RuntimeError(f"{here} pages of tree node {node.id} were uncovered more often than covered")
            if session:
                value.session_covers[here] -= 1
                if not value.session_covers[here]:
                    del value.session_covers[here]
                    self._keep(value, max(value.session_covers, default=0))
            if requests > 1:
                value.covers[here] = requests - 1
            else:
                del value.covers[here]
                if here == value.covered:
                    self._uncovered(node, value)
            self._count_spare(value)
            count -= here
            assert node.parent is not None
            node = node.parent

    def _keep(self, value: WindowPages, count: int) -> None:
        self.session += count - value.kept
        value.kept = count

    def _count_spare(self, value: WindowPages) -> None:
        if value.kept or value.spare:
            spare = max(value.kept - value.covered_by_requests(), 0)
            self.spare += spare - value.spare
            value.spare = spare

    def would_free(self, node: Node, count: int) -> bool:
        count = min(count, self.reach)
        while count > 0 and node.parent is not None:
            if min(count, node.length) > self.held(node).covered_by_requests():
                return True
            count -= node.length
            node = node.parent
        return False

    def _uncovered(self, node: Node, value: WindowPages) -> None:
        """Updates the node after its largest cover was removed."""
        left = max(value.covers, default=0)
        count, value.covered = value.covered - left, left
        self.protected -= count
        if node.dead:
            self._drop_head(node, value, count)
        else:
            self.evictable += count
            self._rank(node, value)

    def prove(self, node: Node, count: int) -> None:
        """A finite sample has read the last `count` pages of the prefix that ends at `node`."""
        while count > 0 and node.parent is not None:
            value = self.held(node)
            value.proven = max(value.proven, min(count, len(value.pages)))
            count -= node.length
            node = node.parent

    def in_doubt(self, node: Node, count: int) -> bool:
        """Whether one of the last `count` pages of this node is in the tree and unproven."""
        value = self.held(node)
        return value.proven < min(count, len(value.pages))

    def lockable(self, node: Node, pages: int, *, without_sessions: bool = False) -> int:
        total, missing = 0, self.reach
        while missing > 0 and node.parent is not None:
            value, length = self.held(node), node.length
            first = max(pages - missing, length - len(value.pages))
            covered = value.covered_by_requests() if without_sessions else value.covered
            total += max(min(pages, length - covered) - first, 0)
            missing -= pages
            node = node.parent
            pages = node.length
        return total

    def cut_off(self, node: Node) -> None:
        value = self.held(node)
        self.order.discard(node)
        loose = len(value.pages) - value.covered
        if loose:
            self.evictable -= loose
            self._drop_head(node, value, loose)

    def remove(self, node: Node) -> None:
        value = self.held(node)
        self.order.discard(node)
        self.evictable -= len(value.pages)
        if len(value.pages):
            self._give_up(node, value.pages)

    def trim(self, node: Node, pages: int) -> bool:
        value = self.held(node)
        held, lost = value.pages, node.length - pages
        kept = len(held) - lost
        if value.proven:
            value.proven = max(value.proven - lost, 0)
        if kept > 0:
            self.evictable -= lost
            self._give_up(node, held[kept:])
            value.pages = held[:kept]
            return kept >= self.reach or kept == pages
        if len(held):
            self.evictable -= len(held)
            self._give_up(node, held)
            value.pages = held[:0]
            self.order.discard(node)
        return False

    def evict_at(self, node: Node, wanted: int) -> int:
        value = self.held(node)
        count = min(wanted, len(value.pages) - value.covered)
        if not (node.children or node.locks) and len(value.pages) - count < self.reach:
            return 0  # a leaf without locks at whose end no match may end is removed whole
        self._drop_head(node, value, count)
        self.evictable -= count
        if len(value.pages) == value.covered:
            self.order.discard(node)
        return node.length

    def touch(self, node: Node) -> None:
        """Does nothing: neither children nor a new node change the order, see `_rank`."""

    def _rank(self, node: Node, value: WindowPages) -> None:
        """Updates the eviction order after a change of the node's pages or covers."""
        if len(value.pages) > value.covered and not node.dead:
            self.order.add(node)
        else:
            self.order.discard(node)

    def _drop_head(self, node: Node, value: WindowPages, count: int) -> None:
        self._give_up(node, value.pages[:count])
        value.pages = value.pages[count:]
        value.proven = min(value.proven, len(value.pages))


def _divided(covers: dict[int, int], rest: int) -> tuple[dict[int, int], dict[int, int]]:
    """Splits covers of a node: those of the part above its last `rest` pages, and those of these pages."""
    above: dict[int, int] = {}
    below: dict[int, int] = {}
    for count, requests in covers.items():
        below[min(count, rest)] = below.get(min(count, rest), 0) + requests
        if count > rest:
            above[count - rest] = requests
    return above, below


def _united(above: dict[int, int], below: dict[int, int], rest: int) -> dict[int, int]:
    """The opposite of `_divided`: a cover of pages above the last `rest` covers all of these, too."""
    covers = dict(below)
    through = sum(above.values())
    if through:
        covers[rest] -= through
        if not covers[rest]:
            del covers[rest]
    return covers | {count + rest: requests for count, requests in above.items()}
