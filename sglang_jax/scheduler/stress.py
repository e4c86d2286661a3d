"""Test options that retract requests and evict the cache at intervals, as shortage does."""

from __future__ import annotations

from sglang_jax.mem_cache.data_parallel import AnyCache
from sglang_jax.scheduler.request import Request
from sglang_jax.scheduler.rows import Rows


class Stress:
    """Decides when to do so. `retract`, `evict`: interval in steps; None for never."""

    def __init__(self, retract: int | None, evict: int | None) -> None:
        self._retract = retract
        self._evict = evict
        self._retracted_at = self._evicted_at = 0

    def retracts(self, steps: int) -> bool:
        if self._retract is None or steps < self._retracted_at + self._retract:
            return False
        self._retracted_at = steps
        return True

    def evicts(self, steps: int) -> bool:
        if self._evict is None or steps < self._evicted_at + self._evict:
            return False
        self._evicted_at = steps
        return True


def retractable(rows: Rows) -> list[Request]:
    """Requests that have sampled a token in their row. Others would make no progress between retractions."""
    running = [request for request in rows.requests if request is not None and rows.runs(request)]
    return [request for request in running if rows.num_tokens[request.row] > request.prefill_len]


def evict_all(cache: AnyCache) -> None:
    """Evicts all pages that no request and no session depends on."""
    for one in cache.ranks:
        for group in one.groups:
            group.num_evicted += one.tree.evict(group.component, group.component.evictable)
