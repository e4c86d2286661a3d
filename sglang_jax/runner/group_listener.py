"""Connects processes on other nodes to rank 0. Each side proves that it knows the group's secret before the other uses
its messages; afterwards, messages are neither encrypted nor signed: the network between nodes must be trusted.

The thread that accepts connections never waits for one, so a silent connection blocks no other. The proofs are
HMAC-SHA256 (RFC 2104) over the fresh random numbers of both sides and the message, with a word for the side, so that a
proof can be neither reflected nor replayed.
"""

from __future__ import annotations

import hmac
import logging
import queue
import secrets
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from sglang_jax.errors import ConfigError
from sglang_jax.runner.wire import Codec, FrameError

logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 10.0
"""Maximum time until a proof arrives."""

RESOLVE_SECONDS = 30.0
"""Maximum time until the name of this machine resolves: that of a pod is known only after its start."""

_MAX_UNPROVEN = 256
"""Maximum connections without a proof; then the oldest is dropped. A follower sends its proof within milliseconds."""

_GREETING = b"sglang-jax group 1\n"
_RANDOM_BYTES = 32
_PROOF_BYTES = 32
_MAX_MESSAGE_BYTES = 1024
_FOLLOWER = b"follower"
_LEADER = b"leader"


@dataclass(frozen=True, slots=True)
class Hello:
    """A follower's first message. `form`: `Codec.form` of the orders that it understands."""

    rank: int
    form: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Rank 0's answer. `refusal`: why it refuses the follower; empty if it accepts it."""

    refusal: str


_HELLOS = Codec(Hello)
_ANSWERS = Codec(Answer)


class FollowerListener:
    """Listens for followers on a free `port` of `host`, a name or address. `secret`: of the group; if empty, any
    process with the right protocol is accepted; `form`: `Codec.form` of the orders that will be sent. Raises
    `ConfigError` if `host` is not an address of this machine."""

    def __init__(self, host: str, secret: bytes, form: str) -> None:
        self._listener = _listen(host)
        self._secret = secret
        self._form = form
        self._count = 0
        self._accepted: dict[int, Connection] = {}
        self._unproven: deque[socket.socket] = deque()
        self._lock = threading.Lock()
        self._found: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.host: str
        self.port: int
        self.host, self.port, *_ = self._listener.getsockname()

    def accept(self, count: int, timeout: float) -> list[tuple[Connection, str]]:
        """The connections of ranks 1 to `count`, in order, each with its name for messages. Closes the listener. Raises
        `ConfigError` if they do not arrive within `timeout` seconds."""
        self._count = count
        threading.Thread(target=self._accept_all, daemon=True, name="group-listener").start()
        deadline = time.monotonic() + timeout
        try:
            for _ in range(count):
                self._found.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            names = ", ".join(_name(rank) for rank in sorted(self._accepted)) or "none"
            raise ConfigError(
                f"{count} other nodes must connect within {timeout:.0f} s; connected: {names}. "
                "Is the same command running on each, with its own node_rank?"
            ) from None
        finally:
            self._close()
        return [(self._accepted[rank], _name(rank)) for rank in sorted(self._accepted)]

    def _close(self) -> None:
        with suppress(OSError):  # not every system supports this for a listening socket
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._unproven:
                _hang_up(connection)

    def _accept_all(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except ConnectionError:
                continue
            except OSError:
                return  # the listener was closed
            with self._lock:
                self._unproven.append(connection)
                if len(self._unproven) > _MAX_UNPROVEN:
                    _hang_up(self._unproven.popleft())
            name = f"{address[0]}:{address[1]}"
            threading.Thread(
                target=self._handshake, args=(connection, name), daemon=True, name="group-handshake"
            ).start()

    def _handshake(self, connection: socket.socket, name: str) -> None:
        with connection:
            try:
                self._authenticate(connection)
            except (FrameError, OSError) as error:
                logger.warning("Refused %s, which tried to join the nodes: %s", name, error)
            finally:
                with self._lock, suppress(ValueError):  # it was dropped already
                    self._unproven.remove(connection)

    def _authenticate(self, connection: socket.socket) -> None:
        """Accepts or refuses a connection. Raises `OSError` or `FrameError` with the reason of a refusal."""
        wire = _Handshake(connection)
        random = _GREETING + secrets.token_bytes(_RANDOM_BYTES)
        wire.send(random)
        theirs = wire.read(_RANDOM_BYTES)
        message = wire.read_message(self._secret, _FOLLOWER + random + theirs)
        hello = _HELLOS.decode(message)
        with self._lock:
            refusal = self._refusal(hello)
            wire.send_message(_ANSWERS.encode(Answer(refusal)), self._secret, _LEADER + random + theirs + message)
            if refusal:
                raise FrameError(refusal)
            connection.settimeout(None)
            self._accepted[hello.rank] = Connection(connection.detach())
        self._found.put(hello.rank)

    def _refusal(self, hello: Hello) -> str:
        if hello.form != self._form:
            return "it runs another version of this package than node 0"
        if not 0 < hello.rank <= self._count:
            return f"its node_rank is {hello.rank}, and the group has nodes 0 to {self._count}"
        if hello.rank in self._accepted:
            return f"a node with node_rank {hello.rank} is already connected"
        return ""


def connect_to_leader(address: tuple[str, int], secret: bytes, hello: Hello) -> Connection:
    """A follower's connection to rank 0's `FollowerListener` at `address`. Raises `ConfigError` if nothing listens
    there, if it does not know the secret, or if it refuses this node."""
    where = f"node 0 at {address[0]}:{address[1]}"
    try:
        with socket.create_connection(address, timeout=HANDSHAKE_SECONDS) as connection:
            wire = _Handshake(connection)
            random = wire.read(len(_GREETING) + _RANDOM_BYTES)
            if not random.startswith(_GREETING):
                raise FrameError(f"it sent {random[: len(_GREETING)]!r} as its greeting: does it run another version?")
            mine, message = secrets.token_bytes(_RANDOM_BYTES), _HELLOS.encode(hello)
            wire.send(mine)
            wire.send_message(message, secret, _FOLLOWER + random + mine)
            answer = _ANSWERS.decode(wire.read_message(secret, _LEADER + random + mine + message))
            if answer.refusal:
                raise FrameError(answer.refusal)
            connection.settimeout(None)
            return Connection(connection.detach())
    except (FrameError, OSError) as error:
        raise ConfigError(f"{where} refused this node: {error}") from error


class _Handshake:
    """The messages on a connection before it is trusted. They have a common deadline and a maximum length."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + HANDSHAKE_SECONDS

    def send(self, data: bytes) -> None:
        self._wait()
        self._connection.sendall(data)

    def read(self, size: int) -> bytes:
        """Raises `OSError` if the other side closes the connection or is silent."""
        data = b""
        while len(data) < size:
            self._wait()
            part = self._connection.recv(size - len(data))
            if not part:
                raise ConnectionError("it closed the connection: do both nodes have the same group secret?")
            data += part
        return data

    def send_message(self, message: bytes, secret: bytes, before: bytes) -> None:
        """Sends the message `message` with a proof of the secret over it and the messages `before`."""
        self.send(_prove(secret, before, message) + len(message).to_bytes(2, "big") + message)

    def read_message(self, secret: bytes, before: bytes) -> bytes:
        """Reads a message of the other side and checks its proof. Raises `OSError`; `FrameError` if the proof is
        wrong."""
        proof = self.read(_PROOF_BYTES)
        size = int.from_bytes(self.read(2), "big")
        if size > _MAX_MESSAGE_BYTES:
            raise FrameError(f"it sent {size} bytes; the limit is {_MAX_MESSAGE_BYTES}")
        message = self.read(size)
        if not hmac.compare_digest(proof, _prove(secret, before, message)):
            raise FrameError("it has another group secret; the secret must be the same on every node")
        return message

    def _wait(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0.0:
            raise TimeoutError(f"it did not authenticate within {HANDSHAKE_SECONDS:g} s")
        self._connection.settimeout(left)


def _prove(secret: bytes, before: bytes, message: bytes) -> bytes:
    """The proof of a message. All parts but the last have fixed lengths, so different conversations sign different
    bytes."""
    return hmac.digest(secret, before + message, "sha256")


def _name(rank: int) -> str:
    return f"node {rank}"


def _hang_up(connection: socket.socket) -> None:
    """Closes a connection so that a thread that reads from it notices."""
    with suppress(OSError):  # it is closed already
        connection.shutdown(socket.SHUT_RDWR)


def _listen(host: str) -> socket.socket:
    try:
        family, address = _resolve(host)
        return socket.create_server((address, 0), family=family, backlog=64)
    except OSError as error:
        raise ConfigError(
            f"node 0 cannot listen on {host!r} for the other nodes: {error}. It listens on the host of "
            "dist_init_addr, unless dist_bind_host gives another"
        ) from error


def _resolve(host: str) -> tuple[int, str]:
    """Family and address of a name. Retries, since a new name may not be known everywhere yet."""
    deadline = time.monotonic() + RESOLVE_SECONDS
    while True:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            return family, str(address[0])
        except socket.gaierror:
            if time.monotonic() >= deadline:
                raise
            time.sleep(1.0)
