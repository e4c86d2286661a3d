"""The order of work of several tenants, and what happens to work whose client has left."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict

import pytest
from helpers.engine_fakes import ByteTokenizer
from hypothesis import given
from hypothesis import strategies as st

from sglang_jax.engine.fair_threads import FairThreads, Piece, Pieces
from sglang_jax.engine.prompt_reader import TOKENIZER_THREADS, PromptReader
from sglang_jax.engine.types import SCRIPT, Origin

MANY = 10**6


class Waiting:
    """Pieces by name, in the order in which they are served."""

    def __init__(self) -> None:
        self.turns = Pieces()
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
    """Regression: 250 prompts of 32,000 characters delayed the texts of all others for seconds."""
    for _ in range(250):
        waiting.put("large", 32_000, flow="batch")
    assert [waiting.get(), waiting.get()] == ["large"] * 2
    waiting.put("small", 3000, flow="chat")
    assert waiting.all() == ["small"] + ["large"] * 248


def test_a_small_request_does_not_wait_for_many_large_ones(waiting: Waiting) -> None:
    for number in range(100):
        waiting.put("empty messages", 2000 * 256, flow=f"flood {number}")
    waiting.put("small", 3000, flow="chat")
    assert waiting.get() == "small"


def test_no_request_waits_forever(waiting: Waiting) -> None:
    """Small ones arrive all the time."""
    waiting.put("large", 32_000, flow="batch")
    for number in range(100):
        waiting.put("small", 3000, flow=f"chat {number}")
        if waiting.get() == "large":
            break
    assert number < 12


def test_tenants_alternate_for_any_number_of_requests(waiting: Waiting) -> None:
    for number in range(100):
        waiting.put("busy", 1000, tenant="busy", flow=f"{number}")
    for _ in range(3):
        waiting.put("other", 1000, tenant="other", flow="one")
    assert waiting.all()[:7].count("other") == 3


def test_a_returning_tenant_has_saved_up_no_share(waiting: Waiting) -> None:
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
def test_each_piece_is_served_once_and_those_of_a_flow_in_order(steps: list[tuple[int, str, str] | str | int]) -> None:
    """Compared with one list per flow; an integer makes a waiting piece leave."""
    turns, waiting = Pieces(), list[Piece]()
    flows: dict[tuple[str, str], list[Piece]] = defaultdict(list)
    turn = asyncio.Future[None](loop=asyncio.new_event_loop())

    def take() -> bool:
        piece = turns.get()
        assert (piece is None) == (not waiting)
        if piece is not None:
            waiting.remove(piece)
            assert flows[piece.tenant, piece.flow].pop(0) is piece
            turns.leave(piece)  # has no effect any more
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
    assert not turns


class Gate:
    """Work that waits until it may continue, and records what has started."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.open = threading.Event()

    def work(self, name: str) -> str:
        self.begun.append(name)
        assert self.open.wait(20)
        return name


async def until_started(gate: Gate, count: int) -> None:
    while len(gate.begun) < count:
        await asyncio.sleep(0.001)


async def test_work_without_a_waiter_is_not_started() -> None:
    gate, threads = Gate(), FairThreads(1, "test")

    def run(name: str) -> asyncio.Task[str]:
        return asyncio.create_task(threads.run(lambda: gate.work(name), size=1))

    first = run("first")
    await until_started(gate, 1)
    left, last = run("left"), run("last")
    await asyncio.sleep(0)
    left.cancel()
    first.cancel()  # its thread continues, and no other work starts meanwhile
    await asyncio.wait({left, first})
    assert gate.begun == ["first"]
    await asyncio.sleep(0)
    assert len(threads._pieces) == 1  # the last one
    gate.open.set()
    assert await asyncio.wait_for(last, 20) == "last"
    assert gate.begun == ["first", "last"]
    threads.close()


async def test_a_piece_that_leaves_when_it_is_next_lets_the_following_one_run() -> None:
    threads = FairThreads(1, "test")
    threads._free = 0  # its thread is busy
    leaving = asyncio.create_task(threads.run(lambda: "never", size=1))
    await asyncio.sleep(0)
    threads._end()
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert await asyncio.wait_for(threads.run(lambda: "done", size=1), 20) == "done"
    threads.close()


async def test_a_piece_chosen_while_it_leaves_delays_no_other() -> None:
    threads = FairThreads(1, "test")
    threads._free = 0
    leaving = asyncio.create_task(threads.run(lambda: "never", size=1))
    await asyncio.sleep(0)
    leaving.cancel()
    threads._end()
    assert await asyncio.wait_for(threads.run(lambda: "done", size=1), 20) == "done"
    assert not threads._pieces
    threads.close()


async def test_an_error_of_work_is_raised_and_frees_its_thread() -> None:
    threads = FairThreads(1, "test")
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 / 0, size=1)
    threads.close()


@pytest.mark.parametrize("length", [2000, 10_000, 70_000])
async def test_texts_of_several_requests_are_tokenized_alternately(length: int) -> None:
    gate = Gate()

    class GatedTokenizer(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            gate.work(text[0])
            return [1]

    reader = PromptReader(GatedTokenizer())

    def read(name: str, flow: str) -> asyncio.Task[list[int]]:
        return asyncio.create_task(
            reader.encode(name * length, Origin(flow=flow), MANY, max_tokens=MANY, param="prompt")
        )

    at_once = TOKENIZER_THREADS if length <= 65_536 else 1
    batch = [read("b", "batch") for _ in range(50)]
    await until_started(gate, at_once)
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
async def test_a_short_text_does_not_wait_for_a_long_one_being_tokenized(length: int) -> None:
    """Regression: two of 32,000 characters delayed it by ten milliseconds."""
    gate = Gate()

    class GatedTokenizer(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            if text[0] == "l":
                gate.work(text[0])
            return [1]

    reader = PromptReader(GatedTokenizer())
    long = [
        asyncio.create_task(reader.encode("l" * length, SCRIPT, MANY, max_tokens=MANY, param="prompt"))
        for _ in range(10)
    ]
    await until_started(gate, 1)
    assert await asyncio.wait_for(reader.encode("s" * 3000, SCRIPT, MANY, max_tokens=MANY, param="prompt"), 10) == [1]
    gate.open.set()
    await asyncio.gather(*long)
    reader.close()
