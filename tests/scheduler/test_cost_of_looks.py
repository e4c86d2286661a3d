"""The cost of a pass over the queue, in nodes visited and prompts matched, for any cache content and queue length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from helpers.scheduling import Bench

from sglang_jax.config import SchedulePolicy
from sglang_jax.mem_cache.radix_tree import Bookmark, RadixTree
from sglang_jax.queues.fair_queue import Flow
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler import policies
from sglang_jax.scheduler.policies import LONGEST_PREFIX_WINDOW
from sglang_jax.scheduler.request import Request
from sglang_jax.scheduler.waiting_queue import WaitingQueue

SHALLOW, DEEP = 20, 120
BOTH = [SchedulePolicy.FCFS, SchedulePolicy.LPM]


def endless(tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, seed=5, ignore_eos=True)


class Visits(Counter[str]):
    """Counts the nodes that walks visit, and the prompts that are matched against the tree."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        walk, resume = RadixTree._walk, RadixTree._resume

        def counted_walk(*arguments: object) -> Iterator[object]:
            for each in walk(*arguments):  # type: ignore[arg-type]
                self["nodes"] += 1
                yield each

        def counted_resume(root: object, bookmark: Bookmark | None, most: int) -> object:
            self["probes"] += 1
            before = 0 if bookmark is None else bookmark.visited
            node = resume(root, bookmark, most)  # type: ignore[arg-type]
            self["nodes"] += 0 if bookmark is None else bookmark.visited - before
            return node

        monkeypatch.setattr(RadixTree, "_walk", counted_walk)
        monkeypatch.setattr(RadixTree, "_resume", staticmethod(counted_resume))


class DeepPath:
    """Prompts that share a path of `depth` branch nodes of one token each wait for two rows."""

    def __init__(self, policy: SchedulePolicy, depth: int, *, waiting: int = 150, **sizes: object) -> None:
        self.bench = Bench(
            pages=2000, page_size=1, rows=2, chunk=64, budget=96, context=300, scribble=False,
            options={"schedule_policy": policy}, **sizes,
        )  # fmt: skip
        self.path = [1 + (7 * i) % 30 for i in range(depth)]
        if waiting:
            self.build()
            self.wait(waiting)

    def build(self) -> None:
        """Serves a short request for each branch."""
        for length in range(1, len(self.path)):
            self.bench.add([*self.path[:length], 38], sampling=endless(1))
        self.bench.run()
        assert self.bench.scheduler.cache.tree.num_nodes > 2 * len(self.path) - 5

    def wait(self, count: int) -> None:
        for number in range(count):
            self.bench.add([*self.path, 31 + number % 7, 1 + number // 7, 39], sampling=endless(3))

    def visits(self, monkeypatch: pytest.MonkeyPatch, steps: int = 40) -> Visits:
        """Visits in this many steps while they wait."""
        self.bench.scheduler.step()
        with monkeypatch.context() as patches:
            visits = Visits(patches)
            for _ in range(steps):
                self.bench.scheduler.step()
        assert self.bench.scheduler.queue
        return visits


def run_depths(policy: SchedulePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    shallow, deep = (DeepPath(policy, depth).visits(monkeypatch) for depth in (SHALLOW, DEEP))
    assert deep["nodes"] <= shallow["nodes"] + DEEP
    assert deep["probes"] <= shallow["probes"] + 10


@pytest.mark.parametrize("policy", BOTH)
def test_the_nodes_visited_do_not_grow_with_the_depth(policy: SchedulePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: each pass followed 128 prompts from the root: 81 ms a step at a depth of 1,000."""
    run_depths(policy, monkeypatch)


def run_changed_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    visits = DeepPath(SchedulePolicy.LPM, SHALLOW).visits(monkeypatch, steps=40)
    assert visits["probes"] < 40 * (LONGEST_PREFIX_WINDOW // 7 + 2)


def test_prompts_are_matched_again_only_if_nodes_of_their_match_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that enters the window is; of the others, those that could extend a newly cached prefix, one
    in seven."""
    run_changed_nodes(monkeypatch)


def run_growing_path(monkeypatch: pytest.MonkeyPatch, most: int = 50) -> None:
    """The path grows while they wait: prompts that a pass does not reach are ranked by their last known match."""
    monkeypatch.setattr(policies, "RANKED_NODES", most)
    case = DeepPath(SchedulePolicy.LPM, DEEP, waiting=0)
    queue = case.bench.scheduler.queue
    case.wait(100)
    waiting = queue.requests()
    other = DeepPath(SchedulePolicy.LPM, DEEP, waiting=0)
    other.build()
    tree = other.bench.scheduler.cache.tree
    case.bench.scheduler.cache.tree = tree
    lengths: list[int] = []
    for _ in range(60):
        with monkeypatch.context() as patches:
            visits = Visits(patches)
            list(queue.first(10))
        assert visits["nodes"] <= 50 + DEEP
        lengths.append(sum(request.waiting.bookmark.length > 0 for request in waiting))
    assert lengths[0] <= 2
    assert lengths[-1] >= 59, "each look finds one more"


def test_a_pass_visits_a_bounded_number_of_nodes_whatever_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    run_growing_path(monkeypatch)


def run_long_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(rows=1, scribble=False, options={"schedule_policy": SchedulePolicy.LPM})
    for number in range(1000):
        bench.add([1 + number % 37, 1 + number // 37], sampling=endless(2), flow=f"one {number}")
    taken: list[Request] = []

    def head(self: Flow[Request]) -> Request:
        taken.append(self.waiting.head())
        return taken[-1]

    monkeypatch.setattr(Flow, "head", property(head))
    assert next(bench.scheduler.queue.first(900)) in taken
    assert LONGEST_PREFIX_WINDOW <= len(taken) <= LONGEST_PREFIX_WINDOW + 1


def test_a_pass_over_a_long_queue_only_takes_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with 1,024 rows each pass sorted all requests that they might take: 6.9 ms a step."""
    run_long_queue(monkeypatch)


def take_all_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    front = WaitingQueue.front
    monkeypatch.setattr(WaitingQueue, "front", lambda self, count: iter(list(front(self, count))))


def start_from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RadixTree, "_resume", staticmethod(lambda root, bookmark, most: root))


def keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bookmark, "holds", lambda self, limit: False)


FAULTS = [
    (start_from_the_root, lambda patches: run_depths(SchedulePolicy.LPM, patches)),
    (start_from_the_root, lambda patches: run_depths(SchedulePolicy.FCFS, patches)),
    (take_all_in_order, run_long_queue),
    (keep_nothing, run_changed_nodes),
    (lambda patches: None, lambda patches: run_growing_path(patches, most=10**6)),
]


@pytest.mark.parametrize(("plant", "run"), FAULTS)
def test_a_planted_fault_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None],
    run: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run(monkeypatch)
