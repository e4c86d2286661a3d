"""Proves KV by finite samples, and cuts off KV that is not finite."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_jax.mem_cache.group import Group
from sglang_jax.mem_cache.radix_tree import Node, RadixTree
from sglang_jax.mem_cache.row_kv import RowKV


class KVValidation:
    """KV is in the tree before a sample from it is known. A finite sample proves the KV that it read; one that is not
    finite puts in doubt the KV that its row computed and the unproven KV that it read, and if that was window pages or
    a state, all unproven ones before them, which they may come from. Nodes are proven as a whole, up to the root;
    window pages and states, separately by `Group.prove`."""

    def __init__(self, tree: RadixTree, groups: Sequence[Group]) -> None:
        self._tree = tree
        self._groups = groups

    def prove(self, record: RowKV, step: int) -> bool:
        """The row's sample in `step` was finite: proves the KV that it read, and the KV that it will add. False, with
        nothing proven, if the step read the row's own copies instead of the pages that it depends on now."""
        if record.repointed >= step:
            return False
        record.proven = True
        self.add(record)
        return True

    def add(self, record: RowKV) -> None:
        """Proves the prefix that a proven row depends on now."""
        self._tree.prove(record.locked_node)
        for group in self._groups:
            group.prove(record)

    def distrust(self, record: RowKV) -> None:
        """The row's sample was not finite: no match finds the KV that it computed, or read unproven, any more. Rows
        that depend on such KV keep it until they release it."""
        top, last = None, record.cache_protected_len // self._tree.page_size
        for node in record.locked_node.path():
            if not node.dead and self._in_doubt(record, node, last):
                top = node
            last -= node.length
        if top is not None:
            self._tree.cut(top)

    @staticmethod
    def read_bad_kv(record: RowKV) -> bool:
        """Whether a row reads KV of another request that was cut off since, or started with unproven window pages or an
        unproven state and has sampled nothing since."""
        if record.on_trust and not record.proven:
            return True
        return any(node.dead and node.writer != record.serial for node in record.locked_node.path())

    def _in_doubt(self, record: RowKV, node: Node, last: int) -> bool:
        return (
            node.writer == record.serial
            or not node.proven
            or any(group.in_doubt(record, node, last) for group in self._groups)
        )
