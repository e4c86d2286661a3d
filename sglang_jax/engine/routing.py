"""Which replica a request goes to. Policies know prompts, loads and nothing else; they neither wait nor send."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sglang_jax.config import LoadBalanceMethod
from sglang_jax.engine.prefix_map import PrefixMap
from sglang_jax.mem_cache.radix_tree import TOKEN_BYTES, Namespace


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that takes requests. `load`: completions that it runs or that wait there."""

    index: int
    load: int


class RoutingPolicy(Protocol):
    """Chooses among candidates, of which there is at least one, in the order of their indices."""

    def choose(self, tokens: bytes, namespace: Namespace, candidates: Sequence[Candidate]) -> int:
        """The index of the replica for a prompt (int32 bytes)."""
        ...

    def sent(self, index: int, tokens: bytes, namespace: Namespace) -> None:
        """A prompt goes to this replica, whoever chose it."""
        ...

    def reset(self, index: int, capacity: int) -> None:
        """The replica's cache is empty now, and holds `capacity` tokens."""
        ...


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, tokens: bytes, namespace: Namespace, candidates: Sequence[Candidate]) -> int:
        """See `RoutingPolicy.choose`."""
        return _next_after(self._last, candidates)

    def sent(self, index: int, tokens: bytes, namespace: Namespace) -> None:
        """See `RoutingPolicy.sent`."""
        self._last = index

    def reset(self, index: int, capacity: int) -> None:
        """Nothing is remembered of a replica."""


class LeastLoaded:
    """The replica with the least to do; among equals one after the other."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, tokens: bytes, namespace: Namespace, candidates: Sequence[Candidate]) -> int:
        """See `RoutingPolicy.choose`."""
        least = min(candidate.load for candidate in candidates)
        return _next_after(self._last, [candidate for candidate in candidates if candidate.load == least])

    def sent(self, index: int, tokens: bytes, namespace: Namespace) -> None:
        """See `RoutingPolicy.sent`."""
        self._last = index

    def reset(self, index: int, capacity: int) -> None:
        """Nothing is remembered of a replica."""


MOST_AHEAD = 64
"""Completions by which a replica may be ahead of another, at most."""


@dataclass(frozen=True, slots=True)
class Balance:
    """When a prefix decides, and when loads are too uneven for that. The same rule, with the same defaults, as in
    SGLang's router.

    - `least_share`: a match counts if it is more than this share of the prompt.
    - `absolute`, `relative`: loads are uneven if the largest is more than `absolute` above the smallest, and more than
      `relative` times as large.
    """

    least_share: float = 0.3
    absolute: int = MOST_AHEAD
    relative: float = 1.5

    def uneven(self, candidates: Sequence[Candidate]) -> bool:
        """Somebody waits here while there is room elsewhere."""
        loads = [candidate.load for candidate in candidates]
        return max(loads) - min(loads) > self.absolute and max(loads) > self.relative * min(loads)


class CacheAware:
    """The replica that has the longest prefix of the prompt; the least loaded one where none has much of it, or where
    loads are uneven.

    What a replica has is told by a `PrefixMap` of the prompts that it was given.
    """

    def __init__(self, page_size: int, balance: Balance) -> None:
        self._page_size = page_size
        self._balance = balance
        self._maps: dict[int, PrefixMap] = {}

    def choose(self, tokens: bytes, namespace: Namespace, candidates: Sequence[Candidate]) -> int:
        """See `RoutingPolicy.choose`."""
        if not self._balance.uneven(candidates):
            matches = {one.index: self._maps[one.index].match(tokens, namespace) for one in candidates}
            longest = max(matches.values())
            if longest * TOKEN_BYTES > self._balance.least_share * len(tokens):
                return self._least([one for one in candidates if matches[one.index] == longest])
        return self._least(candidates)

    def sent(self, index: int, tokens: bytes, namespace: Namespace) -> None:
        """See `RoutingPolicy.sent`."""
        self._maps[index].add(tokens, namespace)

    def reset(self, index: int, capacity: int) -> None:
        """See `RoutingPolicy.reset`."""
        self._maps[index] = PrefixMap(self._page_size, capacity)

    def _least(self, candidates: Sequence[Candidate]) -> int:
        """The least loaded one; among equals the one that remembers least, whose cache has most room."""
        return min(candidates, key=lambda one: (one.load, self._maps[one.index].num_tokens, one.index)).index


def create_policy(method: LoadBalanceMethod, page_size: int, balance: Balance) -> RoutingPolicy:
    """The policy of this name. Before a replica is a candidate, `reset` is called for it."""
    match method:
        case LoadBalanceMethod.CACHE_AWARE:
            return CacheAware(page_size, balance)
        case LoadBalanceMethod.ROUND_ROBIN:
            return RoundRobin()
        case LoadBalanceMethod.LEAST_LOADED:
            return LeastLoaded()


def sticky_choice(routing_key: str, candidates: Sequence[Candidate]) -> int:
    """The replica of a key: the same as long as it is among the candidates. When it is not, its keys are spread over
    the others, and those of the others stay where they are.

    Rendezvous hashing (Thaler and Ravishankar 1998).
    """

    def weight(candidate: Candidate) -> bytes:
        return hashlib.blake2b(routing_key.encode(), digest_size=8, salt=candidate.index.to_bytes(8, "little")).digest()

    return max(candidates, key=weight).index


def session_home(session_id: str, replicas: int) -> int:
    """The replica of a session, of so many, whether it serves or not: the same for every router that asks."""
    return sticky_choice(session_id, [Candidate(index, 0) for index in range(replicas)])


def _next_after(last: int, candidates: Sequence[Candidate]) -> int:
    """The first index above `last`; the smallest if there is none."""
    return min(candidates, key=lambda one: (one.index <= last, one.index)).index
