"""Renders chat templates in separate processes, because they are programs of a checkpoint's authors, run on input of
clients.

Jinja's sandbox does not limit time and memory: nested loops may never end, and `'a' * 3000000000` is one instruction.
The process has limits of both, which the kernel enforces, and is restarted after it was killed.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import LifoQueue

from sglang_jax.errors import RequestError, cut

TEMPLATE_SECONDS = 2.0
"""Processor time of a chat template per conversation."""

MAX_CHARACTERS = 16 << 20
"""Limit of a rendered conversation: twice the maximum bytes of a request."""

_PATIENCE_SECONDS = 300.0
"""Wall-clock limit; only reached on a busy machine, because the limit of processor time is much shorter."""

_WORKER = Path(__file__).with_name("template_worker.py")


@dataclass(frozen=True, slots=True)
class Rendering:
    """A conversation to render. `variables`: special tokens and variables that the client sets; `tools`: None
    without tools."""

    template: str
    messages: Sequence[Mapping[str, object]]
    variables: Mapping[str, object]
    tools: Sequence[Mapping[str, object]] | None = None
    add_generation_prompt: bool = True
    seconds: float = TEMPLATE_SECONDS


class TemplateProcess:
    """Renders one conversation at a time. Thread-safe; the process starts at the first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._owner = 0

    def render(self, rendering: Rendering) -> str:
        """Returns the text. Raises `RequestError` if the template refuses the messages, or exceeds its time, memory or
        `MAX_CHARACTERS`."""
        request = _encode_request(rendering)
        with self._lock:
            kind, text = self._ask(request, rendering)
        match kind:
            case b"T":
                return text
            case b"R":
                raise RequestError(f"the chat template refused the messages: {cut(text)}", param="messages")
            case b"L":
                raise _too_much(f"produced {text} characters (the limit is {MAX_CHARACTERS})", rendering)
        raise _too_much("exceeded its memory limit", rendering)

    def close(self) -> None:
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()

    def _ask(self, request: bytes, rendering: Rendering) -> tuple[bytes, str]:
        connection = self._connected()
        try:
            connection.sendall(len(request).to_bytes(8, "little"))
            connection.sendall(request)
            head = _receive(connection, 9)
            return head[:1], _receive(connection, int.from_bytes(head[1:], "little")).decode("utf-8", "surrogatepass")
        except (OSError, EOFError) as error:
            how = self._end()
            if how == -signal.SIGPROF:
                what = f"took more than {rendering.seconds:g} s of processor time"
                raise _too_much(what, rendering) from error
            raise _too_much(f"crashed its process ({how})", rendering) from error

    def _connected(self) -> socket.socket:
        if self._connection is not None and self._owner == os.getpid():
            return self._connection
        mine, its = socket.socketpair()
        with its:
            # Run as a file, because importing this package takes seconds. -P: do not import modules from its folder.
            command = [sys.executable, "-P", str(_WORKER)]
            self._process = subprocess.Popen(command, stdin=its.fileno(), stdout=subprocess.DEVNULL)
        mine.settimeout(_PATIENCE_SECONDS)
        self._connection, self._owner = mine, os.getpid()
        return mine

    def _end(self) -> int | None:
        process = self._process
        assert process is not None
        try:
            status: int | None = process.wait(1.0)
        except subprocess.TimeoutExpired:
            status = None
        self.close()
        return status


def _encode_request(rendering: Rendering) -> bytes:
    request = {
        "template": rendering.template,
        "messages": rendering.messages,
        "tools": rendering.tools,
        "variables": rendering.variables,
        "add_generation_prompt": rendering.add_generation_prompt,
        "seconds": rendering.seconds,
        "most": MAX_CHARACTERS,
    }
    try:
        return json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError) as error:
        raise RequestError(
            f"messages contain a value that JSON cannot express: {cut(str(error))}", param="messages"
        ) from error


def _too_much(what: str, rendering: Rendering) -> RequestError:
    return RequestError(
        f"the chat template {what} on {len(rendering.messages)} messages, and was stopped; send fewer or shorter ones",
        param="messages",
    )


def _receive(connection: socket.socket, size: int) -> bytes:
    content = bytearray(size)
    view, there = memoryview(content), 0
    while there < size:
        count = connection.recv_into(view[there:])
        if count == 0:
            raise EOFError
        there += count
    return bytes(content)


class TemplateProcesses:
    """Renders up to `count` conversations at once, one per process; others wait. Thread-safe; a process is started only
    when the others are busy."""

    def __init__(self, count: int) -> None:
        self._all = [TemplateProcess() for _ in range(count)]
        self._free: LifoQueue[TemplateProcess] = LifoQueue()  # last in, first out: prefers a running process
        for process in reversed(self._all):
            self._free.put(process)

    def render(self, rendering: Rendering) -> str:
        process = self._free.get()
        try:
            return process.render(rendering)
        finally:
            self._free.put(process)

    def close(self) -> None:
        for process in self._all:
            process.close()


TEMPLATES = TemplateProcesses(2)
"""Shared by all tokenizers. There are two processes, so that short conversations do not wait for a long one, which
takes some 20 ms."""

atexit.register(TEMPLATES.close)
