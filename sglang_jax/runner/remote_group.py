"""Orders over the network: rank 0 tells processes on other hosts what to run, and each notices when the other is gone.

A connection closes when a process ends, however it ends. When a host loses its power or its network nothing closes, so
both sides send a sign of life every few seconds, from threads of their own: a process may wait for its device, or for
the very process that is gone, for as long as it likes.

A process that fails tells the others why before it ends: theirs may be waiting for it where no order is read.

Orders are pickled: connections are opened with a secret that the processes have agreed on, and only rank 0's are read.
What followers say is plain text.
"""

from __future__ import annotations

import os
import pickle
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener

from sglang_jax.errors import ConfigError
from sglang_jax.runner.group import Leave, Order

ALIVE_EVERY_SECONDS = 2.0
LOST_AFTER_SECONDS = 15.0
_SECONDS_TO_END = 15.0

_ALIVE = b"alive"

OnLoss = Callable[[str], None]
"""Called once, on a thread of the connection, with what happened."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Rank 0 has failed: end with an error, whatever is waited for."""

    reason: str


class RemoteFollowers:
    """`Followers` on other hosts, which have connected to `listener`.

    **Arguments:** `count`: how many are waited for; `timeout`: seconds to wait for them; `on_loss`: called when one is
    lost, at the latest `LOST_AFTER_SECONDS` after its last sign of life.

    **Raises:** `ConfigError` if they do not come in time.
    """

    def __init__(self, listener: FollowerListener, count: int, timeout: float, on_loss: OnLoss) -> None:
        self._on_loss = on_loss
        self._lost: str | None = None
        self._leaving = False
        self._links = [_Link(connection, name) for connection, name in listener.accept(count, timeout)]
        self._watches = [threading.Thread(target=self._watch, args=(link,), daemon=True) for link in self._links]
        for watch in self._watches:
            watch.start()

    def send(self, order: Order) -> None:
        """See `Followers`."""
        self.check()
        for link in self._links:
            try:
                link.send(order)
            except OSError as error:
                self._lose(f"{link.name} is lost: {error}")
        self.check()

    def check(self) -> None:
        """See `Followers`."""
        if self._lost is not None:
            raise RuntimeError(self._lost)

    def close(self) -> None:
        """See `Followers`."""
        self._end(Leave())

    def give_up(self, reason: str) -> None:
        """Has every follower end with an error, in place of `close`: this process has failed."""
        self._end(GiveUp(reason))

    def _end(self, order: Leave | GiveUp) -> None:
        self._leaving = True
        if self._lost is None:
            for link in self._links:
                with suppress(OSError):  # it has ended
                    link.send(order)
        deadline = time.monotonic() + _SECONDS_TO_END
        for watch, link in zip(self._watches, self._links, strict=True):
            watch.join(max(deadline - time.monotonic(), 0.0))
            link.close()

    def _watch(self, link: _Link) -> None:
        words: list[str] = []
        end = link.listen(lambda data: words.append(data.decode(errors="replace")))
        if not self._leaving:
            self._lose(f"{link.name} gave up: {words[-1]}" if words else f"{link.name} is lost: {end}")

    def _lose(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
            self._on_loss(reason)


class FollowerListener:
    """Where followers connect to. `port` is free for it to choose."""

    def __init__(self, host: str, secret: bytes) -> None:
        self._listener = Listener((host, 0), backlog=64, authkey=secret)
        self.port: int = self._listener.address[1]

    def accept(self, count: int, timeout: float) -> list[tuple[Connection, str]]:
        """The connections of `count` followers, each with the name that it gave. Closes the listener.

        **Raises:** `ConfigError` if they do not come within `timeout` seconds.
        """
        found: queue.SimpleQueue[tuple[Connection, str]] = queue.SimpleQueue()

        threading.Thread(target=self._accept_all, args=(found,), daemon=True).start()
        deadline = time.monotonic() + timeout
        connections: list[tuple[Connection, str]] = []
        try:
            while len(connections) < count:
                connections.append(found.get(timeout=max(deadline - time.monotonic(), 0.0)))
        except queue.Empty:
            names = ", ".join(name for _, name in connections) or "none"
            raise ConfigError(
                f"{count} other hosts must connect within {timeout:.0f} s; those that did: {names}. "
                "Is the same command running on each, with its own node_rank?"
            ) from None
        finally:
            self._listener.close()
        return connections

    def _accept_all(self, found: queue.SimpleQueue[tuple[Connection, str]]) -> None:
        while True:
            try:
                connection = self._listener.accept()
                found.put((connection, connection.recv_bytes(256).decode()))
            except (AuthenticationError, EOFError, ConnectionError):
                continue  # a stranger
            except OSError:
                return  # the listener was closed


class LeaderLink:
    """A follower's connection to rank 0.

    **Arguments:** `name`: how rank 0 calls this process in messages; `on_loss`: called when rank 0 is lost.
    """

    def __init__(self, address: tuple[str, int], secret: bytes, name: str, on_loss: OnLoss) -> None:
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._on_loss = on_loss
        connection = Client(address, authkey=secret)
        connection.send_bytes(name.encode())
        self._link = _Link(connection, "host 0")
        self._leaving = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def next_order(self) -> Order:
        """Blocks until rank 0 has one."""
        return self._orders.get()

    def close(self) -> None:
        """Closes the connection."""
        self._leaving.set()
        self._link.close()

    def give_up(self, reason: str) -> None:
        """Tells rank 0 that this process has failed, and closes the connection."""
        with suppress(OSError):  # rank 0 has ended
            self._link.say(reason.encode())
        self.close()

    def _watch(self) -> None:
        def take(data: bytes) -> None:
            message: Order | GiveUp = pickle.loads(data)
            if isinstance(message, GiveUp):
                # This process may be waiting for rank 0 itself, where no order is read.
                self._leaving.set()
                self._on_loss(f"host 0 gave up: {message.reason}")
                return
            if isinstance(message, Leave):
                self._leaving.set()
            self._orders.put(message)

        end = self._link.listen(take)
        if not self._leaving.is_set():
            self._on_loss(f"host 0 is lost: {end}")


class _Link:
    """A connection that says that it is alive, and knows how long the other side has been silent."""

    def __init__(self, connection: Connection, name: str) -> None:
        self.name = name
        self._connection = connection
        self._sending = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._say_alive, daemon=True).start()

    def send(self, order: Order | GiveUp) -> None:
        """Raises `OSError` if the other side is gone."""
        self.say(pickle.dumps(order))

    def say(self, data: bytes) -> None:
        """Raises as `send`."""
        with self._sending:
            self._connection.send_bytes(data)

    def listen(self, take: Callable[[bytes], None]) -> str:
        """Hands on what is not a sign of life until the other side ends or falls silent; says which."""
        try:
            while self._connection.poll(LOST_AFTER_SECONDS):
                data = self._connection.recv_bytes()
                if data != _ALIVE:
                    take(data)
        except (EOFError, OSError):
            return "its connection closed"
        finally:
            self._closed.set()
            with self._sending:
                self._connection.close()
        return f"no sign of life for {LOST_AFTER_SECONDS:.0f} s"

    def close(self) -> None:
        """Ends the connection, which whoever listens then closes: closed under a reader, its number could be another
        file's by the time that it is read."""
        self._closed.set()
        with self._sending:
            if self._connection.closed:
                return
            with socket.socket(fileno=os.dup(self._connection.fileno())) as both_ways, suppress(OSError):
                both_ways.shutdown(socket.SHUT_RDWR)  # raises where the other side has ended

    def _say_alive(self) -> None:
        while not self._closed.wait(ALIVE_EVERY_SECONDS):
            try:
                with self._sending:
                    self._connection.send_bytes(_ALIVE)
            except OSError:
                return
