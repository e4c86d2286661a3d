"""Equal shares for tenants that wait, and for the client requests of each, checked against an independent account of
the tokens served."""

from __future__ import annotations

import copy
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from helpers.scheduling import Bench

from sglang_jax.config import SchedulePolicy
from sglang_jax.queues.fair_queue import FairQueue, FlowKey, Shares
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.admission import AGED_TURN, GUEST_ROWS, Admission, _Look
from sglang_jax.scheduler.policies import FairOrder, fair_order
from sglang_jax.scheduler.request import Request, Waiting
from sglang_jax.scheduler.waiting_queue import WaitingQueue

MOST = 40
"""Tokens of the largest request."""


def waiting(sequence: int, tenant: str, flow: str, cost: int) -> Request:
    request = Request(
        id=sequence,
        sequence=sequence,
        sampling=SamplingParams(),
        seed=0,
        tokens=b"",
        prompt_len=0,
        total_len=0,
        stop_ids=np.zeros(0, np.int32),
        stream=False,
        top_logprobs=-1,
        next_prompt_logprob=0,
        published_prompt_logprob=0,
        namespace=None,
        priority=0,
        flow_key=(tenant, flow),
    )
    request.waiting = Waiting(queued=True, cost=cost)
    return request


class Books:
    """For each pair of contenders, the tokens that each was served while both waited without a pause."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], Counter[str]] = {}

    def note(self, present: set[str], served: str | None, tokens: int) -> None:
        """`present`: the contenders that wait, or waited until `served` got `tokens` tokens."""
        self._since = {pair: given for pair, given in self._since.items() if present.issuperset(pair)}
        for pair in combinations(sorted(present), 2):
            given = self._since.setdefault(pair, Counter())
            if served in pair:
                given[served] += tokens
            one, other = pair
            difference = abs(given[one] - given[other])
            assert difference <= 2 * MOST, f"{one} and {other} waited, and one was given {difference} tokens more"


class Crowd:
    """Random arrivals, services and departures, with the account kept."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.turns = fair_order()
        self.waits: dict[FlowKey, list[Request]] = defaultdict(list)
        self.tenants = Books()
        self.flows: dict[str, Books] = defaultdict(Books)
        self.count = 0

    def arrive(self) -> None:
        tenant = self.random.choice("abc")
        flow = self.random.choice(["p", "q", f"new {self.count}"])
        for _ in range(self.random.choice([1, 1, 5])):
            self.count += 1
            request = waiting(self.count, tenant, flow, self.random.choice([1, 10, MOST]))
            self.turns.add(request)
            self.waits[request.flow_key].append(request)

    def leave(self) -> None:
        requests = [request for flow in self.waits.values() for request in flow]
        if requests:
            request = self.random.choice(requests)
            self.turns.remove(request)
            self._forget(request)
            self._note(None)

    def serve(self) -> None:
        request = next(self.turns.first(1), None)
        if request is not None:
            assert request is self.waits[request.flow_key][0], "those of a client request go in the order of arrival"
            self._note(request)
            self.turns.remove(request, request.waiting.cost)
            self._forget(request)
            self._note(None)

    def check_order(self) -> None:
        """The announced next request is the one that is served next."""
        said = [request.id for request in self.turns.first(self.count)]
        trial = copy.deepcopy(self.turns)
        for expected in said:
            request = next(trial.first(1))
            assert request.id == expected
            trial.remove(request, request.waiting.cost)
        assert not len(trial)

    def _forget(self, request: Request) -> None:
        self.waits[request.flow_key].remove(request)
        if not self.waits[request.flow_key]:
            del self.waits[request.flow_key]

    def _note(self, served: Request | None) -> None:
        tokens = 0 if served is None else served.waiting.cost
        self.tenants.note({tenant for tenant, _ in self.waits}, served and served.flow_key[0], tokens)
        for tenant in "abc":
            mine = served is not None and served.flow_key[0] == tenant
            flows = {flow for one, flow in self.waits if one == tenant}
            self.flows[tenant].note(flows, served.flow_key[1] if served and mine else None, tokens)


def run_crowds(steps: int = 250) -> None:
    for seed in range(12):
        crowd = Crowd(seed)
        for _ in range(steps):
            crowd.random.choice([crowd.arrive, crowd.serve, crowd.serve, crowd.leave])()


def run_newcomers() -> None:
    """Client requests of one prompt each come as fast as they are served; one with two prompts gets its share
    as well."""
    turns, count, until = fair_order(), 0, [0, 0]

    def arrive(flow: str) -> None:
        nonlocal count
        count += 1
        turns.add(waiting(count, "", flow, 10))

    arrive("two")
    arrive("two")
    for step in range(200):
        while len(turns) < 5:
            arrive(f"newcomer {step} {len(turns)}")
        request = next(turns.first(1))
        turns.remove(request, 10)
        if request.flow_key[1] == "two":
            until = [until[1], step]
    assert until[0] <= 1
    assert 0 < until[1] <= 10, "its second turn"


def run_leavers() -> None:
    """A tenant whose requests leave before they are served has lost none of its share."""
    turns, count, given = fair_order(), 0, Counter[str]()
    for step in range(200):
        for tenant in ("leaves", "stays"):
            count += 2
            turns.add(waiting(count, tenant, f"one {step}", 10))
            gone = waiting(count + 1, tenant, f"other {step}", 10)
            turns.add(gone)
            if tenant == "leaves":
                turns.remove(gone)
        request = next(turns.first(1))
        turns.remove(request, 10)
        given[request.flow_key[0]] += 1
    assert abs(given["leaves"] - given["stays"]) <= 1


def run_returning_tenant() -> None:
    """A tenant with one large request at a time, and the next as soon as that was served, gets no more than
    the others."""
    turns, count, given = fair_order(), 0, Counter[str]()
    costs = {"large": 60, "one": 10, "other": 10}
    for _ in range(600):
        for flow, cost in costs.items():
            if all(request.flow_key[1] != flow for request in turns.first(count)):
                count += 1
                turns.add(waiting(count, "", flow, cost))
            if flow != "large":
                count += 1
                turns.add(waiting(count, "", flow, cost))
        request = next(turns.first(1))
        turns.remove(request, request.waiting.cost)
        given[request.flow_key[1]] += request.waiting.cost
    assert max(given.values()) - min(given.values()) <= 60, given


def test_a_returning_tenant_gets_no_more_than_its_share() -> None:
    run_returning_tenant()


def test_waiting_tenants_get_equal_shares_of_tokens() -> None:
    run_crowds()


def test_newcomers_do_not_starve_older_requests() -> None:
    run_newcomers()


def test_requests_that_leave_are_not_charged() -> None:
    run_leavers()


@pytest.mark.parametrize("seed", range(6))
def test_the_announced_order_is_the_order_of_service(seed: int) -> None:
    crowd = Crowd(seed)
    for step in range(120):
        crowd.random.choice([crowd.arrive, crowd.serve, crowd.leave])()
        if step % 6 == 0:
            crowd.check_order()


def newcomer_after(first: list[tuple[str, int]], rows: int) -> int:
    """The rows that others get before a newcomer, who comes after `rows` rows; `first`: flows and tokens."""
    turns = fair_order()
    for number, (flow, tokens) in enumerate(first):
        turns.add(waiting(number, "", flow, tokens))

    def serve() -> str:
        request = turns.head()
        turns.remove(request, request.waiting.cost)
        return request.flow_key[1]

    for _ in range(rows):
        serve()
    turns.add(waiting(len(first), "", "newcomer", 1))
    return [serve() for _ in range(len(turns))].index("newcomer")


def run_large_one() -> None:
    """A large request has just been served, and a newcomer waits until the others have had their share of it."""
    flows = [("large", 1000), *((f"small {number % 10}", 10) for number in range(10_000))]
    assert newcomer_after(flows, 1) <= 1000 // 11 + 10


def run_single_ones() -> None:
    """As fewer wait, the share of each in what is served becomes larger. The flow that waits is behind by one row."""
    flows = [*((f"single {number}", 10) for number in range(1000)), *[("many", 10)] * 20]
    assert newcomer_after(flows, 1000) <= 2


def run_departures() -> None:
    """Flows come and leave without a turn; then a newcomer with many requests alternates with the two that wait."""
    turns = fair_order()
    for number in range(200):
        turns.add(waiting(number, "", f"waits {number % 2}", 10))

    def serve() -> str:
        request = turns.head()
        turns.remove(request, 10)
        return request.flow_key[1]

    for number in range(200, 250):
        serve()
        leaves = waiting(number, "", "leaves", 10)
        turns.add(leaves)
        assert serve() != "leaves", "it is next but one"
        turns.remove(leaves)
    for number in range(250, 270):
        turns.add(waiting(number, "", "newcomer", 10))
    assert [serve() for _ in range(9)].count("newcomer") <= 4


def test_a_newcomer_does_not_wait_for_the_others_to_catch_up_with_a_large_request() -> None:
    run_large_one()


def test_a_newcomer_gains_nothing_from_those_that_left_before_their_turn() -> None:
    run_departures()


def test_a_newcomer_waits_for_one_row_after_any_number_of_short_flows() -> None:
    run_single_ones()


def test_the_memory_of_served_tenants_does_not_grow_with_the_number_of_requests() -> None:
    """Regression: short requests may overtake those that wait: each left an entry until the clock had caught up with
    it."""
    turns = fair_order()
    turns.add(waiting(1, "waits", "one", MOST))
    for number in range(2, 2000):
        request = waiting(number, "comes back", f"flow {number}", 1)
        turns.add(request)
        turns.remove(request, 1)
    assert len(turns._tenants._ahead) == 1
    for number in range(2000, 4000):
        turns.add(waiting(number, "waits", f"flow {number}", 1))
        turns.remove(turns.head(), MOST)
    assert len(turns._tenants.children["waits"].flows._ahead) < 100
    turns.remove(turns._tenants.children["waits"].head, MOST)
    assert not len(turns)


def stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock shows where the tenant served last began."""

    def advance(self: Shares[Any], lowest: float, share: float, amount: float) -> None:
        self._clock = max(self._clock, lowest)

    monkeypatch.setattr(Shares, "_advance", advance)


def do_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Shares._advance
    monkeypatch.setattr(Shares, "_advance", lambda self, lowest, share, amount: advance(self, lowest, amount, amount))


def fall_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock may be behind all that wait."""

    def advance(self: Shares[Any], lowest: float, share: float, amount: float) -> None:
        self._clock = max(self._clock, min(self._clock + share, lowest + amount))

    monkeypatch.setattr(Shares, "_advance", advance)


def do_not_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock may be far ahead of those that wait."""

    def advance(self: Shares[Any], lowest: float, share: float, amount: float) -> None:
        self._clock = max(self._clock, lowest) + share

    monkeypatch.setattr(Shares, "_advance", advance)


def forget_departed_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that was served and left starts at the clock when it returns."""
    depart = Shares._depart

    def depart_and_forget(self: Shares[Any], name: str, given: float) -> None:
        depart(self, name, given)
        self._ahead.clear()

    monkeypatch.setattr(Shares, "_depart", depart_and_forget)


def charge_departing_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    remove = FairQueue.remove
    monkeypatch.setattr(
        FairQueue, "remove", lambda self, request, charge=0: remove(self, request, charge or request.waiting.cost)
    )


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_a_client_request_of_many_prompts_delays_another_by_one_row(
    policy: SchedulePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of one key with 64 prompts, which the policy prefers, has all rows; another arrives, and is next but
    one."""
    assert seats_before_a_newcomer(policy) <= 2
    monkeypatch.setattr(Admission, "_guest", lambda *arguments: None)
    assert policy in (SchedulePolicy.FCFS, SchedulePolicy.PRIORITY) or seats_before_a_newcomer(policy) > AGED_TURN


def seats_before_a_newcomer(policy: SchedulePolicy) -> int:
    """Rows that the others get until it has one."""
    bench = Bench(rows=4, chunk=16, budget=32, options={"schedule_policy": policy})
    prefix = [1 + (7 * i) % 37 for i in range(16)]

    def sampling(tokens: int) -> SamplingParams:
        return SamplingParams(max_new_tokens=tokens, seed=5, ignore_eos=True)

    bench.add(prefix, sampling=sampling(1), flow="first")
    bench.run()
    for number in range(64):
        bench.add([*prefix, 1 + number % 37], sampling=sampling(6 + number % 3), tenant="key", flow="many")
    for _ in range(9):
        bench.scheduler.step()
    before = len(bench.channel.cached)
    newcomer = bench.add([38, 39], sampling=sampling(2), tenant="key", flow="one")
    for _ in range(400):
        if newcomer in bench.channel.cached:
            break
        bench.scheduler.step()
    return list(bench.channel.cached).index(newcomer) - before


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_a_row_is_left_for_a_client_request_without_one(
    policy: SchedulePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the outputs are for which a client request has all other rows."""
    assert steps_of_a_newcomer(policy) <= 2
    monkeypatch.setattr(Admission, "_row_recipient", lambda self, request, look: request)
    assert steps_of_a_newcomer(policy) > 10


def steps_of_a_newcomer(policy: SchedulePolicy, flow: str = "many") -> int:
    """Steps until it has a row, after another client request has got all rows that it may have."""
    options = {"schedule_policy": policy, "schedule_conservativeness": 0.01}
    bench = Bench(rows=GUEST_ROWS, pages=500, chunk=64, budget=128, context=40, options=options)
    sampling = SamplingParams(max_new_tokens=30, seed=5, ignore_eos=True)
    for number in range(2 * GUEST_ROWS):
        bench.add([1 + number % 37, 1 + number // 37], sampling=sampling, flow=flow)
    for _ in range(8):
        bench.scheduler.step()
    newcomer = bench.add([38, 39], sampling=sampling, flow="one")
    for steps in range(100):
        if newcomer in bench.channel.cached:
            return steps
        bench.scheduler.step()
    raise AssertionError("it has none")


def test_a_key_with_one_prompt_at_a_time_gets_its_share_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows end one at a time. Regression: every freed row went to requests without one, one after the other, so a key
    with a batch had one row in eight where half were due."""
    assert 18 <= rows_of_a_batch() <= 23
    monkeypatch.setattr(_Look, "count_guests", lambda self: 0)
    assert rows_of_a_batch() < 9


def rows_of_a_batch(ends: int = 40) -> int:
    """The number of the freed rows that the client request of many prompts gets; the other key always waits as well."""
    bench = Bench(rows=GUEST_ROWS, pages=1600, chunk=64, budget=128, context=200)
    sampling, keys = SamplingParams(max_new_tokens=190, seed=5, ignore_eos=True), dict[int, str]()

    def add(key: str, flow: str) -> None:
        number = len(keys)
        keys[bench.add([1 + number % 37, 1 + number // 37], sampling=sampling, tenant=key, flow=flow)] = key

    for _ in range(100):
        add("batch", "all")
    for end in range(ends):
        for _ in range(3 if end else 12):
            while sum(request.flow_key[0] == "single" for request in bench.scheduler.queue.requests()) < 3:
                add("single", f"one {len(keys)}")
            bench.scheduler.step()
        assert bench.scheduler.num_running == GUEST_ROWS
        running = [request.id for request in bench.scheduler.rows.requests if request is not None]
        bench.scheduler.abort(running[end * 7 % len(running)])
    return sum(keys[request] == "batch" for request in list(bench.channel.cached)[-ends + 1 :])


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_a_request_that_fits_no_pool_is_refused_once(policy: SchedulePolicy) -> None:
    """Regression: refused out of order, as the first request without a row, it came up a second time in its own place,
    and the core ended."""
    options = {"schedule_policy": policy, "schedule_conservativeness": 0.01}
    bench = Bench(rows=GUEST_ROWS, pages=200, chunk=64, budget=128, context=1000, options=options)
    sampling = SamplingParams(max_new_tokens=12, seed=5, ignore_eos=True)
    for number in range(2 * GUEST_ROWS):
        bench.add([1 + number % 37, 1 + number // 37], sampling=sampling, flow="many")
    while bench.scheduler.num_running < GUEST_ROWS - 1:
        bench.scheduler.step()
    large = bench.add([1 + number % 37 for number in range(900)], sampling=sampling, flow="one")
    bench.run()
    assert bench.channel.finished[large].error is not None
    assert "do not fit the KV pool" in bench.channel.finished[large].error.message
    bench.check_outputs()


def test_a_pass_over_the_queue_costs_the_same_for_any_priorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each pass went through all priorities: 5,000 of them took ten milliseconds."""
    queue = WaitingQueue(FairOrder(by_priority=True), lambda request: 0)
    for number in range(1, 200):
        request = waiting(number, "key", f"one {number}", 0)
        request.priority = number
        queue.add(request)
    looked_at, first = [], FairQueue.first
    monkeypatch.setattr(FairQueue, "first", lambda self, count: looked_at.append(self) or first(self, count))
    assert [request.priority for request in queue.first(5)] == [199, 198, 197, 196, 195]
    assert len(looked_at) <= 6


def test_no_rows_are_reserved_where_requests_have_no_name() -> None:
    assert steps_of_a_newcomer(SchedulePolicy.FCFS, flow="") > 10


def test_a_newcomer_is_next_but_one_for_any_queue() -> None:
    """Next but one: a tenant that came before it, and has been served once like all, may go first. Requests that left
    are not counted."""
    queue = WaitingQueue(FairOrder(), lambda request: 0)
    many = [waiting(number, "key", "many", 0) for number in range(1, 30)]
    for request in many:
        queue.add(request)
    queue.seat(many[0])
    for request in many[1:10]:
        queue.remove(request)
    queue.add(waiting(40, "key", "one", 0))
    assert [request.sequence for request in queue.first(3)] == [11, 40, 12]


FAULTS = [
    (stand_still, run_newcomers),
    (do_not_divide, run_large_one),
    (fall_behind, run_departures),
    (do_not_limit, run_single_ones),
    (forget_departed_tenants, run_returning_tenant),
    (charge_departing_requests, run_leavers),
]


@pytest.mark.parametrize(("plant", "run"), FAULTS, ids=lambda one: one.__name__)
def test_a_planted_fault_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], run: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run()
