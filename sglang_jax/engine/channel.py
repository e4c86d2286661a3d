"""The two ends of the connection between a client and its engine core, in a thread (`inproc://`) or in a process
(`ipc://` in a private folder): ZeroMQ carries whole messages in order, `msgspec` encodes them. Sending never blocks:
queues are unbounded, because the requests in flight bound their content."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np
import zmq

from sglang_jax.engine.types import ModelInfo
from sglang_jax.errors import EngineDeadError
from sglang_jax.runner.pulse import Pulse
from sglang_jax.scheduler.commands import inbound_types
from sglang_jax.scheduler.messages import Inbound, Outbound

MESSAGES_PER_TURN = 8
"""Maximum messages that the client's end handles before it lets the event loop run other tasks."""

TURN_SECONDS = 0.002
"""Seconds after which it does so anyway: a message may have ten thousand logprobs."""

LONGEST_SLEEP = 3600.0
"""Maximum seconds that the core's end sleeps: a poll takes milliseconds that must fit 32 bits."""


class Ready(msgspec.Struct, tag="ready", frozen=True, kw_only=True):
    """The first message of a core that started. `max_running_requests`: rows of the runner; `max_total_tokens`: tokens
    that the KV pool of the first cache group holds; `programs_left`: programs that it compiles while it serves."""

    model_info: ModelInfo
    max_running_requests: int
    max_total_tokens: int
    programs_left: int = 0


class StartFailed(msgspec.Struct, tag="start_failed", frozen=True):
    """The only message of a core that could not start: the exception's class name, and its message."""

    name: str
    message: str


class Stopped(msgspec.Struct, tag="stopped", frozen=True):
    """The last message of a core that started; `failure` is empty if it was asked to stop."""

    failure: str = ""


Published = Outbound | Ready | StartFailed | Stopped


def _open_socket(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(0)
    return socket


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.get(zmq.EVENTS)) & zmq.POLLIN)


def _to_builtin(value: object) -> object:
    """Converts the kinds of numbers and containers that users may put into `SamplingParams` to built-in types."""
    match value:
        case Mapping():
            return dict(value)
        case Sequence():
            return list(value)
        case np.generic():
            return value.item()
    raise NotImplementedError(f"{type(value).__name__} cannot be sent to the engine core")


class CoreChannel:
    """The core's end: blocking, for one thread. The scheduler's loop uses `receive` and `send`. The core reports its
    progress to `pulse`, which the client reads at any time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, pulse: Pulse | None = None) -> None:
        self.pulse = pulse or Pulse()
        self._socket = _open_socket(context)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Inbound] = msgspec.msgpack.Decoder(inbound_types())

    def receive(self, block: bool, seconds: float | None = None) -> Iterator[Inbound]:
        """Yields waiting messages in the order of sending. With `block`, sleeps until there is at least one, for at
        most `seconds` (or `LONGEST_SLEEP`). Messages that the caller does not consume stay for the next call."""
        if block:
            self._socket.poll(None if seconds is None else math.ceil(min(seconds, LONGEST_SLEEP) * 1000))
        while _has_message(self._socket):
            yield self._decoder.decode(self._socket.recv(zmq.NOBLOCK))

    def send(self, message: Published) -> None:
        self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def close(self, linger_seconds: float = 1.0) -> None:
        """Closes this end. Sent messages are still delivered if the client takes them within `linger_seconds`."""
        self._socket.close(linger=int(linger_seconds * 1000))


class ClientChannel:
    """The client's end: asynchronous, for one event loop. It binds the address, and exists before the core's end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = _open_socket(context)
        self._socket.bind(address)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_to_builtin)
        self._decoder: msgspec.msgpack.Decoder[Published] = msgspec.msgpack.Decoder(Published)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deliver: Callable[[Published], None] | None = None
        self._look_scheduled = False

    async def receive_one(self) -> Published:
        """Waits for the next message. Only before `start`."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._socket.FD, readable.set)
        try:
            while not _has_message(self._socket):
                await readable.wait()
                readable.clear()
        finally:
            loop.remove_reader(self._socket.FD)
        return self._decoder.decode(self._socket.recv(zmq.NOBLOCK))

    def start(self, deliver: Callable[[Published], None]) -> None:
        """Passes every message from now on to `deliver`, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._loop.add_reader(self._socket.FD, self._on_readable)
        self._loop.call_soon(self._on_readable)

    def send(self, message: Inbound) -> None:
        """Queues a message and returns at once. Raises `EngineDeadError` if there is no core."""
        if self._socket.closed:
            raise EngineDeadError("the engine was shut down")
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again as error:
            raise EngineDeadError("the engine has ended and accepts no more messages") from error
        if self._loop is not None and not self._look_scheduled:
            # The descriptor is edge-triggered, and sending may consume the edge of a message that has just arrived.
            self._look_scheduled = True
            self._loop.call_soon(self._look)

    def close(self) -> None:
        if self._loop is not None and not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
        self._socket.close(linger=0)

    def _look(self) -> None:
        self._look_scheduled = False
        self._on_readable()

    def _on_readable(self) -> None:
        begin = time.monotonic()
        for _ in range(MESSAGES_PER_TURN):
            if not self._deliver_one():
                return
            if time.monotonic() - begin > TURN_SECONDS:
                break
        assert self._loop is not None
        self._loop.call_soon(self._on_readable)

    def _deliver_one(self) -> bool:
        if self._socket.closed or not _has_message(self._socket):
            return False
        assert self._deliver is not None
        self._deliver(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
        return True
