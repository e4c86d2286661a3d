"""Routing policies, and what they remember about replicas."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_jax.config import LoadBalanceMethod
from sglang_jax.engine.prefix_map import PrefixMap
from sglang_jax.engine.routing import (
    Balance,
    CacheAware,
    Candidate,
    LeastLoaded,
    RoundRobin,
    RoutingPolicy,
    create_policy,
    sticky_choice,
)

PAGE = 2
# Few distinct tokens, so that prompts share prefixes and split each other's.
prompts = st.lists(st.integers(0, 2), max_size=14)
namespaces = st.sampled_from([None, "a"])
loads = st.lists(st.integers(0, 300), min_size=1, max_size=6)


def encoded(tokens: list[int]) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def candidates(loads: list[int]) -> list[Candidate]:
    return [Candidate(index, load) for index, load in enumerate(loads)]


def common_pages(one: list[int], other: list[int]) -> int:
    """Tokens of the longest run of whole pages that both start with."""
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return same // PAGE * PAGE


@given(st.lists(st.tuples(prompts, namespaces), max_size=20), prompts, namespaces)
def test_a_map_with_room_knows_every_prefix(
    added: list[tuple[list[int], str | None]], wanted: list[int], namespace: str | None
) -> None:
    known = PrefixMap(PAGE, 10_000)
    for prompt, where in added:
        known.add(encoded(prompt), where)
    expected = max((common_pages(wanted, prompt) for prompt, where in added if where == namespace), default=0)
    assert known.match(encoded(wanted), namespace) == expected
    distinct = {(where, tuple(prompt[:end])) for prompt, where in added for end in range(PAGE, len(prompt) + 1, PAGE)}
    assert known.num_tokens == PAGE * len(distinct)


@given(st.lists(st.tuples(prompts, namespaces), min_size=1, max_size=30), st.integers(1, 12))
def test_a_full_map_never_forgets_the_latest_prompt(added: list[tuple[list[int], str | None]], capacity: int) -> None:
    known, roomy = PrefixMap(PAGE, capacity), PrefixMap(PAGE, 10_000)
    limit = max(capacity // PAGE, 1) * PAGE
    for prompt, where in added:
        for one in (known, roomy):
            one.add(encoded(prompt), where)
        assert known.num_tokens <= limit
        assert known.match(encoded(prompt), where) == min(len(prompt) // PAGE * PAGE, limit)
    for prompt, where in added:
        assert known.match(encoded(prompt), where) <= roomy.match(encoded(prompt), where)


def test_a_growing_prompt_stays_one_run() -> None:
    known = PrefixMap(PAGE, 10_000)
    for length in range(PAGE, 40 * PAGE + 1, 3 * PAGE):
        known.add(encoded(list(range(length))), None)
        assert known._tree.num_nodes == 1
    known.add(encoded([*range(2 * PAGE), 7]), None)
    assert known.match(encoded(list(range(40 * PAGE))), None) == known.num_tokens == 40 * PAGE


def test_the_least_recently_used_is_evicted_first() -> None:
    known = PrefixMap(PAGE, 8)
    first, second, third = [0] * 4, [1] * 4, [2] * 4
    known.add(encoded(first), None)
    known.add(encoded(second), None)
    known.add(encoded(first), None)
    known.add(encoded(third), None)
    assert [known.match(encoded(one), None) for one in (first, second, third)] == [4, 0, 4]


def test_a_lookup_does_not_count_as_use() -> None:
    known = PrefixMap(PAGE, 8)
    first, second, third = [0] * 4, [1] * 4, [2] * 4
    known.add(encoded(first), None)
    known.add(encoded(second), None)
    known.match(encoded(first), None)
    known.add(encoded(third), None)
    assert [known.match(encoded(one), None) for one in (first, second, third)] == [0, 4, 4]


def ready(policy: RoutingPolicy, count: int, capacity: int = 10_000) -> RoutingPolicy:
    for index in range(count):
        policy.reset(index, capacity)
    return policy


def route(policy: RoutingPolicy, tokens: list[int], loads: list[int]) -> int:
    index = policy.choose(encoded(tokens), None, candidates(loads))
    policy.note_sent(index, encoded(tokens), None)
    return index


@given(st.sampled_from(LoadBalanceMethod), st.lists(st.tuples(prompts, st.sets(st.integers(0, 4), min_size=1))))
def test_every_policy_chooses_a_candidate(
    method: LoadBalanceMethod, requests: list[tuple[list[int], set[int]]]
) -> None:
    policy = ready(create_policy(method, PAGE, Balance()), 5)
    for prompt, serving in requests:
        index = policy.choose(encoded(prompt), None, [Candidate(index, index) for index in sorted(serving)])
        assert index in serving
        policy.note_sent(index, encoded(prompt), None)


@given(st.integers(1, 6), st.integers(1, 50), loads)
def test_round_robin_gives_each_the_same_share(count: int, requests: int, loads: list[int]) -> None:
    policy = RoundRobin()
    shares = Counter(route(policy, [], (loads * 6)[:count]) for _ in range(requests))
    assert max(shares.values()) - min(shares.get(index, 0) for index in range(count)) <= 1


def test_round_robin_passes_over_replicas_that_are_gone() -> None:
    policy = RoundRobin()
    chosen = []
    for serving in ([0, 1, 2], [0, 2], [0, 2], [0, 1, 2], [1], [0, 1, 2]):
        index = policy.choose(b"", None, [Candidate(one, 0) for one in serving])
        policy.note_sent(index, b"", None)
        chosen.append(index)
    assert chosen == [0, 2, 0, 1, 1, 2]


@given(loads)
def test_least_loaded_takes_the_least_loaded(loads: list[int]) -> None:
    assert loads[route(LeastLoaded(), [], loads)] == min(loads)


def test_least_loaded_alternates_among_equals() -> None:
    policy = LeastLoaded()
    assert [route(policy, [], [1, 0, 0]) for _ in range(4)] == [1, 2, 1, 2]


@given(st.lists(prompts, max_size=15), prompts, loads)
def test_cache_aware_follows_the_longest_prefix_or_the_load(
    sent: list[list[int]], wanted: list[int], loads: list[int]
) -> None:
    balance = Balance(absolute=32)
    policy = CacheAware(PAGE, balance)
    ready(policy, len(loads))
    for number, prompt in enumerate(sent):
        policy.note_sent(number % len(loads), encoded(prompt), None)
    matches = [
        max((common_pages(wanted, prompt) for prompt in sent[index :: len(loads)]), default=0)
        for index in range(len(loads))
    ]
    chosen = policy.choose(encoded(wanted), None, candidates(loads))
    uneven = max(loads) - min(loads) > 32 and max(loads) > 1.5 * min(loads)
    if uneven or max(matches) <= 0.3 * len(wanted):
        assert loads[chosen] == min(loads)
    else:
        assert matches[chosen] == max(matches)
        assert loads[chosen] == min(load for load, match in zip(loads, matches, strict=True) if match == max(matches))


def test_a_cold_prompt_goes_to_the_replica_with_most_room() -> None:
    policy = ready(CacheAware(PAGE, Balance()), 3)
    assert [route(policy, [number] * size, [0, 0, 0]) for number, size in enumerate((8, 4, 4, 4, 4))] == [0, 1, 2, 1, 2]


def test_a_restarted_replica_has_no_prefixes() -> None:
    policy = ready(CacheAware(PAGE, Balance()), 2)
    assert route(policy, [7] * 8, [0, 0]) == 0
    assert route(policy, [7] * 8, [9, 0]) == 0
    policy.reset(0, 10_000)
    assert route(policy, [7] * 8, [9, 0]) == 1


def test_prefixes_of_other_namespaces_do_not_count() -> None:
    policy = ready(CacheAware(PAGE, Balance()), 2)
    policy.note_sent(0, encoded([7] * 8), "salt")
    assert policy.choose(encoded([7] * 8), None, candidates([9, 0])) == 1
    assert policy.choose(encoded([7] * 8), "salt", candidates([9, 0])) == 0


@given(st.text(min_size=1), st.sets(st.integers(0, 20), min_size=2))
def test_a_key_moves_only_when_its_replica_is_gone(key: str, serving: set[int]) -> None:
    everyone = [Candidate(index, 0) for index in sorted(serving)]
    home = sticky_choice(key, everyone)
    assert sticky_choice(key, [Candidate(one.index, 7) for one in reversed(everyone)]) == home
    for gone in serving - {home}:
        assert sticky_choice(key, [one for one in everyone if one.index != gone]) == home
    second = sticky_choice(key, [one for one in everyone if one.index != home])
    assert second != home


def test_keys_are_spread_evenly() -> None:
    shares = Counter(sticky_choice(f"user-{number}", candidates([0] * 4)) for number in range(4000))
    assert all(850 < shares[index] < 1150 for index in range(4)), shares


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_groups_stay_together_in_any_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    policy = ready(CacheAware(PAGE, Balance()), 4)
    homes: dict[int, set[int]] = {}
    for group in rng.permutation(np.repeat(np.arange(12), 5)).tolist():
        index = route(policy, [group] * 20 + rng.integers(100, 200, 10).tolist(), [0] * 4)
        homes.setdefault(group, set()).add(index)
    assert all(len(where) == 1 for where in homes.values())
    shares = Counter(index for where in homes.values() for index in where)
    assert all(1 <= shares[index] <= 6 for index in range(4)), shares


@pytest.mark.parametrize(
    ("loads", "uneven"),
    [([0, 64], False), ([0, 65], True), ([100, 150], False), ([200, 290], False), ([200, 301], True), ([500], False)],
)
def test_when_loads_are_uneven(loads: list[int], uneven: bool) -> None:
    assert Balance().uneven(candidates(loads)) is uneven
