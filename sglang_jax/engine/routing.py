"""Policies that choose the replica of a request from prompts and loads; they neither wait nor send."""

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
    """A replica that takes requests. `load`: completions that are running or queued there."""

    index: int
    load: int


class RoutingPolicy(Protocol):
    """Chooses among candidates: at least one, in the order of their indices."""

    def choose(self, tokens: bytes, namespace: Namespace, candidates: Sequence[Candidate]) -> int:
        """Returns the index of the replica for a prompt (int32 bytes)."""
        ...

    def note_sent(self, index: int, tokens: bytes, namespace: Namespace) -> None:
        """Notes that a prompt is sent to this replica, whether the policy chose it or not."""
        ...

    def reset(self, index: int, capacity: int) -> None:
        """Notes that the replica's cache is empty now, and holds `capacity` tokens."""
        ...


class RoundRobin:
    def __init__(self) -> None:
        self._last = -1

    def choose(self, tokens: bytes, namespace: Namespace, candidates: Sequence[Candidate]) -> int:
        return _next_after(self._last, candidates)

    def note_sent(self, index: int, tokens: bytes, namespace: Namespace) -> None:
        self._last = index

    def reset(self, index: int, capacity: int) -> None:
        """Does nothing: it stores nothing about replicas."""


class LeastLoaded:
    """Chooses the replica with the lowest load; rotates among equals."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, tokens: bytes, namespace: Namespace, candidates: Sequence[Candidate]) -> int:
        least = min(candidate.load for candidate in candidates)
        return _next_after(self._last, [candidate for candidate in candidates if candidate.load == least])

    def note_sent(self, index: int, tokens: bytes, namespace: Namespace) -> None:
        self._last = index

    def reset(self, index: int, capacity: int) -> None:
        """Does nothing: it stores nothing about replicas."""


MAX_AHEAD = 64
"""Maximum completions by which a replica's load may exceed another's."""


@dataclass(frozen=True, slots=True)
class Balance:
    """When a cached prefix decides, and when loads are too uneven for that; rule and defaults of SGLang's router.

    - `min_share`: a match counts if it is more than this share of the prompt.
    - `absolute`, `relative`: loads are uneven if the largest is more than `absolute` above the smallest, and more than
      `relative` times as large.
    """

    min_share: float = 0.3
    absolute: int = MAX_AHEAD
    relative: float = 1.5

    def uneven(self, candidates: Sequence[Candidate]) -> bool:
        """Whether requests may wait at one replica while another has room."""
        loads = [candidate.load for candidate in candidates]
        return max(loads) - min(loads) > self.absolute and max(loads) > self.relative * min(loads)


class CacheAware:
    """Chooses the replica with the longest cached prefix of the prompt, as estimated by a `PrefixMap` of the prompts
    sent to each; the least loaded one if no match is long enough, or if loads are uneven."""

    def __init__(self, page_size: int, balance: Balance) -> None:
        self._page_size = page_size
        self._balance = balance
        self._maps: dict[int, PrefixMap] = {}

    def choose(self, tokens: bytes, namespace: Namespace, candidates: Sequence[Candidate]) -> int:
        if not self._balance.uneven(candidates):
            matches = {one.index: self._maps[one.index].match(tokens, namespace) for one in candidates}
            longest = max(matches.values())
            if longest * TOKEN_BYTES > self._balance.min_share * len(tokens):
                return self._least([one for one in candidates if matches[one.index] == longest])
        return self._least(candidates)

    def note_sent(self, index: int, tokens: bytes, namespace: Namespace) -> None:
        self._maps[index].add(tokens, namespace)

    def reset(self, index: int, capacity: int) -> None:
        self._maps[index] = PrefixMap(self._page_size, capacity)

    def _least(self, candidates: Sequence[Candidate]) -> int:
        """The least loaded candidate; among equals, the one with the fewest remembered tokens."""
        return min(candidates, key=lambda one: (one.load, self._maps[one.index].num_tokens, one.index)).index


def create_policy(method: LoadBalanceMethod, page_size: int, balance: Balance) -> RoutingPolicy:
    """Creates the policy of this name. Call its `reset` for a replica before the replica is a candidate."""
    match method:
        case LoadBalanceMethod.CACHE_AWARE:
            return CacheAware(page_size, balance)
        case LoadBalanceMethod.ROUND_ROBIN:
            return RoundRobin()
        case LoadBalanceMethod.LEAST_LOADED:
            return LeastLoaded()


def sticky_choice(routing_key: str, candidates: Sequence[Candidate]) -> int:
    """Returns the replica of a key: always the same while it is a candidate; meanwhile, keys of other replicas stay
    where they are. Rendezvous hashing (Thaler and Ravishankar 1998)."""

    def weight(candidate: Candidate) -> bytes:
        return hashlib.blake2b(routing_key.encode(), digest_size=8, salt=candidate.index.to_bytes(8, "little")).digest()

    return max(candidates, key=weight).index


def session_home(session_id: str, replicas: int) -> int:
    """Returns the replica of a session, whether it serves or not; the same in all routers."""
    return sticky_choice(session_id, [Candidate(index, 0) for index in range(replicas)])


def _next_after(last: int, candidates: Sequence[Candidate]) -> int:
    """The first index above `last`; the smallest if there is none."""
    return min(candidates, key=lambda one: (one.index <= last, one.index)).index
