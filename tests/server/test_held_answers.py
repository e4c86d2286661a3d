"""Which unread answers are dropped when they exceed the limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_jax.server import held_answers
from sglang_jax.server.held_answers import HeldAnswers, hold, share_limit

LIMIT = 100


class Clock:
    now = 1000.0

    def wait(self) -> None:
        """Advances past the time after which an idle client may lose its answer."""
        self.now += held_answers.PAUSE_SECONDS


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(held_answers, "MAX_HELD_BYTES", LIMIT)
    clock = Clock()
    monkeypatch.setattr(held_answers, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


class Clients:
    """Clients with one answer each, by name. `dropped`: the clients that were cut off, in order."""

    def __init__(self, stack: ExitStack) -> None:
        self.held = HeldAnswers()
        self.dropped: list[str] = []
        self._stack = stack
        self._sent: dict[str, Callable[[int], bool]] = {}

    def asks(self, name: str, size: int) -> None:
        scope: dict[str, Any] = {}
        share_limit(scope, self.held, lambda: self.dropped.append(name))
        self._sent[name] = self._stack.enter_context(hold(scope, size))

    def reads(self, name: str, size: int) -> bool:
        return self._sent[name](size)


@pytest.fixture
def clients() -> Iterator[Clients]:
    with ExitStack() as stack:
        clients = Clients(stack)
        yield clients
    assert clients.held.num_bytes == 0


def test_the_client_that_has_not_read_for_longest_is_dropped_first(clients: Clients, clock: Clock) -> None:
    for name in "abc":
        clients.asks(name, 30)
    assert clients.reads("a", 5)
    clock.wait()
    clients.asks("d", 20)
    assert clients.dropped == ["b"]
    assert clients.held.num_bytes == 25 + 30 + 20
    clock.wait()
    clients.asks("e", 90)
    assert clients.dropped == ["b", "c", "a", "d"]
    assert not clients.reads("b", 10)
    assert clients.reads("e", 10)
    assert clients.held.num_bytes == 80


def test_clients_that_read_lose_nothing_to_a_large_answer(clients: Clients, clock: Clock) -> None:
    for name in "ab":
        clients.asks(name, 30)
    clock.wait()
    assert clients.reads("a", 5)
    clients.asks("c", 5 * LIMIT)
    assert clients.dropped == ["b"]
    assert clients.reads("a", 5)


def test_all_answers_are_held_up_to_the_limit(clients: Clients, clock: Clock) -> None:
    clients.asks("a", LIMIT - 1)
    clock.wait()
    clients.asks("b", 1)
    assert not clients.dropped
    clients.asks("c", 1)
    assert clients.dropped == ["a"]


def test_an_answer_larger_than_the_limit_may_be_the_only_one(clients: Clients, clock: Clock) -> None:
    clients.asks("a", 5 * LIMIT)
    assert clients.reads("a", LIMIT)
    clock.wait()
    clients.asks("b", 6 * LIMIT)
    assert clients.dropped == ["a"]
    assert clients.reads("b", 1)


def test_answers_without_a_connection_are_not_limited() -> None:
    with hold({}, 5 * LIMIT) as first, hold({}, 5 * LIMIT) as second:
        assert first(1)
        assert second(1)
