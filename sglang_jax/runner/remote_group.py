"""Orders over the network: rank 0 sends orders to processes on other nodes, and each side notices when the other is
gone.

A connection closes when a process ends in any way, but not when a node loses its power or its network. So both sides
send a beat every few seconds, from separate threads, since a process may wait for its device, or for the process that
is gone, for any time. A process that fails sends the others the reason before it ends, since they may be waiting for it
without reading orders. Orders are the messages of `group.ORDERS`; followers send plain text.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

from sglang_jax.runner.group import ORDERS, GiveUp, Leave, Order
from sglang_jax.runner.group_listener import FollowerListener, Hello, connect_to_leader
from sglang_jax.runner.rank_beats import BEAT_EVERY_SECONDS, NoteBeat, Progress, steps_in
from sglang_jax.runner.wire import FrameError

ALIVE_EVERY_SECONDS = BEAT_EVERY_SECONDS
LOST_AFTER_SECONDS = 15.0
_SECONDS_TO_END = 15.0

_MAX_MESSAGE_BYTES = 64 << 10
"""Maximum bytes of a follower's message; a longer one closes its connection."""
_MAX_ORDER_BYTES = 1 << 30

OnLoss = Callable[[str], None]
"""Called once, on a thread of the connection, with the reason."""


class RemoteFollowers:
    """`count` `Followers` on other nodes, which connect to `listener`. `on_loss`: called when one is lost, at the
    latest `LOST_AFTER_SECONDS` after its last beat. Raises `ConfigError` if they do not connect within `timeout`
    seconds."""

    def __init__(self, listener: FollowerListener, count: int, timeout: float, on_loss: OnLoss) -> None:
        self._on_loss = on_loss
        self._lost: str | None = None
        self._leaving = False
        self._note: NoteBeat = _ignore_beat
        self._links = [_Link(connection, name) for connection, name in listener.accept(count, timeout)]
        self._watches = [  # in the order of ranks
            threading.Thread(target=self._watch, args=(rank, link), daemon=True)
            for rank, link in enumerate(self._links, 1)
        ]
        for watch in self._watches:
            watch.start()

    def send(self, order: Order) -> None:
        self.check()
        data = ORDERS.encode(order)
        for link in self._links:
            try:
                link.send(data)
            except OSError as error:
                self._lose(f"{link.name} is lost: {error}")
        self.check()

    def announce(self, note: NoteBeat) -> None:
        self._note = note

    def check(self) -> None:
        if self._lost is not None:
            raise RuntimeError(self._lost)

    def close(self) -> None:
        self._end(Leave())

    def give_up(self, reason: str) -> None:
        """Ends every follower with an error, instead of `close`, because this process has failed."""
        self._end(GiveUp(reason))

    def _end(self, order: Leave | GiveUp) -> None:
        self._leaving = True
        if self._lost is None:
            for link in self._links:
                with suppress(OSError):  # it is closed already
                    link.send(ORDERS.encode(order))
        deadline = time.monotonic() + _SECONDS_TO_END
        for watch, link in zip(self._watches, self._links, strict=True):
            watch.join(max(deadline - time.monotonic(), 0.0))
            link.close()

    def _watch(self, rank: int, link: _Link) -> None:
        words: list[str] = []
        end = link.listen(
            lambda data: words.append(data.decode(errors="replace")),
            _MAX_MESSAGE_BYTES,
            lambda steps: self._note(rank, steps),
        )
        if not self._leaving:
            self._lose(f"{link.name} gave up: {words[-1]}" if words else f"{link.name} is lost: {end}")

    def _lose(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
            self._on_loss(reason)


class LeaderLink:
    """A follower's connection to rank 0's `FollowerListener`, to which it reports its `progress`. `rank`: of this
    process; `on_loss`: called when rank 0 is lost. Raises `ConfigError` if rank 0 cannot be reached, or refuses this
    process."""

    def __init__(self, address: tuple[str, int], secret: bytes, rank: int, on_loss: OnLoss) -> None:
        self.progress = Progress()
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._on_loss = on_loss
        connection = connect_to_leader(address, secret, Hello(rank, ORDERS.form))
        self._link = _Link(connection, "node 0", self.progress)
        self._leaving = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def next_order(self) -> Order:
        """Blocks until rank 0 sends an order."""
        return self._orders.get()

    def close(self) -> None:
        self._leaving.set()
        self._link.close()

    def give_up(self, reason: str) -> None:
        """Sends rank 0 the reason why this process has failed, and closes the connection."""
        with suppress(OSError):  # rank 0 has ended
            self._link.send(reason.encode())
        self.close()

    def _watch(self) -> None:
        def take(data: bytes) -> None:
            message = ORDERS.decode(data)
            if isinstance(message, GiveUp):
                # This process may be waiting for rank 0 without reading orders.
                self._leaving.set()
                self._on_loss(f"node 0 gave up: {message.reason}")
                return
            if isinstance(message, Leave):
                self._leaving.set()
            self._orders.put(message)

        try:
            end = self._link.listen(take, _MAX_ORDER_BYTES)
        except FrameError as error:
            end = f"it sent {error}"
        if not self._leaving.is_set():
            self._on_loss(f"node 0 is lost: {end}")


def _ignore_beat(rank: int, steps: int) -> None:
    """Ignores a beat, until `announce` is called."""


class _Link:
    """A connection that sends beats with this side's `progress`, and knows how long the other side has been silent."""

    def __init__(self, connection: Connection, name: str, progress: Progress | None = None) -> None:
        self.name = name
        self._progress = progress or Progress()
        self._connection = connection
        self._sending = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._send_beats, daemon=True).start()

    def send(self, data: bytes) -> None:
        """Raises `OSError` if the other side is gone."""
        with self._sending:
            self._connection.send_bytes(data)

    def listen(
        self, take: Callable[[bytes], None], most: int, on_beat: Callable[[int], None] = lambda steps: None
    ) -> str:
        """Passes messages other than beats to `take` until the other side ends or is silent for too long, and returns
        the reason. A message of more than `most` bytes counts as an end. Calls `on_beat` with the steps in each beat.
        Raises what `take` raises."""
        try:
            while self._connection.poll(LOST_AFTER_SECONDS):
                data = self._connection.recv_bytes(most)
                steps = steps_in(data)
                if steps is None:
                    take(data)
                else:
                    on_beat(steps)
        except (EOFError, OSError):
            return "its connection closed"
        finally:
            self._closed.set()
            with self._sending:
                self._connection.close()
        return f"nothing was received for {LOST_AFTER_SECONDS:.0f} s"

    def close(self) -> None:
        """Shuts the connection down; the thread that reads from it then closes it. If another thread closed it, the
        reader could read from a new file with the same descriptor."""
        self._closed.set()
        with self._sending:
            if self._connection.closed:
                return
            with socket.socket(fileno=os.dup(self._connection.fileno())) as both_ways, suppress(OSError):
                both_ways.shutdown(socket.SHUT_RDWR)  # raises if the other side has ended

    def _send_beats(self) -> None:
        while not self._closed.wait(ALIVE_EVERY_SECONDS):
            try:
                with self._sending:
                    self._connection.send_bytes(self._progress.beat())
            except OSError:
                return
