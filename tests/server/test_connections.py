"""Clients that are silent, slow, too many or that do not read lose their connection, without effect on others."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import logging
import re
import resource
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from helpers.echo_server import EchoServer, post_bytes, serve_echo, wait_for
from helpers.wire import Wire
from helpers.wire import connect as connect_wire
from starlette.types import Message, Receive, Scope, Send
from uvicorn.loops.auto import auto_loop_factory
from uvicorn.server import ServerState

from sglang_jax.server import connections, errors, held_answers
from sglang_jax.server.connections import (
    MAX_HEAD_BYTES,
    MAX_PIPELINED,
    BoundedConnection,
    ConnectionGate,
    ConnectionGroup,
    ConnectionLimits,
    bounded_connections,
)
from sglang_jax.server.errors import BusyError, close_after_error
from sglang_jax.server.serve import bind, listening_sockets

TIMEOUT = 0.6
PATIENCE = 2.5
MOST = 20


@pytest.fixture(scope="module")
def strict() -> Iterator[EchoServer]:
    with serve_echo(model_path="echo:0.001", client_timeout=TIMEOUT, max_connections=MOST) as server:
        yield server


@pytest.fixture(scope="module")
def patient() -> Iterator[EchoServer]:
    """For clients that read slowly: on a busy machine their reads may be delayed for longer than `TIMEOUT`."""
    with serve_echo(model_path="echo:0.001", client_timeout=PATIENCE) as server:
        yield server


def connect(server: EchoServer) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.settimeout(20)
    return connection


def one_answer(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers, body. A reset raises `ConnectionResetError`."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()


def rest_of(connection: socket.socket) -> bytes:
    """Returns the bytes that arrive until the server closes."""
    received = b""
    try:
        while more := connection.recv(65536):
            received += more
    except ConnectionResetError:
        pass
    return received


def healthy(server: EchoServer) -> bool:
    with connect(server) as connection:
        connection.sendall(healthy_request())
        return rest_of(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /hea",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /",
    ],
)
def test_a_missing_head_ends_its_connection(strict: EchoServer, sent: bytes) -> None:
    begin = time.monotonic()
    with connect(strict) as connection:
        connection.sendall(sent)
        if sent.endswith(b"GET /"):  # behind a request that was answered
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
            connection.sendall(b"he")
        assert rest_of(connection).count(b"HTTP/1.1") <= 1
    assert time.monotonic() - begin >= TIMEOUT * 0.9


def test_a_head_that_trickles_ends_its_connection(strict: EchoServer) -> None:
    begin = time.monotonic()
    with connect(strict) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        with pytest.raises(OSError, match=r"[Rr]eset|[Bb]roken"):  # noqa: PT012  # whichever write meets the end
            while time.monotonic() - begin < 15:
                connection.sendall(b"X: y\r\n")
                time.sleep(0.1)
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_pipelined_request_may_be_split_anywhere(patient: EchoServer, cut: int) -> None:
    first = (
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 13\r\n\r\n"
    )
    first += b'{"text": "a"}'
    sent = first + healthy_request()
    with connect(patient) as connection:
        connection.sendall(sent[: -cut * 7])
        time.sleep(0.05)
        connection.sendall(sent[-cut * 7 :])
        answers = rest_of(connection)
    assert answers.count(b"HTTP/1.1 200") == 2


def healthy_request() -> bytes:
    return b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def test_silent_connections_do_not_block_others(strict: EchoServer) -> None:
    silent = [connect(strict) for _ in range(3 * MOST)]
    assert healthy(strict)
    assert strict.http.post("/generate", json={"text": "a"}).json()["text"] == "a"
    assert rest_of(silent[0]) == b""
    for connection in silent:
        connection.close()


def test_busy_connections_are_not_closed_for_new_ones() -> None:
    with serve_echo(model_path="echo:0.02", max_connections=3) as server:
        silent = [connect(server) for _ in range(5)]
        working = [server.send("/generate", {"text": "a" * 100, "stream": True}) for _ in range(3)]
        wait_for(lambda: server.running() == 3)
        with connect(server) as refused:
            refused.sendall(post_bytes("/generate", {"text": "a"}))
            answer = rest_of(refused)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"too_many_connections" in answer
        assert b"the limit is 3 (--max-connections)" in answer
        for connection in working:
            received = b""
            while b"[DONE]" not in received:
                received += connection.recv(65536)
        for connection in (*working, *silent):
            connection.close()
        wait_for(lambda: healthy(server))


def test_the_longest_idle_connection_is_closed_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has sent a part of a request is not idle."""
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.05)
    with serve_echo(max_connections=3) as server:
        silent = [connect(server) for _ in range(3)]
        time.sleep(0.1)  # the others are accepted by now, too
        silent[0].sendall(b"GET /hea")
        time.sleep(0.2)
        assert healthy(server)  # over a new connection
        assert rest_of(silent[1]) == b""  # long before its time is up
        silent[0].sendall(b"lth HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert silent[0].recv(4096).startswith(b"HTTP/1.1 200")
        for connection in silent:
            connection.close()


@pytest.mark.parametrize("together", [False, True], ids=["connect-first", "connect-and-send"])
def test_each_client_of_a_burst_is_answered(together: bool) -> None:
    """112 of 120 were reset: a connection that had just been accepted counted as idle and was closed for the next
    one."""
    clients, most = 120, 8
    with serve_echo(model_path="echo:0.02", max_connections=most) as server:
        asked = post_bytes("/generate", {"text": "a" * 50})
        burst = []
        for _ in range(clients):
            burst.append(connect(server))
            if together:
                burst[-1].sendall(asked)
        for connection in burst if not together else ():
            with suppress(OSError):  # it was refused before it asked
                connection.sendall(asked)
        answers = [one_answer(connection) for connection in burst]
        assert {status for status, _, _ in answers} == {200, 503}
        assert sum(status == 200 for status, _, _ in answers) >= most
        for status, headers, body in answers:
            if status == 503:
                assert json.loads(body)["error"]["code"] == "too_many_connections"
                assert headers["retry-after"] == "1"
        for connection in burst:
            connection.close()
        wait_for(lambda: healthy(server))


def test_a_refused_client_that_is_still_sending_can_read_the_error() -> None:
    """Bytes that came after the connection was closed were answered with a reset, and the 503 was lost."""
    with serve_echo(model_path="echo:0.02", max_connections=1) as server:
        working = server.send("/generate", {"text": "a" * 2000, "stream": True})
        wait_for(lambda: server.running() == 1)
        with connect(server) as refused:
            asked = post_bytes("/generate", {"text": "a" * 1_000_000})
            refused.sendall(asked[:300])
            time.sleep(0.2)  # it is refused by now
            refused.sendall(asked[300:])
            time.sleep(0.2)  # a reset would be here by now
            status, _, body = one_answer(refused)
        assert status == 503
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        with connect(server) as refused:
            refused.sendall(b"HEAD /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
            head, _, body = rest_of(refused).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503")
        assert body == b""
        working.close()


def test_a_client_that_does_not_read_is_disconnected(patient: EchoServer) -> None:
    """Its request ends too. A client that reads slowly is not cut off."""
    body: dict[str, Any] = {"text": "a" * 2000, "stream": True, "sampling_params": {"max_new_tokens": 2000}}
    slow, stalled = connect(patient), connect(patient)
    for connection in (slow, stalled):
        connection.sendall(post_bytes("/generate", body))
    end = b""
    for number in range(100_000):
        more = slow.recv(65536)
        assert more
        end = end[-40:] + more
        if b"[DONE]" in end:
            break
        if number < 16:
            time.sleep(PATIENCE / 12)
    assert b"[DONE]" in end
    wait_for(lambda: not patient.context.in_flight)
    assert b"[DONE]" not in rest_of(stalled)


def test_a_slow_reader_gets_its_long_answer(patient: EchoServer) -> None:
    with connect(patient) as connection:
        connection.sendall(post_bytes("/tokenize", {"prompt": ["a" * 60_000] * 20}))
        received, begin = 0, time.monotonic()
        while received < 20 * 60_000 * 3:
            more = connection.recv(65536)
            assert more
            received += len(more)
            if time.monotonic() - begin < 1.3 * PATIENCE:
                time.sleep(PATIENCE / 12)


def test_only_one_unread_long_answer_is_held(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    asked = post_bytes("/tokenize", {"prompt": ["a" * 60_000] * 30})
    monkeypatch.setattr(held_answers, "MAX_HELD_BYTES", 100_000)
    monkeypatch.setattr(held_answers, "PAUSE_SECONDS", 0.0)
    with serve_echo() as server:
        size = len(server.http.post("/tokenize", json={"prompt": ["a" * 60_000] * 30}).content)
        first, second = connect(server), connect(server)
        for connection in (first, second):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            connection.sendall(asked)
            assert connection.recv(1) == b"H"  # its answer is on its way
        assert len(rest_of(first)) < size
        received = 0
        while received < size:
            more = second.recv(65536)
            assert more
            received += len(more)
    assert caplog.text.count("MiB of responses are waiting to be read") == 1


@pytest.mark.parametrize(("size", "end"), [(MAX_HEAD_BYTES + 1, b""), (MAX_HEAD_BYTES + 1000, b"\r\n\r\n")])
def test_the_size_of_a_head_is_limited(strict: EchoServer, size: int, end: bytes) -> None:
    """A head that arrives in one piece is limited too."""
    with connect(strict) as connection:
        first = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Long: "
        connection.sendall(first + b"x" * (size - len(first) - len(end)) + end)
        head, _, body = rest_of(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431")
    error = json.loads(body)["error"]
    assert (error["code"], error["type"]) == ("head_too_large", "invalid_request_error")
    assert f"the limit is {MAX_HEAD_BYTES} bytes" in error["message"]
    with connect(strict) as connection:
        connection.sendall(first + b"x" * (MAX_HEAD_BYTES - len(first) - 4) + b"\r\n\r\n")
        assert rest_of(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00",
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.1\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\n\r\n",
    ],
)
def test_bytes_that_are_not_http_get_an_error_object(strict: EchoServer, sent: bytes) -> None:
    with connect(strict) as connection:
        connection.sendall(sent + b"\r\n\r\n")
        head, _, body = rest_of(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["code"] == "malformed_http"


def test_a_body_may_have_thousands_of_chunks(strict: EchoServer) -> None:
    text = "".join(chr(97 + number % 26) for number in range(3000))
    payload = json.dumps({"prompt": text}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in payload) + b"0\r\n\r\n"
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    tokens = json.dumps([*text.encode()], separators=(",", ":")).encode()
    with connect(strict) as connection:
        connection.sendall((head + chunks) * 2)
        received = b""
        while received.count(tokens) < 2:
            more = connection.recv(65536)
            assert more, received
            received += more


def test_an_endless_body_ends_its_connection(strict: EchoServer) -> None:
    begin = time.monotonic()
    with connect(strict) as connection:
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        with pytest.raises(OSError, match=r"[Rr]eset|[Bb]roken"):  # noqa: PT012  # whichever write meets the end
            while time.monotonic() - begin < 20:
                connection.sendall(b"10000\r\n" + b"a" * 65536 + b"\r\n")
    assert time.monotonic() - begin < 15
    assert healthy(strict)


def test_no_state_of_a_connection_is_left(strict: EchoServer) -> None:
    wait_for(lambda: not strict.context.in_flight and strict.running() == 0)
    assert [task for task in strict.tasks() if "run_asgi" in task] == []


DESCRIPTORS = """
import resource
from sglang_jax.server.connections import raise_descriptor_limit
for limits in ((100, 2000), (1500, 1500), (100, 700)):
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    print(raise_descriptor_limit(1000), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_process_may_open_as_many_files_as_connections_need() -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 2000
    result = subprocess.run([sys.executable, "-c", DESCRIPTORS], check=True, capture_output=True, text=True)
    assert result.stdout.splitlines() == ["1000 1384 2000", "1000 1500 1500", "316 700 700"]
    assert result.stderr.count("--max-connections is 1000, but the process may open 700 files") == 1


@pytest.mark.parametrize(
    "endless",
    [
        b"GET /health HTTP/1.1\r\nX: " + b"x" * 50_000,
        b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 8000,
        b"GET /health?" + b"x" * 50_000,
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"x" * 700_000,
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"x" * 700_000,
        b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: y\r\n" * 8000,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000,
    ],
    ids=["header", "headers", "url", "chunk extension", "trailer", "trailers", "pipelined requests"],
)
def test_what_a_parser_holds_is_limited(patient: EchoServer, endless: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """The connection ends; before a request has come, with an error."""
    with connect(patient) as connection:
        with suppress(ConnectionError):
            connection.sendall(endless)
        answer = rest_of(connection)
    if b"chunked" in endless:
        assert answer == b""
    elif endless.endswith(b"\r\n\r\n"):
        assert answer.count(b"HTTP/1.1 200") <= MAX_PIPELINED
    else:
        assert answer.startswith(b"HTTP/1.1 431 head_too_large")
    assert healthy(patient)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_pipelined_requests_are_answered_in_order(patient: EchoServer) -> None:
    texts = [f"{number:03}" for number in range(MAX_PIPELINED)]
    sent = b"".join(post_bytes("/generate", {"text": text}) for text in texts)
    with connect(patient) as connection:
        connection.sendall(sent)
        received = b""
        while received.count(b'"text":"') < len(texts):
            more = connection.recv(65536)
            assert more, received
            received += more
    assert re.findall(rb'"text":"(\d+)', received) == [text.encode() for text in texts]


@pytest.mark.parametrize(("limit", "value"), [("MAX_LINGERING", 0), ("LINGER_SECONDS", 0.3)])
def test_lingering_connections_are_limited(monkeypatch: pytest.MonkeyPatch, limit: str, value: float) -> None:
    """Limits on their number and time, each tested separately."""
    for name, large in (("MAX_LINGERING", 100), ("LINGER_SECONDS", 1e6)):
        monkeypatch.setattr(connections, name, value if name == limit else large)
    with serve_echo() as server, connect(server) as endless:
        endless.sendall(b"no HTTP\r\n\r\n")
        with pytest.raises(OSError, match=r"[Rr]eset|[Bb]roken"):  # noqa: PT012  # whichever write meets the end
            for _ in range(200):
                endless.sendall(b"a" * 4096)
                time.sleep(0.01)


@pytest.mark.parametrize("sent", [b"no HTTP\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 40_000 + b"\r\n\r\n"])
def test_a_client_refused_before_its_body_was_read_can_read_the_error(patient: EchoServer, sent: bytes) -> None:
    """The kernel answers unread bytes with a reset, which overtakes the answer."""
    for _ in range(5):
        with connect(patient) as connection:
            connection.sendall(sent + b"z" * 60_000)
            time.sleep(0.05)
            _, _, body = rest_of(connection).partition(b"\r\n\r\n")
            assert json.loads(body)["error"]["code"] in ("malformed_http", "head_too_large")


async def test_a_slow_client_pauses_the_stream_and_a_lost_one_ends_it() -> None:
    """Without the wait, the server would keep the whole stream in memory for a client that reads nothing."""
    sent = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(4):
            await send({"type": "http.response.body", "body": b"%d" % number, "more_body": True})
            sent.append(number)

    async def iterations() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    limits = ConnectionLimits(max_connections=8, client_timeout=60.0)
    connection, wire = connect_wire(bounded_connections(limits), app)
    connection.pause_writing()
    connection.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
    await iterations()
    assert not sent
    connection.resume_writing()
    connection.pause_writing()
    await iterations()
    before = len(wire.sent)
    assert len(sent) < 4
    wire.closing = True
    connection.connection_lost(None)
    await iterations()
    assert sent == [0, 1, 2, 3], "the application is not kept"
    assert len(wire.sent) == before, "nothing is written to a client that left"


async def some_iterations() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def ok(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def waits_for_the_client_to_leave(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
GET_AND_CLOSE = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
GET_1_0 = b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
LIMITS = ConnectionLimits(max_connections=8, client_timeout=60.0)


@pytest.mark.parametrize("lost_by", [None, ConnectionResetError()], ids=["close", "reset"])
@pytest.mark.parametrize("app", [ok, waits_for_the_client_to_leave])
@pytest.mark.parametrize(
    "sent",
    [
        b"",
        GET,
        GET * 3,
        GET_AND_CLOSE * 3,
        GET[:-4],
        GET + GET[:-4],
        GET + b"no HTTP\r\n\r\n",
        b"no HTTP\r\n\r\n",
        GET[:-2] + b"X: y\r\n" * 200,
        GET.replace(b"Host", b"Connection: upgrade\r\nUpgrade: h2c\r\nHost"),
    ],
)
async def test_a_lost_connection_is_freed_at_once(sent: bytes, app: Any, lost_by: Exception | None) -> None:
    """Without the garbage collector, which runs rarely: a timer or a request that had not started kept it."""
    server = ServerState()
    gc.disable()
    try:
        connection, _ = connect_wire(bounded_connections(LIMITS), app, server)
        reference = weakref.ref(connection)
        connection.data_received(sent)
        await some_iterations()
        connection.connection_lost(lost_by)
        del connection
        await some_iterations()
        assert reference() is None
        assert not server.tasks
    finally:
        gc.enable()


async def test_a_client_that_leaves_ends_the_request_before_its_last() -> None:
    """uvicorn told only the last request: the one that ran kept the engine busy for nobody, and wrote its answer to a
    closed connection, each time with a traceback in the log."""
    state = ServerState()
    connection, _ = connect_wire(bounded_connections(LIMITS), waits_for_the_client_to_leave, state)
    connection.data_received(GET * 2)
    await some_iterations()
    assert len(state.tasks) == 1
    connection.connection_lost(None)
    await some_iterations()
    assert not state.tasks


@pytest.mark.parametrize("closed_by", ["abort", "eof", "garbage"])
async def test_nothing_is_written_to_a_closing_connection(closed_by: str, caplog: pytest.LogCaptureFixture) -> None:
    """asyncio tells of the loss an iteration later. What was written until then raised an error with uvloop."""
    proceed = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await proceed.wait()
        await ok(scope, receive, send)

    connection, wire = connect_wire(bounded_connections(LIMITS), ConnectionGate(app))
    connection.data_received(GET)
    await some_iterations()
    if closed_by == "garbage":
        connection.data_received(b"no HTTP\r\n\r\n")
    else:
        if closed_by == "eof":
            connection.eof_received()
        wire.close()
    proceed.set()
    await some_iterations()
    assert wire.sent == []
    assert wire.closing
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    connection.connection_lost(None)


@pytest.mark.parametrize("end", ["kept open", "Connection: close", "HTTP/1.0, others behind", "half closed"])
async def test_a_client_that_does_not_read_the_end_of_an_answer_is_disconnected(end: str) -> None:
    """Up to 64 KiB that were left in the write buffer, and their connection, waited forever."""
    limits = ConnectionLimits(max_connections=8, client_timeout=0.05)
    connection, wire = connect_wire(bounded_connections(limits), ok)
    aborted = asyncio.Event()
    wire.abort = aborted.set  # type: ignore[method-assign]
    requests = {"Connection: close": GET_AND_CLOSE, "HTTP/1.0, others behind": GET_1_0 * 2}
    connection.data_received(requests.get(end, GET))
    if end == "half closed":
        connection.eof_received()
    await asyncio.wait_for(aborted.wait(), 5)
    connection.connection_lost(None)


async def test_a_client_that_has_read_one_answer_has_time_for_the_next() -> None:
    limits = ConnectionLimits(max_connections=8, client_timeout=0.3)
    connection, wire = connect_wire(bounded_connections(limits), waits_for_the_client_to_leave)
    begin = asyncio.get_running_loop().time()
    connection.pause_writing()
    connection.resume_writing()
    connection.data_received(GET)  # read after 0 s
    await asyncio.sleep(0.2)
    wire.unread = 100_000
    connection.pause_writing()
    while not wire.closing:
        await asyncio.sleep(0.01)
    assert asyncio.get_running_loop().time() - begin >= 0.5
    connection.connection_lost(None)


def bounded(
    app: Any, group: ConnectionGroup | None = None, state: ServerState | None = None, client_timeout: float = 60.0
) -> tuple[BoundedConnection, Wire, ConnectionGroup]:
    """A connection of a group, or of a separate one."""
    group = group or ConnectionGroup(ConnectionLimits(max_connections=1, client_timeout=client_timeout))
    connection, wire = connect_wire(partial(BoundedConnection, group), ConnectionGate(app), state)
    return connection, wire, group


async def test_a_client_that_reads_slowly_keeps_its_connection() -> None:
    connection, wire, _ = bounded(waits_for_the_client_to_leave, client_timeout=0.1)
    wire.unread = 100
    connection.data_received(GET)
    connection.pause_writing()
    for _ in range(15):
        await asyncio.sleep(0.02)
        wire.unread -= 1
        assert not wire.closing
    connection.connection_lost(None)


@pytest.mark.parametrize("paused", [False, True])
async def test_only_clients_that_let_the_server_wait_are_disconnected(paused: bool) -> None:
    """With a few bytes of a stream in the buffer, it does not wait, whatever happened before; a request that comes
    while it waits changes nothing."""
    connection, wire, _ = bounded(waits_for_the_client_to_leave, client_timeout=0.05)
    connection.data_received(GET)
    wire.unread = 10
    connection.pause_writing()
    if paused:
        connection.data_received(GET)
    else:
        connection.resume_writing()
    await asyncio.sleep(0.2)
    assert wire.closing == paused
    connection.connection_lost(None)


async def test_bytes_left_of_an_answer_do_not_end_the_next_request() -> None:
    connection, wire, _ = bounded(ok, client_timeout=0.05)
    connection.data_received(GET)
    await some_iterations()
    assert wire.sent
    connection.app = ConnectionGate(waits_for_the_client_to_leave)  # type: ignore[assignment]  # Starlette's, not uvicorn's type
    connection.data_received(GET)
    await asyncio.sleep(0.2)
    assert not wire.closing
    connection.connection_lost(None)


async def test_a_connection_counts_where_it_is() -> None:
    state = ServerState()
    connection, wire, group = bounded(ok, state=state)
    assert (list(group.waiting), group.served) == ([connection], set())
    connection.data_received(GET)
    assert not group.waiting
    await some_iterations()
    assert (list(group.waiting), group.served) == ([connection], set())
    connection.data_received(GET * 2)  # the second is not refused because the first is served
    await some_iterations()
    assert [answer for answer in wire.sent if answer.startswith(b"HTTP")] == [wire.sent[0]] * 3
    assert (list(group.waiting), group.served) == ([connection], set())
    connection.data_received(b"no HTTP\r\n\r\n")
    assert wire.ended
    assert (list(group.waiting), list(group.lingering), state.connections) == ([], [connection], set())
    connection.connection_lost(None)
    assert not group.lingering


async def test_a_lost_connection_is_not_served_any_more() -> None:
    """Health checks never are."""
    state = ServerState()
    checking, _, group = bounded(waits_for_the_client_to_leave, state=state)
    checking.data_received(GET.replace(b"/ ", b"/livez "))
    connection, _, _ = bounded(waits_for_the_client_to_leave, group, state)
    connection.data_received(GET)
    await some_iterations()
    assert group.served == {connection}
    connection.connection_lost(None)
    assert group.served == set()
    checking.connection_lost(None)


async def test_the_connection_that_has_waited_longest_is_refused_for_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only if those above the limit are open as well: they have not been silent for `IDLE_SECONDS`."""
    monkeypatch.setattr(connections, "HEALTH_CONNECTIONS", 1)
    state = ServerState()
    first, wire, group = bounded(ok, state=state)
    second, _, _ = bounded(ok, group, state)
    assert list(group.waiting) == [first, second]
    third, _, _ = bounded(ok, group, state)
    assert list(group.waiting) == [second, third]
    assert wire.sent[0].startswith(b"HTTP/1.1 503 too_many_connections")
    assert b"Retry-After: 1" in wire.sent[0]
    for connection in (first, second, third):
        connection.connection_lost(None)


async def test_a_head_of_many_lines_may_come_in_pieces() -> None:
    """Colons and ends of lines do not count."""
    lines = b"".join(b"X%03d: %b\r\n" % (number, b"y" * 250) for number in range(127))
    head = b"POST / HTTP/1.1\r\nContent-Length: 5\r\n" + lines + b"\r\n"
    assert len(head) > MAX_HEAD_BYTES
    connection, wire, _ = bounded(waits_for_the_client_to_leave)
    connection.data_received(head[:20_000])
    connection.data_received(head[20_000:])
    assert (wire.sent, wire.closing) == ([], False)
    connection.connection_lost(None)
    connection, wire, _ = bounded(waits_for_the_client_to_leave)
    connection.data_received(head[:-2] + b"X: y\r\n\r\n")
    assert wire.sent[0].startswith(b"HTTP/1.1 431")
    connection.connection_lost(None)


async def test_requests_behind_the_last_one_do_not_cost_its_answer() -> None:
    connection, wire, _ = bounded(ok)
    connection.data_received(GET_AND_CLOSE + GET)
    await some_iterations()
    assert b"".join(wire.sent).count(b"HTTP/1.1 200") == 1
    assert wire.closing
    connection.connection_lost(None)


@pytest.mark.parametrize("limit", ["MAX_LINGERED_BYTES", "LINGER_SECONDS"])
async def test_the_rest_of_a_refused_body_is_limited(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(errors, limit, {"MAX_LINGERED_BYTES": 100, "LINGER_SECONDS": 0.05}[limit])
    read, sent = [], []

    async def receive() -> Message:
        read.append(10)
        await asyncio.sleep(60 if limit == "LINGER_SECONDS" else 0)
        assert len(read) < 1000
        return {"type": "http.request", "body": b"x" * 10, "more_body": True}

    async def send(message: Message) -> None:
        sent.append(message)

    await asyncio.wait_for(close_after_error(BusyError("full"), {"type": "http", "path": "/"}, receive, send), 20)
    assert len(read) == (10 if limit == "MAX_LINGERED_BYTES" else 1)
    assert (b"connection", b"close") in sent[0]["headers"]
    assert sent[-1] == {"type": "http.response.body", "body": b""}


async def test_the_size_of_a_target_is_limited() -> None:
    connection, wire, _ = bounded(ok)
    connection.data_received(GET.replace(b"/ ", b"/?" + b"x" * MAX_HEAD_BYTES + b" ", 1))
    assert wire.sent[0].startswith(b"HTTP/1.1 431")
    connection.connection_lost(None)


@pytest.mark.parametrize("together", [False, True])
def test_a_head_behind_an_answered_request_has_its_time(strict: EchoServer, together: bool) -> None:
    with connect(strict) as connection:
        begin = time.monotonic()
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + (b"GET /" if together else b""))
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        if not together:
            connection.sendall(b"GET /")
        assert b"HTTP/1.1" not in rest_of(connection)
    assert time.monotonic() - begin < 10


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"


@pytest.mark.parametrize(
    "framing", [b"Content-Length: %d\r\n\r\n%b", b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"]
)
@pytest.mark.parametrize("cut", [1, 50, 200, 300, 600, 1000])
def test_a_request_that_offers_an_upgrade_is_read_to_its_end(patient: EchoServer, framing: bytes, cut: int) -> None:
    """As Java's client and curl --http2 send it. Its body was lost, and what came behind it in the same piece."""
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + UPGRADE
    sent = (head + framing % (13, b'{"text": "a"}')) * 2 + healthy_request()
    with connect(patient) as connection:
        connection.sendall(sent[:cut])
        time.sleep(0.02)
        connection.sendall(sent[cut:])
        answers = rest_of(connection)
    assert answers.count(b"HTTP/1.1 200") == answers.count(b"HTTP/1.1") == 3
    assert answers.count(b'"text":"a"') == 2


def test_the_body_of_a_request_that_offers_an_upgrade_is_not_read_as_a_request(patient: EchoServer) -> None:
    """Otherwise, a client could send requests that a proxy has not seen, and others would get their answers."""
    hidden = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connect(patient) as connection:
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + UPGRADE
        )
        connection.sendall(b"Content-Length: %d\r\n\r\n" % len(hidden))
        time.sleep(0.05)
        connection.sendall(hidden + healthy_request().replace(b"/health", b"/livez"))
        answers = rest_of(connection)
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"400", b"200"]


@pytest.mark.parametrize("target", [b"localhost:80", b"/health"])
def test_connect_is_refused(patient: EchoServer, target: bytes) -> None:
    with connect(patient) as connection:
        connection.sendall(b"CONNECT " + target + b" HTTP/1.1\r\nHost: localhost\r\n\r\n" + healthy_request())
        assert re.findall(rb"HTTP/1.1 (\d+ \w+)", rest_of(connection)) == [b"400 malformed_http"]


def test_headers_behind_a_body_are_not_headers_of_the_request() -> None:
    """A proxy that sets or removes headers may not look at those. uvicorn added them to the others."""
    with serve_echo(api_key="secret") as server, connect(server) as connection:
        connection.sendall(
            b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"0\r\nAuthorization: Bearer secret\r\n\r\n"
        )
        assert rest_of(connection).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("sent", [b"no HTTP\r\n\r\n" + b"z" * 60_000, b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000])
async def test_a_connection_is_refused_once(sent: bytes) -> None:
    """The second answer met an end that was already written, and broke the connection with a traceback in the log."""
    connection, wire = connect_wire(bounded_connections(LIMITS), ok)
    connection.data_received(sent)
    connection.data_received(sent)
    assert len(wire.sent) == 1
    connection.connection_lost(None)


def test_many_connections_are_accepted_in_few_iterations_of_the_event_loop() -> None:
    """With one per iteration, a health check waited for seconds behind thousands before the server accepted it."""

    class Accepted(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.append(transport)

    async def iterations_for(count: int) -> int:
        loop = asyncio.get_running_loop()
        listener = bind("127.0.0.1", 0)
        servers = [await loop.create_server(Accepted, sock=one, backlog=200) for one in listening_sockets(listener)]
        clients = [socket.create_connection(listener.getsockname()) for _ in range(count)]
        time.sleep(0.2)  # a busy kernel may not have queued all of them yet
        iterations = 0
        while len(made) < count:
            await asyncio.sleep(0)
            iterations += 1
        for client in clients:
            client.close()
        for server in servers:
            server.close()
        return iterations

    made: list[asyncio.BaseTransport] = []
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        assert runner.run(iterations_for(96)) <= 24
