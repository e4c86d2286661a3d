"""How processes on other nodes come to rank 0: each side proves that it knows the group's secret, before a word is
believed.

Nobody is waited for in the thread that accepts connections: whoever connects and says nothing keeps nobody out. What
goes over a connection afterwards is neither encrypted nor signed: the network between nodes is to be trusted.

The proofs are HMAC-SHA256 (RFC 2104) over both sides' fresh random numbers and what is said with them, each with the
word of its side, so that no proof can be sent back or sent again.
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
"""How long a proof may take to come."""

RESOLVE_SECONDS = 30.0
"""How long the name of an own address may take to be known: a pod's comes after its start."""

_MOST_STRANGERS = 256
"""Most connections without a proof; then the oldest is dropped. A follower's comes within milliseconds."""

_GREETING = b"sglang-jax group 1\n"
_RANDOM_BYTES = 32
_PROOF_BYTES = 32
_MOST_SAID = 1024
_FOLLOWER = b"follower"
_LEADER = b"leader"


@dataclass(frozen=True, slots=True)
class Hello:
    """What a follower says of itself. `form`: `Codec.form` of the orders that it understands."""

    rank: int
    form: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Rank 0's. `refusal`: why the follower is not let in; empty if it is."""

    refusal: str


_HELLOS = Codec(Hello)
_ANSWERS = Codec(Answer)


class FollowerListener:
    """Where followers connect to. `port` is free for it to choose; `host` is the address of its name.

    **Arguments:** `host`: name or address to listen on, and on no other; `secret`: the group's, empty if it has none,
    and then anybody is let in who says the right words; `form`: `Codec.form` of the orders that will be sent.

    **Raises:** `ConfigError` if `host` is no address of this machine.
    """

    def __init__(self, host: str, secret: bytes, form: str) -> None:
        self._listener = _listen(host)
        self._secret = secret
        self._form = form
        self._count = 0
        self._here: dict[int, Connection] = {}
        self._strangers: deque[socket.socket] = deque()
        self._lock = threading.Lock()
        self._found: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.host: str
        self.port: int
        self.host, self.port, *_ = self._listener.getsockname()

    def accept(self, count: int, timeout: float) -> list[tuple[Connection, str]]:
        """The connections of ranks 1 to `count`, in this order, each with what to call it. Closes the listener.

        **Raises:** `ConfigError` if they do not come within `timeout` seconds.
        """
        self._count = count
        threading.Thread(target=self._accept_all, daemon=True, name="group-listener").start()
        deadline = time.monotonic() + timeout
        try:
            for _ in range(count):
                self._found.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            names = ", ".join(_name(rank) for rank in sorted(self._here)) or "none"
            raise ConfigError(
                f"{count} other nodes must connect within {timeout:.0f} s; connected: {names}. "
                "Is the same command running on each, with its own node_rank?"
            ) from None
        finally:
            self._close()
        return [(self._here[rank], _name(rank)) for rank in sorted(self._here)]

    def _close(self) -> None:
        with suppress(OSError):  # not every system knows this of a socket that listens
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for stranger in self._strangers:
                _hang_up(stranger)

    def _accept_all(self) -> None:
        while True:
            try:
                stranger, address = self._listener.accept()
            except ConnectionError:
                continue
            except OSError:
                return  # the listener was closed
            with self._lock:
                self._strangers.append(stranger)
                if len(self._strangers) > _MOST_STRANGERS:
                    _hang_up(self._strangers.popleft())
            name = f"{address[0]}:{address[1]}"
            threading.Thread(target=self._meet, args=(stranger, name), daemon=True, name="group-handshake").start()

    def _meet(self, stranger: socket.socket, name: str) -> None:
        with stranger:
            try:
                self._let_in(stranger)
            except (FrameError, OSError) as error:
                logger.warning("Refused %s, which tried to join the nodes: %s", name, error)
            finally:
                with self._lock, suppress(ValueError):  # it was dropped already
                    self._strangers.remove(stranger)

    def _let_in(self, stranger: socket.socket) -> None:
        """Raises `OSError` or `FrameError`, saying why not."""
        wire = _Handshake(stranger)
        random = _GREETING + secrets.token_bytes(_RANDOM_BYTES)
        wire.send(random)
        theirs = wire.read(_RANDOM_BYTES)
        said = wire.read_said(self._secret, _FOLLOWER + random + theirs)
        hello = _HELLOS.decode(said)
        with self._lock:
            refusal = self._refusal(hello)
            wire.say(_ANSWERS.encode(Answer(refusal)), self._secret, _LEADER + random + theirs + said)
            if refusal:
                raise FrameError(refusal)
            stranger.settimeout(None)
            self._here[hello.rank] = Connection(stranger.detach())
        self._found.put(hello.rank)

    def _refusal(self, hello: Hello) -> str:
        if hello.form != self._form:
            return "it runs another version of this package than node 0"
        if not 0 < hello.rank <= self._count:
            return f"its node_rank is {hello.rank}, and the group has nodes 0 to {self._count}"
        if hello.rank in self._here:
            return f"a node with node_rank {hello.rank} is already connected"
        return ""


def connect_to_leader(address: tuple[str, int], secret: bytes, hello: Hello) -> Connection:
    """A follower's connection to rank 0's `FollowerListener` at `address`.

    **Raises:** `ConfigError` if nobody listens there, if it does not know the secret, or does not let this node in.
    """
    where = f"node 0 at {address[0]}:{address[1]}"
    try:
        with socket.create_connection(address, timeout=HANDSHAKE_SECONDS) as connection:
            wire = _Handshake(connection)
            random = wire.read(len(_GREETING) + _RANDOM_BYTES)
            if not random.startswith(_GREETING):
                raise FrameError(f"it sent {random[: len(_GREETING)]!r} as its greeting: does it run another version?")
            mine, said = secrets.token_bytes(_RANDOM_BYTES), _HELLOS.encode(hello)
            wire.send(mine)
            wire.say(said, secret, _FOLLOWER + random + mine)
            answer = _ANSWERS.decode(wire.read_said(secret, _LEADER + random + mine + said))
            if answer.refusal:
                raise FrameError(answer.refusal)
            connection.settimeout(None)
            return Connection(connection.detach())
    except (FrameError, OSError) as error:
        raise ConfigError(f"{where} refused this node: {error}") from error


class _Handshake:
    """The words on a connection before it is trusted: none waits longer than until a common deadline, none is long."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + HANDSHAKE_SECONDS

    def send(self, data: bytes) -> None:
        """Raises `OSError`."""
        self._wait()
        self._connection.sendall(data)

    def read(self, size: int) -> bytes:
        """Raises `OSError` if the other side ends or falls silent."""
        data = b""
        while len(data) < size:
            self._wait()
            part = self._connection.recv(size - len(data))
            if not part:
                raise ConnectionError("it closed the connection: do both nodes have the same group secret?")
            data += part
        return data

    def say(self, said: bytes, secret: bytes, before: bytes) -> None:
        """Sends what was `said` with a proof that the secret is known, over it and what went `before`."""
        self.send(_prove(secret, before, said) + len(said).to_bytes(2, "big") + said)

    def read_said(self, secret: bytes, before: bytes) -> bytes:
        """What the other side says with its proof. Raises `OSError`; `FrameError` if the proof is wrong."""
        proof = self.read(_PROOF_BYTES)
        size = int.from_bytes(self.read(2), "big")
        if size > _MOST_SAID:
            raise FrameError(f"it sent {size} bytes; the limit is {_MOST_SAID}")
        said = self.read(size)
        if not hmac.compare_digest(proof, _prove(secret, before, said)):
            raise FrameError("it has another group secret; the secret must be the same on every node")
        return said

    def _wait(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0.0:
            raise TimeoutError(f"it did not authenticate within {HANDSHAKE_SECONDS:g} s")
        self._connection.settimeout(left)


def _prove(secret: bytes, before: bytes, said: bytes) -> bytes:
    """Lengths of all parts but the last are fixed, so that no two conversations give one text."""
    return hmac.digest(secret, before + said, "sha256")


def _name(rank: int) -> str:
    return f"node {rank}"


def _hang_up(stranger: socket.socket) -> None:
    """Whoever reads from it notices."""
    with suppress(OSError):  # it has ended
        stranger.shutdown(socket.SHUT_RDWR)


def _listen(host: str) -> socket.socket:
    """A socket that listens on one address and on a free port."""
    try:
        family, address = _resolve(host)
        return socket.create_server((address, 0), family=family, backlog=64)
    except OSError as error:
        raise ConfigError(
            f"node 0 cannot listen on {host!r} for the other nodes: {error}. It listens on the host of "
            "dist_init_addr, unless dist_bind_host gives another"
        ) from error


def _resolve(host: str) -> tuple[int, str]:
    """Family and address of a name, which may be so new that it is not known everywhere yet."""
    deadline = time.monotonic() + RESOLVE_SECONDS
    while True:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            return family, str(address[0])
        except socket.gaierror:
            if time.monotonic() >= deadline:
                raise
            time.sleep(1.0)
