"""Which nodes are admitted to a group, and how long nodes wait for each other."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection

import pytest

from sglang_jax.errors import ConfigError
from sglang_jax.runner import group_listener
from sglang_jax.runner.group_listener import FollowerListener, Hello, connect_to_leader

SECRET = b"s" * 32
FORM = "of these orders"

Accepted = list[tuple[Connection, str]]


class Leader:
    """A listener that waits for followers on a separate thread."""

    def __init__(self, count: int, secret: bytes = SECRET, timeout: float = 20.0) -> None:
        self.listener = FollowerListener("127.0.0.1", secret, FORM)
        self.address = ("127.0.0.1", self.listener.port)
        self._threads = ThreadPoolExecutor(1)
        self.accepted: Future[Accepted] = self._threads.submit(self.listener.accept, count, timeout)

    def join(self, rank: int, secret: bytes = SECRET, form: str = FORM) -> Connection:
        return connect_to_leader(self.address, secret, Hello(rank, form))

    def close(self) -> None:
        with suppress(ConfigError):
            for connection, _ in self.accepted.result(30):
                connection.close()
        self._threads.shutdown()


@pytest.fixture
def leader() -> Iterator[Leader]:
    leader = Leader(2)
    yield leader
    leader.close()


def test_followers_are_known_by_their_rank_in_any_order_of_arrival(leader: Leader) -> None:
    joined = {rank: leader.join(rank) for rank in (2, 1)}
    accepted = leader.accepted.result(10)
    assert [name for _, name in accepted] == ["node 1", "node 2"]
    for rank, (connection, _) in enumerate(accepted, 1):
        connection.send_bytes(b"you are %d" % rank)
        assert joined[rank].recv_bytes() == b"you are %d" % rank
        joined[rank].close()


def test_silent_connections_block_no_follower(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than the listener waits for at once, and for longer than a follower would wait."""
    monkeypatch.setattr(group_listener, "_MAX_UNPROVEN", 5)
    leader = Leader(1)
    silent = [socket.create_connection(leader.address) for _ in range(12)]
    slow = socket.create_connection(leader.address)
    slow.sendall(b"x")
    start = time.monotonic()
    leader.join(1).close()
    assert time.monotonic() - start < group_listener.HANDSHAKE_SECONDS / 2
    assert [name for _, name in leader.accepted.result(10)] == ["node 1"]
    leader.close()
    for stranger in (*silent, slow):
        stranger.settimeout(5)
        with suppress(ConnectionError):
            while stranger.recv(1000):
                pass
        stranger.close()


def test_a_follower_does_not_wait_forever_for_a_silent_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_listener, "HANDSHAKE_SECONDS", 0.3)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(ConfigError, match=r"refused this node: .*(timed out|did not authenticate within 0.3 s)"),
    ):
        connect_to_leader(silent.getsockname(), SECRET, Hello(1, FORM))


def test_a_proof_that_arrives_byte_by_byte_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_listener, "HANDSHAKE_SECONDS", 0.5)
    leader = Leader(1, timeout=5.0)
    with socket.create_connection(leader.address) as slow:
        start = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() - start < 4.0:
                slow.sendall(b"x")
                time.sleep(0.05)
        assert 0.3 < time.monotonic() - start < 3.0
    leader.join(1).close()
    leader.close()


@pytest.mark.parametrize("secret", [b"guess", b""])
def test_a_follower_without_the_secret_is_refused(
    leader: Leader, secret: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match="do both nodes have the same group secret"):
        leader.join(1, secret)
    with leader.join(1), leader.join(2):
        leader.accepted.result(10)
    assert "it has another group secret" in caplog.text


@pytest.mark.parametrize("said", [group_listener._ANSWERS.encode(group_listener.Answer("")), b""])
def test_a_leader_that_does_not_know_the_secret_is_not_followed(said: bytes) -> None:
    """It accepts any proof, and cannot give one."""

    def pretend(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(group_listener._GREETING + bytes(32))
            theirs = connection.recv(1000)
            while len(theirs) < 32 + 32 + 2 + 10:
                theirs += connection.recv(1000)
            proof = theirs[32:64]  # the follower's own
            connection.sendall(proof + len(said).to_bytes(2, "big") + said)
            connection.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as server:
        pretender = threading.Thread(target=pretend, args=(server,))
        pretender.start()
        with pytest.raises(ConfigError, match="it has another group secret"):
            connect_to_leader(server.getsockname(), SECRET, Hello(1, FORM))
        pretender.join(5)


def test_a_follower_s_proof_is_invalid_on_another_connection(leader: Leader) -> None:
    heard: list[bytes] = []

    def listen_in(server: socket.socket) -> None:
        """Forwards everything between a follower and the leader, and records the follower's bytes."""
        follower, _ = server.accept()
        with follower, socket.create_connection(leader.address) as to_leader:
            follower.sendall(to_leader.recv(1000))
            said = b""
            while len(said) < 32 + 34 or len(said) < 66 + int.from_bytes(said[64:66], "big"):
                said += follower.recv(1000)
            heard.append(said)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=listen_in, args=(server,))
        thread.start()
        with pytest.raises(ConfigError):
            connect_to_leader(server.getsockname(), SECRET, Hello(1, FORM))
        thread.join(5)
    with socket.create_connection(leader.address) as again:
        again.settimeout(5)
        again.recv(1000)
        again.sendall(heard[0])
        with suppress(ConnectionError):
            assert again.recv(1000) == b""
    with leader.join(1), leader.join(2):
        assert len(leader.accepted.result(10)) == 2


def test_without_a_secret_the_handshake_is_enough() -> None:
    leader = Leader(1, secret=b"")
    with pytest.raises(ConfigError):
        leader.join(1, SECRET)
    leader.join(1, b"").close()
    leader.close()


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (Hello(3, FORM), "its node_rank is 3, and the group has nodes 0 to 2"),
        (Hello(0, FORM), "its node_rank is 0"),
        (Hello(2, FORM), "a node with node_rank 2 is already connected"),
        (Hello(1, "of others"), "it runs another version of this package than node 0"),
    ],
)
def test_a_follower_that_does_not_fit_the_group_gets_the_reason(leader: Leader, hello: Hello, reason: str) -> None:
    with leader.join(2):
        with pytest.raises(ConfigError, match=f"refused this node: {reason}"):
            connect_to_leader(leader.address, SECRET, hello)
        with leader.join(1):
            leader.accepted.result(10)


def test_no_further_node_is_admitted_to_a_complete_group(leader: Leader) -> None:
    with leader.join(1), leader.join(2):
        leader.accepted.result(10)
        with pytest.raises(ConfigError):
            leader.join(1)


def test_missing_nodes_are_an_error() -> None:
    leader = Leader(2, timeout=0.5)
    with (
        leader.join(2),
        pytest.raises(ConfigError, match="2 other nodes must connect within 0 s; connected: node 2"),
    ):
        leader.accepted.result(10)
    leader.close()


def test_a_host_name_that_resolves_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [socket.gaierror(socket.EAI_NONAME, "not known"), socket.getaddrinfo("127.0.0.1", 0)]

    def look_up(*arguments: object, **options: object) -> object:
        one = found.pop(0)
        if isinstance(one, OSError):
            raise one
        return one

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(group_listener.time, "sleep", lambda seconds: None)
    listener = FollowerListener("pod-0.hosts", SECRET, FORM)
    assert listener.host == "127.0.0.1"
    listener._listener.close()


def test_an_unknown_host_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_listener, "RESOLVE_SECONDS", 0.0)
    with pytest.raises(ConfigError, match=r"cannot listen on 'no-such-host\.invalid'"):
        FollowerListener("no-such-host.invalid", SECRET, FORM)


def test_it_listens_on_the_requested_address() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on '192\.0\.2\.1' .* dist_bind_host gives another"):
        FollowerListener("192.0.2.1", SECRET, FORM)  # an address without a host (RFC 5737)
    listener = FollowerListener("127.0.0.1", SECRET, FORM)
    assert listener._listener.getsockname()[0] == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", listener.port), timeout=2)
    listener._listener.close()
