"""Which KV a finite sample has proven, and what becomes of KV that is not finite."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_jax.mem_cache.group import Group
from sglang_jax.mem_cache.radix_tree import Node, RadixTree
from sglang_jax.mem_cache.row_kv import RowKV


class KVValidation:
    """KV is in the tree before anything was sampled from it. A sample that is finite proves what it read; one that is
    not puts in doubt what its row computed, and what it read that nothing has proven.

    Nodes are proven as a whole, up to the root; what a group needs proven by itself (window pages, states), by
    `Group.prove`.
    """

    def __init__(self, tree: RadixTree, groups: Sequence[Group]) -> None:
        self._tree = tree
        self._groups = groups

    def prove(self, record: RowKV, step: int) -> bool:
        """What a row sampled in `step` was finite: all that it read, and what it will still add, is fit to be shared.

        False, and nothing is proven, if the step read copies of the row's own in place of what it depends on now.
        """
        if record.repointed >= step:
            return False
        record.proven = True
        self.add(record)
        return True

    def add(self, record: RowKV) -> None:
        """What the row, which is proven, depends on now is fit to be shared."""
        self._tree.prove(record.locked_node)
        for group in self._groups:
            group.prove(record)

    def distrust(self, record: RowKV) -> None:
        """A row sampled something that is not finite: nothing that it computed, or read unproven, is matched again. Who
        depends on such KV keeps it until it lets go."""
        top, last = None, record.cache_protected_len // self._tree.page_size
        for node in record.locked_node.path():
            if not node.dead and self._in_doubt(record, node, last):
                top = node
            last -= node.length
        if top is not None:
            self._tree.cut(top)

    @staticmethod
    def read_bad_kv(record: RowKV) -> bool:
        """True where a row reads KV that somebody else computed and that was cut off since, or began with window pages
        or a state that nothing proved and has sampled nothing since."""
        if record.on_trust and not record.proven:
            return True
        return any(node.dead and node.writer != record.serial for node in record.locked_node.path())

    def _in_doubt(self, record: RowKV, node: Node, last: int) -> bool:
        """Of a node on the row's path, whose pages end at column `last`."""
        return (
            node.writer == record.serial
            or not node.proven
            or any(group.in_doubt(record, node, last) for group in self._groups)
        )
