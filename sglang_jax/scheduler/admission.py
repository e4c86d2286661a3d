"""Gives rows to waiting requests, as far as rows, pages and the reserve allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from sglang_jax.mem_cache.kv_cache import KVCache
from sglang_jax.scheduler.request import Request, RequestState
from sglang_jax.scheduler.request_table import RequestTable
from sglang_jax.scheduler.reserve import CLIP, NewTokenReserve
from sglang_jax.scheduler.waiting_queue import WaitingQueue

MAX_SHARERS_PASSED = 64
"""Requests that may be passed over in one step because a prefix of theirs is being computed."""

RETRY_STEPS = 8
"""A refused request is tried again after this many steps even if nothing was released: the reserve decays."""


class Admission:
    """Takes requests from the queue in its order and stops at the first that does not fit, so that none starves. Those
    that could not fit even alone are refused on the way.

    A request whose prompt begins like one that is being computed is passed over until that prefix is in the tree:
    computing it once and waiting a step is cheaper than computing it twice.
    """

    def __init__(
        self,
        cache: KVCache,
        table: RequestTable,
        queue: WaitingQueue,
        prefilling: list[Request],
        reserve: NewTokenReserve,
        refuse: Callable[[Request], None],
    ) -> None:
        self._cache = cache
        self._table = table
        self._queue = queue
        self._prefilling = prefilling
        self._reserve = reserve
        self._refuse = refuse
        self._retry_in = 0

    def retry(self) -> None:
        """Something was released, cached or queued: look at the queue again."""
        self._retry_in = 0

    def admit(self, allowance: int) -> Iterator[Request]:
        """Requests that got a row, one by one; stop asking when the step is full.

        Each is in PREFILL and among `prefilling` when it is handed out.
        """
        if not self._queue or allowance <= 0 or not self._cache.num_free_rows:
            return
        if self._retry_in > 0:
            self._retry_in -= 1
            return
        passed = 0
        for request in self._queue.first(self._cache.num_free_rows + MAX_SHARERS_PASSED):
            if not self._cache.num_free_rows:
                return
            if self._cache.pages_for(request.prefill_len) > self._cache.pool.total:
                self._refuse(request)
            elif self._should_wait(request):
                passed += 1
                if passed == MAX_SHARERS_PASSED:
                    return
            elif self._seat(request):
                yield request
            else:
                self._retry_in = RETRY_STEPS
                return

    def cached_prefix(self, request: Request) -> int:
        """Tokens of a waiting request that the tree holds."""
        return self._cache.peek(request.tokens, request.match_limit, request.namespace)

    def _seat(self, request: Request) -> bool:
        alone = not self._cache.open_rows
        record = self._cache.open_row(request.tokens, request.match_limit, request.namespace)
        request.kv = record
        needed = self._cache.pages_for(request.prefill_len) - record.kv_allocated_len // self._cache.page_size
        if needed + (0 if alone else self._reserved_pages(request)) > self._cache.available_pages:
            self._cache.release_kv_cache(record, b"", insert=False)
            request.kv = None
            return False
        self._queue.remove(request)
        request.move_to(RequestState.PREFILL)
        self._table.seat(request)
        self._prefilling.append(request)
        return True

    def _reserved_pages(self, newcomer: Request) -> int:
        """Pages that running requests need for the rest of their prompts, and the share kept for their output and
        the newcomer's."""
        cache, table = self._cache, self._table
        rows = np.fromiter(cache.open_rows, np.int32, len(cache.open_rows))
        rows = rows[rows != newcomer.row]
        known = np.maximum(table.num_tokens[rows], cache.lengths.kv_allocated[rows])
        output = np.minimum(table.total_len[rows] - known, CLIP).clip(0).sum()
        output += min(newcomer.total_len - newcomer.prefill_len, CLIP)
        prompts = sum(
            cache.pages_for(request.prefill_len) - cache.pages_for(request.record.kv_allocated_len)
            for request in self._prefilling
        )
        return prompts + cache.pages_for(int(output * self._reserve.ratio))

    def _should_wait(self, request: Request) -> bool:
        """True where a request in prefill is computing more of this one's prompt than the tree holds."""
        if not self._cache.reuse:
            return False
        shared = max((self._shared_prefix(request, leader) for leader in self._prefilling), default=0)
        return shared > 0 and shared > self.cached_prefix(request)

    def _shared_prefix(self, request: Request, leader: Request) -> int:
        """Whole pages' tokens that both begin with and `request` may take from the cache."""
        page = self._cache.page_size
        limit = min(request.match_limit, leader.prefill_len) // page * page
        same_start = leader.tokens[: page * 4] == request.tokens[: page * 4]
        if leader.namespace != request.namespace or limit == 0 or not same_start:
            return 0
        different = request.token_slice(0, limit) != leader.token_slice(0, limit)
        same = int(different.argmax()) if different.any() else limit
        return same // page * page
