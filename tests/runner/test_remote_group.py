"""Orders over connections, and how a process detects that another is gone."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Pipe

import numpy as np
import pytest

from sglang_jax.runner import remote_group
from sglang_jax.runner.group import ORDERS, Leave, WarmUp
from sglang_jax.runner.group_listener import FollowerListener, Hello, connect_to_leader
from sglang_jax.runner.plan import PageDeltas, StepPlan
from sglang_jax.runner.pulse import Pulse
from sglang_jax.runner.rank_beats import Progress, steps_in
from sglang_jax.runner.remote_group import LeaderLink, RemoteFollowers

SECRET = b"s" * 32
TIMEOUT = 60.0


@pytest.fixture
def _quick_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is silent for half a second counts as lost, so such tests run by themselves; the others get more
    time."""
    monkeypatch.setattr(remote_group, "ALIVE_EVERY_SECONDS", 0.05)
    monkeypatch.setattr(remote_group, "LOST_AFTER_SECONDS", 0.5)


quick_signs_of_life = pytest.mark.usefixtures("_quick_signs_of_life")


class Group:
    """Rank 0 and two followers, all in this process."""

    def __init__(self) -> None:
        self.lost: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        listener = FollowerListener("127.0.0.1", SECRET, ORDERS.form)
        self.links: list[LeaderLink] = []
        joining = threading.Thread(target=self._join, args=(listener.port,))
        joining.start()
        self.followers = RemoteFollowers(listener, 2, 5.0, lambda reason: self.lost.put(("leader", reason)))
        joining.join()

    def lost_by(self, who: str) -> str:
        """Why one of them counts another as lost. Others may report the same end before or after it."""
        while True:
            said_by, reason = self.lost.get(timeout=TIMEOUT)
            if said_by == who:
                return reason

    def _join(self, port: int) -> None:
        for rank in (2, 1):

            def on_loss(reason: str, rank: int = rank) -> None:
                self.lost.put((f"node {rank}", reason))

            self.links.insert(0, LeaderLink(("127.0.0.1", port), SECRET, rank, on_loss))


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group()
    yield group
    for link in group.links:
        link.close()


def plan(step: int) -> StepPlan:
    one = np.array([step], np.int32)
    empty = np.zeros(0, np.int32)
    return StepPlan(step, one, 1, one, one, empty, np.array([True]), (PageDeltas(empty, empty, empty),))


def test_orders_arrive_everywhere_in_order(group: Group) -> None:
    group.followers.send(WarmUp())
    for step in range(50):
        group.followers.send(plan(step))
    for link in group.links:
        assert link.next_order() == WarmUp()
        for step in range(50):
            order = link.next_order()
            assert isinstance(order, StepPlan)
            assert order.step == step
            assert order.rows.tolist() == [step]


@pytest.mark.alone
@quick_signs_of_life
def test_a_silent_group_stays_together(group: Group) -> None:
    time.sleep(1.2)
    group.followers.check()
    assert group.lost.empty()


@pytest.mark.alone
@quick_signs_of_life
def test_followers_report_how_many_steps_they_have_launched(group: Group) -> None:
    pulse = Pulse()
    group.followers.announce(pulse.note_rank)
    group.links[1].progress.steps = 7
    deadline = time.monotonic() + 5
    while [(one.rank, one.steps) for one in pulse.ranks()] != [(1, 0), (2, 7)]:
        assert time.monotonic() < deadline, pulse.ranks()
        time.sleep(0.01)


@pytest.mark.parametrize("said", [b"alive -1", b"alive 1e9", b"alive " + b"9" * 40, b"alive 5 5", b"Alive"])
def test_other_messages_do_not_count_as_heartbeats(said: bytes) -> None:
    assert steps_in(said) is None
    assert (steps_in(b"alive"), steps_in(Progress(12).beat())) == (0, 12)


@pytest.mark.alone
@quick_signs_of_life
def test_leaving_is_not_a_loss(group: Group) -> None:
    group.followers.send(WarmUp())
    closing = threading.Thread(target=group.followers.close)
    closing.start()
    for link in group.links:
        assert link.next_order() == WarmUp()
        assert link.next_order() == Leave()
        link.close()
    closing.join(5)
    assert not closing.is_alive()
    time.sleep(0.7)
    assert group.lost.empty()


def test_a_follower_that_ends_is_a_loss(group: Group) -> None:
    group.links[1].close()
    who, reason = group.lost.get(timeout=TIMEOUT)
    assert who == "leader"
    assert reason.startswith("node 2 is lost")
    with pytest.raises(RuntimeError, match="node 2 is lost"):
        group.followers.send(WarmUp())
    with pytest.raises(RuntimeError, match="node 2 is lost"):
        group.followers.check()


def test_rank_0_that_ends_is_a_loss_for_all(group: Group) -> None:
    group.followers._leaving = True
    for link in group.followers._links:
        link.close()
    lost = dict(group.lost.get(timeout=TIMEOUT) for _ in range(2))
    assert sorted(lost) == ["node 1", "node 2"]
    assert all("node 0 is lost" in reason for reason in lost.values())


def test_rank_0_that_fails_says_why(group: Group) -> None:
    """At once, and not as the next order: a follower may never get that far."""
    ending = threading.Thread(target=group.followers.give_up, args=("no memory",))
    ending.start()
    told = dict(group.lost.get(timeout=TIMEOUT) for _ in range(2))
    assert told == {"node 1": "node 0 gave up: no memory", "node 2": "node 0 gave up: no memory"}
    for link in group.links:
        link.close()
    ending.join(5)
    assert not ending.is_alive()
    assert group.lost.empty()


def test_a_follower_that_fails_says_why(group: Group) -> None:
    group.links[0].give_up("no such file: häger")
    assert group.lost.get(timeout=TIMEOUT) == ("leader", "node 1 gave up: no such file: häger")
    with pytest.raises(RuntimeError, match="node 1 gave up: no such file"):
        group.followers.check()


def test_a_connection_is_not_closed_under_its_reader() -> None:
    mine, theirs = Pipe()
    link = remote_group._Link(mine, "node 1")
    closed_inside: list[bool] = []

    def take(data: bytes) -> None:
        link.close()
        closed_inside.append(mine.closed)

    theirs.send_bytes(b"anything")
    assert link.listen(take, 100) == "its connection closed"
    assert (closed_inside, mine.closed) == ([False], True)
    link.close()
    with pytest.raises(OSError, match="closed"):
        link.send(b"more")
    theirs.close()


@pytest.mark.alone
@quick_signs_of_life
def test_silence_is_a_loss_although_no_connection_closed() -> None:
    """A node without power or network sends no end of connection."""
    listener = FollowerListener("127.0.0.1", SECRET, ORDERS.form)
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    silent = []

    def connect() -> None:
        silent.append(connect_to_leader(("127.0.0.1", listener.port), SECRET, Hello(1, ORDERS.form)))

    joining = threading.Thread(target=connect)
    joining.start()
    RemoteFollowers(listener, 1, 5.0, lost.put)
    joining.join()
    start = time.monotonic()
    assert lost.get(timeout=TIMEOUT) == "node 1 is lost: nothing was received for 0 s"
    assert time.monotonic() - start > 0.4
    silent[0].close()


def test_an_invalid_order_is_a_loss(group: Group) -> None:
    group.followers._leaving = True
    for link in group.followers._links:
        link.send(b"cposix\nsystem\n(S'true'\ntR.")  # pickle would run this
    lost = dict(group.lost.get(timeout=TIMEOUT) for _ in range(2))
    assert sorted(lost) == ["node 1", "node 2"]
    assert all("node 0 is lost: it sent 26 bytes that are not a message" in reason for reason in lost.values())


def test_a_follower_that_sends_too_much_is_a_loss(group: Group) -> None:
    with suppress(OSError):  # it is not read to its end
        group.links[0]._link.send(bytes(1 << 20))
    assert group.lost_by("leader") == "node 1 is lost: its connection closed"
