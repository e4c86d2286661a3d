"""What a running request holds of the cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_jax.mem_cache.lengths import RowLengths
from sglang_jax.mem_cache.radix_tree import Namespace, Node
from sglang_jax.mem_cache.state import Snapshot

MOST_BRANCHES = 4
"""Branch points of a prompt: each costs a chunk's end, and there may be as many as there are prompts."""


@dataclass(slots=True)
class RowKV:
    """One request's ownership record: its row, and the node it locks (`locked_node`).

    The lengths live in the arrays of `RowLengths`, so that a decode batch advances them at once. `serial` tells records
    of the same row apart. `matched`: tokens of the cached prefix that it started with; `on_trust`: of these it read
    window pages that nothing proved, and that may be gone by the time it samples. `proven`: what was sampled from this
    row's KV was finite. `repointed`: the last step that was launched with copies of the row's own, in whose place
    it reads somebody else's since. `session`: it is a turn of one, so that what it leaves behind is worth keeping.
    `stops`: its client may say that only a part of what was sampled counts.

    Where layers keep states: `origin`: the snapshot that it began with, at the end of `origin_node`, which is None once
    there is one further on; `state_len`: tokens up to the last snapshot on its path that it knows of; `branches`: where
    chunks of it are to end as other prompts part from it, ascending; `shared_end`: where others probably will, 0 if
    nobody knows.
    """

    row: int
    namespace: Namespace
    locked_node: Node
    lengths: RowLengths
    serial: int = 0
    matched: int = 0
    on_trust: bool = False
    proven: bool = False
    repointed: int = -1
    session: bool = False
    stops: bool = False
    origin: Snapshot | None = None
    origin_node: Node | None = None
    state_len: int = 0
    branches: list[int] = field(default_factory=list)
    shared_end: int = 0

    @property
    def cache_protected_len(self) -> int:
        return int(self.lengths.cache_protected[self.row])

    @property
    def kv_committed_len(self) -> int:
        return int(self.lengths.kv_committed[self.row])

    @property
    def kv_allocated_len(self) -> int:
        return int(self.lengths.kv_allocated[self.row])

    @property
    def kv_planned_len(self) -> int:
        return int(self.lengths.kv_planned[self.row])
