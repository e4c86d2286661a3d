"""Which of the answers that wait for their clients goes when they are too many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from sglang_jax.server import held_answers
from sglang_jax.server.held_answers import HeldAnswers, hold, share_limit

LIMIT = 100


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_answers, "MOST_HELD_BYTES", LIMIT)


class Clients:
    """Each with an answer, by name; `dropped`: those that were cut off, in this order."""

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


def test_who_read_last_before_all_others_goes_first(clients: Clients) -> None:
    for name in "abc":
        clients.asks(name, 30)
    assert clients.reads("a", 5)
    clients.asks("d", 20)
    assert clients.dropped == ["b"]
    assert clients.held.num_bytes == 25 + 30 + 20
    clients.asks("e", 60)
    assert clients.dropped == ["b", "c", "a"]
    assert not clients.reads("b", 10)
    assert clients.reads("d", 10)
    assert clients.held.num_bytes == 10 + 60


def test_up_to_the_limit_all_are_held(clients: Clients) -> None:
    clients.asks("a", LIMIT - 1)
    clients.asks("b", 1)
    assert not clients.dropped
    clients.asks("c", 1)
    assert clients.dropped == ["a"]


def test_an_answer_larger_than_the_limit_may_be_the_only_one(clients: Clients) -> None:
    clients.asks("a", 5 * LIMIT)
    assert clients.reads("a", LIMIT)
    clients.asks("b", 6 * LIMIT)
    assert clients.dropped == ["a"]
    assert clients.reads("b", 1)


def test_without_a_connection_there_is_no_limit() -> None:
    with hold({}, 5 * LIMIT) as first, hold({}, 5 * LIMIT) as second:
        assert first(1)
        assert second(1)
