"""Whose work is next, and what becomes of work that nobody waits for any more."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict

import pytest
from helpers.engine_fakes import ByteTokenizer
from hypothesis import given
from hypothesis import strategies as st

from sglang_jax.engine.fair_threads import FairOrder, FairThreads, Piece
from sglang_jax.engine.prompt_reader import TOKENIZER_THREADS, PromptReader


class Waiting:
    """Pieces by name, in order of their turns."""

    def __init__(self) -> None:
        self.turns = FairOrder()
        self._names: dict[Piece, str] = {}

    def put(self, name: str, size: int, tenant: str = "", flow: str = "") -> Piece:
        piece = Piece(size, tenant, flow, asyncio.Future(loop=asyncio.new_event_loop()))
        self._names[piece] = name
        self.turns.put(piece)
        return piece

    def get(self) -> str | None:
        piece = self.turns.get()
        return None if piece is None else self._names[piece]

    def all(self) -> list[str]:
        return list(iter(self.get, None))


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


def test_a_small_request_does_not_wait_for_a_large_one(waiting: Waiting) -> None:
    """250 prompts of 32,000 characters kept everybody's texts waiting for seconds."""
    for _ in range(250):
        waiting.put("large", 32_000, flow="batch")
    assert [waiting.get(), waiting.get()] == ["large"] * 2
    waiting.put("small", 3000, flow="chat")
    assert waiting.all() == ["small"] + ["large"] * 248


def test_nor_for_many_of_them(waiting: Waiting) -> None:
    for number in range(100):
        waiting.put("empty messages", 2000 * 256, flow=f"flood {number}")
    waiting.put("small", 3000, flow="chat")
    assert waiting.get() == "small"


def test_no_request_waits_for_ever(waiting: Waiting) -> None:
    """Small ones come all the time."""
    waiting.put("large", 32_000, flow="batch")
    for number in range(100):
        waiting.put("small", 3000, flow=f"chat {number}")
        if waiting.get() == "large":
            break
    assert number < 12


def test_tenants_have_turns_however_many_requests_they_have(waiting: Waiting) -> None:
    for number in range(100):
        waiting.put("busy", 1000, tenant="busy", flow=f"{number}")
    for _ in range(3):
        waiting.put("other", 1000, tenant="other", flow="one")
    assert waiting.all()[:7].count("other") == 3


def test_who_comes_back_has_nothing_saved_up(waiting: Waiting) -> None:
    waiting.put("b", 1000, tenant="b")
    assert waiting.get() == "b"
    for _ in range(20):
        waiting.put("a", 1000, tenant="a")
    assert [waiting.get() for _ in range(10)] == ["a"] * 10
    for _ in range(5):
        waiting.put("b", 1000, tenant="b")
    assert abs(sum(1 if name == "a" else -1 for name in [waiting.get() for _ in range(8)])) <= 2


PIECES = st.tuples(st.integers(1, 9), st.sampled_from("ab"), st.sampled_from("xyz"))


@given(st.lists(st.one_of(PIECES, st.just("get"), st.integers(0, 50)), max_size=60))
def test_each_piece_has_one_turn_and_those_of_a_flow_in_order(steps: list[tuple[int, str, str] | str | int]) -> None:
    """Against a list of each flow's; an integer has one that waits leave."""
    turns, waiting = FairOrder(), list[Piece]()
    flows: dict[tuple[str, str], list[Piece]] = defaultdict(list)
    turn = asyncio.Future[None](loop=asyncio.new_event_loop())

    def take() -> bool:
        piece = turns.get()
        assert (piece is None) == (not waiting)
        if piece is not None:
            waiting.remove(piece)
            assert flows[piece.tenant, piece.flow].pop(0) is piece
            turns.leave(piece)  # says nothing any more
        return piece is not None

    for step in [*steps]:
        if step == "get":
            take()
        elif isinstance(step, int) and waiting:
            piece = waiting.pop(step % len(waiting))
            flows[piece.tenant, piece.flow].remove(piece)
            turns.leave(piece)
        elif isinstance(step, tuple):
            waiting.append(Piece(*step, turn))
            flows[step[1], step[2]].append(waiting[-1])
            turns.put(waiting[-1])
    while take():
        pass
    assert not turns._tenants


class Gate:
    """Work that waits until it may go on, and notes what began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.open = threading.Event()

    def work(self, name: str) -> str:
        self.begun.append(name)
        assert self.open.wait(20)
        return name


async def until_begun(gate: Gate, count: int) -> None:
    while len(gate.begun) < count:
        await asyncio.sleep(0.001)


async def test_work_that_nobody_waits_for_is_not_begun() -> None:
    gate, threads = Gate(), FairThreads(1, "test")

    def run(name: str) -> asyncio.Task[str]:
        return asyncio.create_task(threads.run(lambda: gate.work(name), size=1))

    first = run("first")
    await until_begun(gate, 1)
    left, last = run("left"), run("last")
    await asyncio.sleep(0)
    left.cancel()
    first.cancel()  # its thread goes on: nobody else's work begins meanwhile
    await asyncio.wait({left, first})
    assert gate.begun == ["first"]
    await asyncio.sleep(0)
    assert threads._order._tenants[""].flows[""].waiting == 1  # the last one
    gate.open.set()
    assert await asyncio.wait_for(last, 20) == "last"
    assert gate.begun == ["first", "last"]
    threads.close()


async def test_who_leaves_as_its_turn_comes_passes_it_on() -> None:
    threads = FairThreads(1, "test")
    threads._free = 0  # its thread is at work
    leaving = asyncio.create_task(threads.run(lambda: "never", size=1))
    await asyncio.sleep(0)
    threads._end()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert await asyncio.wait_for(threads.run(lambda: "done", size=1), 20) == "done"
    threads.close()


async def test_whose_turn_comes_as_it_leaves_keeps_nobody_waiting() -> None:
    threads = FairThreads(1, "test")
    threads._free = 0
    leaving = asyncio.create_task(threads.run(lambda: "never", size=1))
    await asyncio.sleep(0)
    leaving.cancel()
    threads._end()
    assert await asyncio.wait_for(threads.run(lambda: "done", size=1), 20) == "done"
    assert not threads._order._tenants
    threads.close()


async def test_what_work_raises_is_raised_and_frees_its_thread() -> None:
    threads = FairThreads(1, "test")
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 / 0, size=1)
    threads.close()


@pytest.mark.parametrize("length", [2000, 10_000, 70_000])
async def test_texts_are_tokenized_in_turns_of_requests(length: int) -> None:
    gate = Gate()

    class GatedTokenizer(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            gate.work(text[0])
            return [1]

    reader = PromptReader(GatedTokenizer())

    def read(name: str, flow: str) -> asyncio.Task[list[int]]:
        return asyncio.create_task(reader.encode(name * length, max_tokens=10**6, flow=flow))

    at_once = TOKENIZER_THREADS if length <= 65_536 else 1
    batch = [read("b", "batch") for _ in range(50)]
    await until_begun(gate, at_once)
    chat = read("c", "chat")
    await asyncio.sleep(0)
    for task in batch[10:]:
        task.cancel()
    gate.open.set()
    await asyncio.wait_for(chat, 20)
    assert gate.begun.index("c") <= 6  # a large one is tokenized in parts first
    await asyncio.gather(*batch, return_exceptions=True)
    assert gate.begun.count("b") <= 3 * 10
    reader.close()


@pytest.mark.parametrize("length", [9000, 70_000])
async def test_a_short_text_waits_for_no_longer_one_that_is_being_tokenized(length: int) -> None:
    """Two of 32,000 characters kept it waiting for ten milliseconds."""
    gate = Gate()

    class GatedTokenizer(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            if text[0] == "l":
                gate.work(text[0])
            return [1]

    reader = PromptReader(GatedTokenizer())
    long = [asyncio.create_task(reader.encode("l" * length, max_tokens=10**6)) for _ in range(10)]
    await until_begun(gate, 1)
    assert await asyncio.wait_for(reader.encode("s" * 3000, max_tokens=10**6), 10) == [1]
    gate.open.set()
    await asyncio.gather(*long)
    reader.close()
