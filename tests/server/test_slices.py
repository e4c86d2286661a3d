"""Slices of connections are parsed in turns, and the server reads no more than it parses."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import time
import weakref
from collections.abc import Iterator

import pytest
from helpers.echo_server import EchoServer, serve_echo
from helpers.wire import Wire, connect
from starlette.types import Message, Receive, Scope, Send
from uvicorn.loops.auto import auto_loop_factory
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from sglang_jax.server import request_body, slices
from sglang_jax.server.connections import (
    HEALTH_CONNECTIONS,
    BoundedConnection,
    ConnectionLimits,
    bounded_connections,
)
from sglang_jax.server.partial_requests import PartialRequests
from sglang_jax.server.request_body import REQUEST_BYTES, BodyLimit
from sglang_jax.server.serve import bind, listening_sockets
from sglang_jax.server.slices import CROWD, CROWDED_SLICE, SLICE, SliceTurns, SmallReads

LIMITS = ConnectionLimits(max_connections=1000, client_timeout=60.0)
KEY = "k" * 20
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


class Piece:
    """Notes when it was parsed, and takes no time."""

    def __init__(self, name: str, parsed: list[str]) -> None:
        self.name = name
        self._parsed = parsed

    def parse(self) -> None:
        self._parsed.append(self.name)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice takes a third of a turn: three fit into one."""
    now = 0.0

    def later() -> float:
        nonlocal now
        now += slices.TURN_SECONDS * 0.35
        return now

    monkeypatch.setattr(slices, "perf_counter", later)


@pytest.mark.usefixtures("slow")
async def test_a_turn_of_the_event_loop_parses_few_slices() -> None:
    """With a thousand bodies each turn lasted a hundred milliseconds."""
    turns, parsed = SliceTurns(), list[str]()
    now = [turns.take(Piece(str(number), parsed), first=True) for number in range(30)]
    assert now == [True] * 3 + [False] * 27
    for turn in range(1, 10):
        await asyncio.sleep(0)
        assert len(parsed) == 3 * turn + 3
    assert parsed == [str(number) for number in range(30)]


@pytest.mark.usefixtures("slow")
async def test_first_slices_go_first_and_the_rest_continues() -> None:
    turns, parsed = SliceTurns(), list[str]()
    for _ in range(20):
        turns.put(Piece("rest", parsed), first=False)
    for _ in range(20):
        turns.put(Piece("first", parsed), first=True)
    assert not turns.take(Piece("late", parsed), first=False)
    for turn in range(1, 6):
        await asyncio.sleep(0)
        assert parsed == ["first", "first", "first", "rest"] * turn
    for _ in range(20):
        await asyncio.sleep(0)
    assert parsed.count("first") == 20
    assert parsed[-1] == "late"


async def test_an_exception_in_one_slice_does_not_delay_others() -> None:
    class Faulty:
        def parse(self) -> None:
            raise ZeroDivisionError

    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    turns, parsed = SliceTurns(), list[str]()
    for parser in (Faulty(), Piece("next", parsed)):
        turns.put(parser, first=True)
    for _ in range(3):
        await asyncio.sleep(0)
    assert parsed == ["next"]
    assert [type(one) for one in told] == [ZeroDivisionError]


async def size_of_body(scope: Scope, receive: Receive, send: Send) -> None:
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    content = b"%d" % size
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(content))]})
    await send({"type": "http.response.body", "body": content})


async def turns_until_answered(wire: Wire) -> int:
    """The number of turns of the event loop until the answer."""
    for count in range(10_000):
        if b"HTTP/1.1 200" in b"".join(wire.sent):
            return count
        await asyncio.sleep(0)
    raise AssertionError("no answer")


@pytest.mark.usefixtures("slow")
async def test_a_short_request_is_answered_alongside_hundreds_of_long_bodies() -> None:
    """It took the usual number of turns, but each lasted as long as a slice of every body."""
    make = bounded_connections(LIMITS)
    long = [connect(make, size_of_body) for _ in range(300)]
    for connection, _ in long:
        connection.data_received(POST % 65_536 + b"x" * 65_536)
    assert not any(wire.reading for _, wire in long)
    for _ in range(300 // 3):  # their heads
        await asyncio.sleep(0)
    short, wire = connect(make, size_of_body)
    short.data_received(POST % 3000 + b"x" * 3000)
    assert await turns_until_answered(wire) < 12
    # One slice of theirs in each turn; each body has eight.
    assert sum(b"HTTP/1.1 200" in b"".join(wire.sent) for _, wire in long) < 20
    while not all(b"".join(wire.sent).endswith(b"65536") for _, wire in long):
        await asyncio.sleep(0)
    for connection, _ in [*long, (short, wire)]:
        connection.connection_lost(None)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(("size", "room"), [(8000, 20 * REQUEST_BYTES), (40_000, 200 * REQUEST_BYTES + 2 * 65_536)])
async def test_complete_bodies_are_read_one_after_the_other(
    size: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsed in turns they were all held partly, and together exceeded the limit."""
    monkeypatch.setattr(request_body, "MAX_SMALL_BODIES_BYTES", room)
    app, make = BodyLimit(size_of_body, 2**20, 60.0), bounded_connections(LIMITS)
    crowd = [connect(make, app) for _ in range(200)]
    for connection, _ in crowd:
        connection.data_received(POST % size + b"x" * size)
    for connection, wire in crowd:
        await turns_until_answered(wire)
        connection.connection_lost(None)


@pytest.mark.usefixtures("slow")
async def test_a_connection_with_unparsed_bytes_is_not_closed_as_idle() -> None:
    """Its client has sent a request, although it is not parsed yet."""
    make = bounded_connections(ConnectionLimits(max_connections=30, client_timeout=60.0))
    server = ServerState()
    crowd = [connect(make, size_of_body, server) for _ in range(30)]
    for connection, _ in crowd:
        connection.data_received(POST % 5 + b"hello")
    refused = [connect(make, size_of_body, server) for _ in range(HEALTH_CONNECTIONS + 2)]
    for connection, _ in [*crowd, *refused]:
        connection.shutdown()
    for connection, wire in crowd:
        await turns_until_answered(wire)
        connection.connection_lost(None)


async def test_time_lost_to_other_processes_is_not_charged_to_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice during which the machine was busy elsewhere made its connection wait five times as long."""
    begin = time.perf_counter()
    connection, wire = connect(bounded_connections(LIMITS), size_of_body)
    parse = H11Protocol.data_received

    def late(self: object, data: bytes) -> None:
        time.sleep(0.2)
        parse(self, data)

    monkeypatch.setattr(H11Protocol, "data_received", late)
    connection.data_received(POST % 9000 + b"x" * 9000)
    await turns_until_answered(wire)
    assert time.perf_counter() - begin < 1.2, "three slices"
    connection.connection_lost(None)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz"])
async def test_health_checks_skip_the_queue(path: str) -> None:
    make = bounded_connections(LIMITS)
    others = [connect(make, size_of_body) for _ in range(200)]
    for connection, _ in others:
        connection.data_received(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    check, wire = connect(make, size_of_body)
    check.data_received(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert await turns_until_answered(wire) < 6
    assert sum(b"HTTP/1.1 200" in b"".join(wire.sent) for _, wire in others) < 20
    for connection, _ in [*others, (check, wire)]:
        connection.connection_lost(None)


async def test_a_connection_buffers_at_most_one_slice() -> None:
    """A transport read up to 256 KiB of each of thousands, and kept it until its turn."""
    sizes: list[int] = []

    class Noted(BoundedConnection):
        def data_received(self, data: bytes) -> None:
            sizes.append(len(data))

    turns = SliceTurns()
    made = SmallReads(Noted.__new__(Noted), turns)
    elsewhere = SmallReads(Noted.__new__(Noted), SliceTurns())
    elsewhere.get_buffer(5)[:] = b"y" * SLICE  # of another event loop, maybe at the same time
    for length in (SLICE, 5):
        buffer = made.get_buffer(262_144)
        assert len(buffer) == SLICE
        buffer[:length] = b"x" * length
        made.buffer_updated(length)
    assert sizes == [SLICE, 5]
    for _ in range(CROWD + 1):
        turns.put(Piece("waits", []), first=True)
    assert len(made.get_buffer(262_144)) == CROWDED_SLICE


@pytest.fixture(scope="module")
def locked() -> Iterator[EchoServer]:
    with serve_echo(api_key=KEY) as server:
        yield server


@pytest.mark.parametrize("sent", [b"no HTTP\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 40_000 + b"\r\n\r\n"])
def test_a_client_refused_before_its_body_was_read_can_read_the_error(locked: EchoServer, sent: bytes) -> None:
    """The kernel answers unread bytes with a reset, which overtakes the answer."""
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", locked.port), timeout=20) as connection:
            connection.sendall(sent + b"z" * 60_000)
            time.sleep(0.05)
            received = b""
            while more := connection.recv(65_536):
                received += more
            assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] in (
                "malformed_http",
                "head_too_large",
            )


def test_the_server_uses_these_slices(locked: EchoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    receive = BoundedConnection.data_received

    def noted(self: BoundedConnection, data: bytes) -> None:
        sizes.append(len(data))
        receive(self, data)

    monkeypatch.setattr(BoundedConnection, "data_received", noted)
    body = {"prompt": "a", "user": "x" * 1_000_000}
    assert locked.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}).is_success
    assert sum(sizes) > 1_000_000
    assert max(sizes) <= SLICE


async def test_a_refused_body_is_freed_without_the_garbage_collector() -> None:
    """The chunks of a refused body stayed: the error referred to frames that referred to the error."""

    class Chunk(bytearray):
        """A bytes object that can be weakly referenced."""

    kept: list[weakref.ref[Chunk]] = []
    limit = BodyLimit(size_of_body, 100_000, 60.0)
    limit._small = PartialRequests(REQUEST_BYTES + 5000, "small bodies")

    async def receive() -> Message:
        chunk = Chunk(b"x" * 2000)
        kept.append(weakref.ref(chunk))
        return {"type": "http.request", "body": chunk, "more_body": True}

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    gc.disable()
    try:
        await limit({"type": "http", "headers": [(b"content-length", b"60000")]}, receive, send)
        assert sent[0]["status"] == 503
        assert len(kept) == 3
        assert [chunk() for chunk in kept] == [None] * 3
    finally:
        gc.enable()


def test_many_connections_are_accepted_in_few_turns_of_the_event_loop() -> None:
    """With one per turn, a health check waited for seconds behind thousands before the server accepted it."""

    class Accepted(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(transport)

    async def turns_for(count: int) -> int:
        loop = asyncio.get_running_loop()
        listener = bind("127.0.0.1", 0)
        servers = [await loop.create_server(Accepted, sock=one, backlog=200) for one in listening_sockets(listener)]
        clients = [socket.create_connection(listener.getsockname()) for _ in range(count)]
        time.sleep(0.2)  # a busy kernel may not have queued all of them yet
        turns = 0
        while len(made) < count:
            await asyncio.sleep(0)
            turns += 1
        for client in clients:
            client.close()
        for server in servers:
            server.close()
        return turns

    made: list[asyncio.BaseTransport] = []
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        assert runner.run(turns_for(96)) <= 24
