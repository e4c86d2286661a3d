"""Pages of full attention: every node holds one page per page of its key."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_jax.mem_cache.component import Passed, PooledComponent
from sglang_jax.mem_cache.ledger import Pages, node_owner
from sglang_jax.mem_cache.radix_tree import Node


class FullKV(PooledComponent):
    """A node's value is its pages `[pages of its key]`, and a match may end at any of them. A lock covers every node up
    to the root, so below a node without locks there are none either. Unlocked leaves are evicted in the policy's order,
    from their tail, and only as many pages as are needed."""

    complete = True

    def pages(self, node: Node) -> Pages:
        value: Pages = node.values[self._index]
        return value

    def attach_pages(self, node: Node, pages: Pages, previous_owner: int) -> None:
        self._move(pages, previous_owner, node_owner(node.id))
        node.values.append(pages)
        self.protected += len(pages)

    def fill(self, node: Node, pages: Pages, previous_owner: int) -> None:
        """Does nothing: no node lacks a page."""

    def split(self, upper: Node, lower: Node) -> None:
        pages = self.pages(lower)
        count = upper.length
        self._move(pages[:count], node_owner(lower.id), node_owner(upper.id))
        upper.values.append(pages[:count])
        lower.values[self._index] = pages[count:]

    def may_join(self, upper: Node, lower: Node) -> bool:
        return True

    def join(self, upper: Node, lower: Node) -> None:
        pages = self.pages(upper)
        self._move(pages, node_owner(upper.id), node_owner(lower.id))
        lower.values[self._index] = np.concatenate((pages, self.pages(lower)))

    def last_start(self, passed: Sequence[Passed], index: int) -> int:
        return index

    def accepts_end(self, node: Node) -> bool:
        return True

    def collect(self, node: Node, count: int) -> Pages:
        runs: list[Pages] = []
        index = self._index
        while count > 0:
            run: Pages = node.values[index]
            size = node.length
            runs.append(run if size <= count else run[size - count :])
            count -= size
            assert node.parent is not None
            node = node.parent
        if len(runs) == 1:
            return runs[0]
        runs.reverse()
        return np.concatenate(runs) if runs else np.zeros(0, np.int32)

    def pin(self, node: Node) -> None:
        count = len(self.pages(node))
        self.evictable -= count
        self.protected += count
        self.order.discard(node)

    def unpin(self, node: Node) -> None:
        pages = self.pages(node)
        self.protected -= len(pages)
        if node.dead:
            self._give_up(node, pages)
        else:
            self.evictable += len(pages)
            self.touch(node)

    def session_begins(self, node: Node) -> None:
        self.session += len(self.pages(node))

    def session_ends(self, node: Node) -> None:
        self.session -= len(self.pages(node))

    def set_spare(self, node: Node, spare: bool) -> None:
        count = len(self.pages(node))
        self.spare += count if spare else -count

    def would_free(self, node: Node, count: int) -> bool:
        return node.locks == node.sessions

    def lockable(self, node: Node, pages: int, *, without_sessions: bool = False) -> int:
        total = 0
        while node.parent is not None and node.locks == (node.sessions if without_sessions else 0):
            total += pages
            node = node.parent
            pages = node.length
        return total

    def cut_off(self, node: Node) -> None:
        self.order.discard(node)
        if node.locks == 0:
            pages = self.pages(node)
            self.evictable -= len(pages)
            self._give_up(node, pages)

    def remove(self, node: Node) -> None:
        pages = self.pages(node)
        self.order.discard(node)
        self.evictable -= len(pages)
        self._give_up(node, pages)

    def trim(self, node: Node, pages: int) -> bool:
        held = self.pages(node)
        self.evictable -= len(held) - pages
        self._give_up(node, held[pages:])
        node.values[self._index] = held[:pages]
        return True

    def evict_at(self, node: Node, wanted: int) -> int:
        return max(node.length - wanted, 0)

    def touch(self, node: Node) -> None:
        if not node.children and node.locks == 0:
            self.order.add(node)
        else:
            self.order.discard(node)
