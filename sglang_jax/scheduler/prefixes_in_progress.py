"""Prefixes that running prompts are about to compute and that waiting requests share."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sglang_jax.mem_cache.data_parallel import AnyCache
from sglang_jax.mem_cache.radix_tree import TOKEN_BYTES, Namespace, Node, Probe
from sglang_jax.mem_cache.row_kv import MAX_BRANCHES
from sglang_jax.scheduler.request import Request

Offer = tuple[int, Namespace, int, bytes]
"""A page about to be computed: its rank and namespace, the id of its parent node, and its tokens."""


class PrefixesInProgress:
    """Prompts that are being computed. A computed page serves all requests that share the prefix up to it, so a waiting
    request whose next page is an *offer* waits a step. A state serves only at one length: the running prompt that
    shares the longest prefix is asked to end a chunk where the waiting request diverges, and the request waits for
    that."""

    def __init__(self, cache: AnyCache, prompts: list[Request]) -> None:
        self._cache = cache
        self._by_length = cache.least_gain > 0
        self._prompts: list[Request] = []
        self._offers: dict[Offer, Request] = {}
        for request in prompts:
            self.add(request)

    def add(self, request: Request) -> None:
        if self._by_length:
            self._prompts.append(request)
            return
        record, page = request.record, self._cache.page_size
        first = record.cache_protected_len
        if first + page <= request.prefill_len:
            rank = self._cache.of_row(record.row).rank
            self._offers[_offer(request, rank, record.locked_node, first, page)] = request

    def will_serve(self, request: Request, probe: Probe) -> bool:
        """Whether more of a waiting request than its `probe` found is about to be cached for another request."""
        if self._by_length:
            return self._will_keep_state(request, probe)
        return self._server_of(request, probe) is not None

    def length_of(self, request: Request, probe: Probe) -> int:
        """Tokens of a waiting request that are cached where its `probe` was, or are about to be."""
        server = self._server_of(request, probe)
        return probe.length if server is None else _common_prefix(server.tokens, request.tokens)

    def _server_of(self, request: Request, probe: Probe) -> Request | None:
        """The prompt that is about to compute the next page of a waiting request."""
        cached, page = probe.length, self._cache.page_size
        if not probe.whole or cached + page > request.match_limit:
            return None
        return self._offers.get(_offer(request, probe.rank, probe.node, cached, page))

    def note_sharers(self, seated: list[Request], waiting: Iterable[Request]) -> None:
        """Makes seated prompts keep states where waiting requests diverge from them, even if these do not wait."""
        if not self._by_length or not self._cache.reuse:
            return
        others = list(waiting)
        for one in seated:
            for other in others:
                if len(one.record.branches) >= MAX_BRANCHES:
                    break
                if (length := self._useful_length(one, other, one.record.state_len)) is not None:
                    self._cache.branch_at(one.record, length)

    def _will_keep_state(self, request: Request, probe: Probe) -> bool:
        sharers = [
            (length, number)
            for number, one in enumerate(self._prompts)
            if (length := self._useful_length(one, request, probe.length)) is not None
        ]
        sharers.sort(reverse=True)
        return any(self._cache.branch_at(self._prompts[number].record, length) for length, number in sharers)

    def _useful_length(self, one: Request, waiting: Request, known: int) -> int | None:
        """The length at which a state of prompt `one` would serve the waiting request better than its cached state
        after `known` tokens; None if there is no such length."""
        page = self._cache.page_size
        limit, least = waiting.match_limit // page * page, known + max(self._cache.least_gain, page)
        if least > limit or one.namespace != waiting.namespace:
            return None
        if not one.tokens.startswith(waiting.tokens[: least * TOKEN_BYTES]):
            return None
        return min(_common_prefix(one.tokens, waiting.tokens) // page * page, limit)


def _offer(request: Request, rank: int, node: Node, first: int, page: int) -> Offer:
    return rank, request.namespace, node.id, request.tokens[first * TOKEN_BYTES : (first + page) * TOKEN_BYTES]


def _common_prefix(one: bytes, other: bytes) -> int:
    size = min(len(one), len(other)) // TOKEN_BYTES
    different = np.frombuffer(one, np.int32, size) != np.frombuffer(other, np.int32, size)
    return int(different.argmax()) if different.any() else size
