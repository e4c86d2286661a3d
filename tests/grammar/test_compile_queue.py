"""Which grammar is compiled next, and which ones there is room for."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
from helpers.fake_grammars import FakeGrammar

from sglang_jax.grammar.compile_queue import Compilation, CompileQueue, GrammarRoom
from sglang_jax.grammar.compiler import GrammarCompiler
from sglang_jax.sampling.grammar import Grammar, GrammarKind

MOST = 1000


def of(text: str) -> Compilation:
    return Compilation(Grammar(GrammarKind.REGEX, text, "regex"))


def get(queue: CompileQueue, seconds: float = 1.0) -> str:
    """The next grammar's text; compiling it takes `seconds`."""
    got = queue.get()
    assert got is not None
    queue.done(got[1], seconds)
    return got[0].source.text


class Room:
    """Compiled grammars, as requests keep them."""

    def __init__(self) -> None:
        self.held = GrammarRoom()
        self._kept: dict[str, list[Compilation]] = {}

    def add(self, tenant: str, size: int) -> bool:
        compilation = of("x" * size)
        if not self.held.admit(compilation, tenant, MOST):
            return False
        built: Any = FakeGrammar(0)
        compilation.grammar = built
        self.held.settle(compilation)
        self._kept.setdefault(tenant, []).append(compilation)
        return True

    def fill(self, tenant: str, size: int) -> int:
        """The number of characters in as many grammars as there is room for."""
        count = 0
        while self.add(tenant, size):
            count += 1
        return count * size

    def end(self, tenant: str) -> None:
        for compilation in self._kept.pop(tenant):
            compilation.grammar = None


def test_one_key_leaves_room_for_grammars_of_the_others() -> None:
    """Regression: 32 of its requests, with outputs of minutes, kept every grammar of other keys out."""
    room = Room()
    assert room.fill("first", 10) == 750
    assert room.fill("second", 10) == 190
    assert room.fill("third", 10) > 0
    assert not room.add("fourth", 200)
    room.end("first")
    assert not room.add("first", 800)
    assert room.fill("first", 10) > 500
    for tenant in ("first", "second", "third"):
        room.end(tenant)
    assert room.fill("fourth", 10) == 750
    room.end("fourth")
    assert room.add("fifth", 1)
    assert room.held._characters == {"fifth": 1}


def test_a_grammar_takes_room_while_it_compiles_and_returns_it_if_it_fails() -> None:
    held, first, second = GrammarRoom(), of("x" * 600), of("x" * 600)
    assert held.admit(first, "one", MOST)
    assert not held.admit(second, "one", MOST)
    assert (held.has_admitted(first), held.has_admitted(second)) == (True, False)
    held.settle(first)
    held.settle(second)
    assert held.admit(second, "one", MOST)


def test_a_grammar_without_room_is_overtaken() -> None:
    """Regression: both threads waited for room for a minute, and all other grammars behind them."""
    queue = CompileQueue(lambda compilation, tenant: len(compilation.source.text) < 10)
    queue.put(of("x" * 20), ("one", "large"))
    queue.put(of("behind"), ("one", "large"))
    queue.put(of("small"), ("one", "small"))
    queue.put(of("other"), ("two", "a"))
    assert sorted(get(queue) for _ in range(2)) == ["other", "small"]
    assert queue._next() is None


def test_a_grammar_that_another_request_waits_for_is_shared() -> None:
    backend: Any = Backend()
    compiler = GrammarCompiler(backend, trier=Sandbox, threads=0)
    first = compiler.start(of("a").source, ("one", "1"))
    assert compiler.start(of("a").source, ("two", "1")) is first
    assert {entry.flow_key for entry in first.queued_in.values()} == {("one", "1"), ("two", "1")}


def test_an_idle_key_saves_up_no_share() -> None:
    """Regression: a returning key was always served first until its compile time had caught up with that of the
    others."""
    queue = CompileQueue()
    queue.put(of("b0"), ("b", "0"))
    for number in range(30):
        queue.put(of(f"a{number}"), ("a", str(number)))
    assert get(queue) in ("a0", "b0")
    for _ in range(20):
        get(queue, 10.0)
    for tenant in ("b", "c"):
        for number in range(5):
            queue.put(of(f"{tenant}{number}"), (tenant, f"later {number}"))
    names = [get(queue, 10.0)[0] for _ in range(6)]
    assert sorted(names) == ["a", "a", "b", "b", "c", "c"]


def test_a_key_that_was_served_does_not_wait_while_new_keys_arrive() -> None:
    """Regression: each started at the lowest compile time, which stayed the same while there were new keys."""
    queue = CompileQueue()
    for name in ("first", "second"):
        queue.put(of(name), ("key", "1"))
    order = []
    queue.put(of("new"), ("new", "1"))
    for number in range(40):
        queue.put(of(f"new {number}"), (f"new {number}", "1"))
        order.append(get(queue))
    assert order.index("second") <= 8


def test_a_grammar_of_two_keys_is_compiled_when_either_is_next() -> None:
    queue, shared = CompileQueue(), of("shared")
    for number in range(5):
        queue.put(of(f"slow {number}"), ("flood", "1"))
    queue.put(shared, ("flood", "1"))
    get(queue, 10.0)
    queue.share(shared, ("other", "1"))
    queue.share(shared, ("other", "2"))
    queue.put(of("next"), ("other", "1"))
    assert [get(queue, 10.0), get(queue), get(queue)] == ["slow 1", "shared", "next"]
    queue.share(shared, ("third", "1"))
    assert [get(queue) for _ in range(3)] == ["slow 2", "slow 3", "slow 4"]
    assert not queue._queue


def test_no_entry_is_left_after_any_sequence_of_events() -> None:
    draw, queue = (
        random.Random(0),
        CompileQueue(lambda compilation, tenant: not compilation.source.text.startswith("no")),
    )
    waiting: dict[Compilation, None] = {}
    running = []
    for number in range(3000):
        whose = (draw.choice("abc"), draw.choice("xyz"))
        action = draw.randrange(6)
        if action < 2:
            compilation = of(draw.choice(["no", "yes"]) + str(number))
            waiting[compilation] = None
            queue.put(compilation, whose)
        elif action == 2 and waiting:
            queue.share(draw.choice(list(waiting)), whose)
        elif action == 3 and waiting:
            compilation = draw.choice(list(waiting))
            assert queue.withdraw(compilation)
            assert not queue.withdraw(compilation)
            del waiting[compilation]
        elif action == 4 and queue._next() is not None and len(running) < 2:
            got = queue.get()
            assert got is not None
            del waiting[got[0]]
            running.append(got[1])
        elif running:
            queue.done(running.pop(draw.randrange(len(running))), draw.random())
    for compilation in waiting:
        assert queue.withdraw(compilation)
    for whose in running:
        queue.done(whose, 1.0)
    tenants = queue._queue._tenants
    assert (len(queue._queue), tenants.children, tenants._ahead, tenants._clock) == (0, {}, {}, 0.0)


class Sandbox:
    """Accepts every grammar at once."""

    def prepare(self) -> None: ...

    def try_out(self, grammar: Grammar) -> str:
        return grammar.text

    def close(self) -> None: ...


class Backend:
    def __init__(self) -> None:
        self.specials: dict[str, int] = {}

    def build(self, grammar: Grammar, lark: str) -> Any:
        return FakeGrammar(0)


def test_a_key_compiles_its_grammars_while_another_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_jax.grammar.compiler.MAX_HELD_CHARACTERS", MOST)
    now, others = [0.0], set(threading.enumerate())
    backend: Any = Backend()
    compiler = GrammarCompiler(backend, trier=Sandbox, threads=1, clock=lambda: now[0])

    def start(name: str, size: int, tenant: str) -> Compilation:
        return compiler.start(Grammar(GrammarKind.REGEX, name + "x" * (size - len(name)), "regex"), (tenant, name))

    def settled(compilation: Compilation) -> bool:
        until = time.monotonic() + 20
        while not compiler.settled(compilation) and time.monotonic() < until:
            compiler.wait(0.01)
        return compilation.grammar is not None

    assert settled(start("first", 730, "flood"))
    waits = [start(f"more {number}", 200, "flood") for number in range(3)]
    assert settled(start("other", 100, "other"))
    assert not any(compiler.settled(one) for one in waits)
    now[0] = 61.0
    assert not any(settled(one) for one in waits)
    assert all("take all the memory" in str(one.error) for one in waits)
    compiler.close()
    for thread in set(threading.enumerate()) - others:
        if thread.name.startswith("grammar-"):
            thread.join(10)
            assert not thread.is_alive()
