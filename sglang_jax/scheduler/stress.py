"""Switches for tests of whole servers: what shortage does now and then, every so many steps."""

from __future__ import annotations

from sglang_jax.mem_cache.kv_cache import KVCache
from sglang_jax.scheduler.request import Request
from sglang_jax.scheduler.rows import Rows


class Stress:
    """Says when. `retract`, `evict`: steps between two; None for never."""

    def __init__(self, retract: int | None, evict: int | None) -> None:
        self._retract = retract
        self._evict = evict
        self._retracted_at = self._evicted_at = 0

    def retracts(self, steps: int) -> bool:
        """Whether a request is to be retracted, after so many steps."""
        if self._retract is None or steps < self._retracted_at + self._retract:
            return False
        self._retracted_at = steps
        return True

    def evicts(self, steps: int) -> bool:
        """Whether the prefix cache is to lose what nobody depends on, after so many steps."""
        if self._evict is None or steps < self._evicted_at + self._evict:
            return False
        self._evicted_at = steps
        return True


def retractable(rows: Rows) -> list[Request]:
    """Requests that have sampled something in the row that they have: who has not would never get on."""
    running = [request for request in rows.requests if request is not None and rows.runs(request)]
    return [request for request in running if rows.num_tokens[request.row] > request.prefill_len]


def evict_all(cache: KVCache) -> None:
    """Evicts whatever no request and no session depends on."""
    for group in cache.groups:
        group.num_evicted += cache.tree.evict(group.component, group.component.evictable)
