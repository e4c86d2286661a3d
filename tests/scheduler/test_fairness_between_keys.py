"""Keys that wait have equal shares under every policy, whatever requests the policy prefers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from helpers.scheduling import Bench

from sglang_jax.config import SchedulePolicy
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler import chunking, policies
from sglang_jax.scheduler.admission import AGED_TURN, PASSED_TURN, Admission
from sglang_jax.scheduler.policies import LongestPrefixFirst
from sglang_jax.scheduler.request import Request

HOT = [1 + (7 * i) % 37 for i in range(16)]
CROWD = 100
"""Number of requests of the key that the policy prefers."""


def endless(tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, seed=5, ignore_eos=True)


class Keys:
    """A server with one row and a waiting crowd of one key that the policy prefers, each a separate client request: its
    prompts are cached, its outputs are longest, its priority is highest."""

    def __init__(self, policy: SchedulePolicy, **sizes: int) -> None:
        options = {"schedule_policy": policy}
        self.bench = Bench(**{"rows": 1, "chunk": 16, "budget": 32, "scribble": False, **sizes}, options=options)
        self.keys: dict[int, str] = {}
        self.bench.add(HOT, sampling=endless(1), tenant="crowd", flow="first")
        self.bench.run()

    def add_crowd(self, count: int, priority: int = 0) -> None:
        for _ in range(count):
            self._add([*HOT, 1 + len(self.keys) % 37], 6, "crowd", priority)

    def add_other(self, count: int, length: int = 2) -> None:
        for _ in range(count):
            self._add([38, *[1 + len(self.keys) % 37] * (length - 1)], 1, "other", 0)

    def add_short(self, count: int) -> None:
        """Prompts of the crowd that are shorter than the rest of the running one."""
        for _ in range(count):
            number = len(self.keys)
            self._add([1 + number % 37, 1 + number // 37, 36, 35], 1, "crowd", 0)

    def _add(self, prompt: list[int], output: int, key: str, priority: int) -> None:
        flow = f"one {len(self.keys)}"
        request = self.bench.add(prompt, sampling=endless(output), tenant=key, flow=flow, priority=priority)
        self.keys[request] = key

    def given(self) -> list[str]:
        """The keys of the requests that have started, in order."""
        return [self.keys[request] for request in self.bench.channel.cached if request in self.keys]

    def rows_before_other(self, most_steps: int = 2000) -> int:
        """Rows that the crowd gets until the other key has one."""
        before = len(self.given())
        for _ in range(most_steps):
            if "other" in self.given():
                break
            self.bench.scheduler.step()
        return self.given().index("other") - before


def run_newcomer(policy: SchedulePolicy) -> None:
    keys = Keys(policy)
    keys.add_crowd(CROWD)
    for _ in range(20):
        keys.bench.scheduler.step()
    keys.add_other(1)
    assert keys.rows_before_other() <= 2


def run_equal_shares(policy: SchedulePolicy) -> None:
    """Every eighth row goes to the oldest; requests of one key cost several times as much as those of the other."""
    keys = Keys(policy)
    keys.add_crowd(CROWD)
    keys.add_other(CROWD)
    while len(keys.given()) < CROWD:
        keys.bench.scheduler.step()
    costs = {"crowd": 1 + 6, "other": 2 + 1}
    tokens = {key: keys.given()[:CROWD].count(key) * cost for key, cost in costs.items()}
    assert abs(tokens["crowd"] - tokens["other"]) <= CROWD // AGED_TURN * max(costs.values()), tokens


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_a_crowd_of_one_key_does_not_make_another_wait(policy: SchedulePolicy) -> None:
    """Regression: under lof a request waited until all 1,000 of another key had run: 5,078 steps."""
    run_newcomer(policy)


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_keys_have_equal_shares(policy: SchedulePolicy) -> None:
    run_equal_shares(policy)


def run_less_work(policy: SchedulePolicy) -> None:
    """A long prompt in progress takes all tokens of each step, and short ones of the crowd go before it."""
    keys = Keys(policy, rows=4, pages=400, context=1200)
    keys._add([1 + (5 * number) % 37 for number in range(1000)], 1, "crowd", 0)
    keys.bench.scheduler.step()
    keys.add_short(CROWD)
    for _ in range(4):
        keys.bench.scheduler.step()
    keys.add_other(1, length=12)
    assert keys.rows_before_other() <= PASSED_TURN + 1


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_less_work_goes_before_another_key_for_a_few_rows(policy: SchedulePolicy) -> None:
    run_less_work(policy)


def run_higher_priority() -> None:
    keys = Keys(SchedulePolicy.PRIORITY)
    keys.add_crowd(CROWD, priority=5)
    for _ in range(20):
        keys.bench.scheduler.step()
    keys.add_other(1)
    assert 1 < keys.rows_before_other() <= PASSED_TURN + 1


def test_a_key_with_a_higher_priority_goes_before_another_for_a_few_rows() -> None:
    """Regression: it waited until all 100 had run."""
    run_higher_priority()


def steps_behind(backlog: int, policy: SchedulePolicy, tenant: str) -> int:
    """Steps of a prompt behind `backlog` prompts of the same length, all of one request of the key `A`."""
    bench = Bench(
        pages=512, rows=4, chunk=32, budget=64, context=256, scribble=False, options={"schedule_policy": policy}
    )
    chance = random.Random(3)

    def ask(tenant: str, flow: str) -> int:
        return bench.add([chance.randrange(1, 39) for _ in range(100)], tenant=tenant, flow=flow, sampling=endless(2))

    for _ in range(backlog):
        ask("A", "batch")
    for _ in range(6):
        bench.scheduler.step()
    asked, steps = ask(tenant, "single"), 0
    while asked not in bench.channel.finished:
        bench.scheduler.step()
        steps += 1
    return steps


def run_backlog(policy: SchedulePolicy, tenant: str) -> None:
    assert steps_behind(60, policy, tenant) <= steps_behind(15, policy, tenant) + 4


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_a_longer_backlog_of_one_key_does_not_make_another_wait_longer(policy: SchedulePolicy) -> None:
    """Regression: prompts of equal length were computed in the order of arrival: 60 of them delayed another by 186
    steps."""
    run_backlog(policy, "B")


@pytest.mark.parametrize("policy", [each for each in SchedulePolicy if each is not SchedulePolicy.LOF])
def test_a_longer_backlog_does_not_make_another_request_of_the_same_key_wait_longer(policy: SchedulePolicy) -> None:
    """lof has its own order among the requests of a key."""
    run_backlog(policy, "A")


def by_policy_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tenants do not alternate among the requests that a policy orders."""
    monkeypatch.setattr(policies, "_tenant_only", lambda request: ("", ""))


def longest_prefix_of_any_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def sort(self: LongestPrefixFirst, window: list[Request]) -> Iterator[Request]:
        return iter(sorted(window, key=self._cached_prefix, reverse=True))

    monkeypatch.setattr(LongestPrefixFirst, "_longest_prefix_first", sort)


def never_return_to_the_overtaken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Admission, "_passed", lambda *arguments: None)


def computed_in_the_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunking, "_seniority", lambda request: (request.sequence, 0))


FAULTS = [
    (by_policy_only, lambda: run_newcomer(SchedulePolicy.LOF)),
    (by_policy_only, lambda: run_equal_shares(SchedulePolicy.LOF)),
    (longest_prefix_of_any_key, lambda: run_newcomer(SchedulePolicy.LPM)),
    (never_return_to_the_overtaken, lambda: run_less_work(SchedulePolicy.FCFS)),
    (never_return_to_the_overtaken, run_higher_priority),
    (computed_in_the_order_of_arrival, lambda: run_backlog(SchedulePolicy.FCFS, "B")),
    (computed_in_the_order_of_arrival, lambda: run_backlog(SchedulePolicy.FCFS, "A")),
]


@pytest.mark.parametrize(("plant", "run"), FAULTS)
def test_a_planted_fault_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], run: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run()
