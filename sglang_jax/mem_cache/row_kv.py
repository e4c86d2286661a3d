"""The part of the cache that a running request holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_jax.mem_cache.lengths import RowLengths
from sglang_jax.mem_cache.radix_tree import Namespace, Node
from sglang_jax.mem_cache.state import Snapshot

MAX_BRANCHES = 4
"""Maximum branch points of a prompt: each ends a chunk, and there could be one per prompt."""


@dataclass(slots=True)
class RowKV:
    """A request's row, and the node that it locks (`locked_node`). Its lengths are in the arrays of `RowLengths`, so
    that a decode batch advances them at once.

    - `serial`: distinguishes requests in the same row; `proven`: a finite sample has proven the row's KV.
    - `matched`: tokens of the cached prefix that it started with; `on_trust`: it read unproven window pages or an
      unproven state of that, which may be gone by the time it samples.
    - `repointed`: the last step that used the row's own pages before it was switched to identical shared ones.
    - `session`: it is a turn of a session, whose KV is worth keeping; `stops`: its client may cut the output at a stop
      string.
    - With states, `origin`: the snapshot that it started with, at the end of `origin_node`, which is None once there is
      a later one.
    - `state_len`: tokens up to the last known snapshot on its path; `branches`: lengths at which its chunks end because
      other prompts diverge there, ascending; `shared_end`: a length at which others probably will, 0 if unknown;
      `guesses`: lengths at which they may, ascending.
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
    guesses: tuple[int, ...] = ()

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
