"""Chat templates run in a process of their own: they are programs of a checkpoint's authors, run on what clients send.

Jinja's sandbox keeps a template from what is not its business, but not from time and memory: a loop in a loop never
ends, and `'a' * 3000000000` is one instruction. The process has limits of both, which the kernel keeps, and is started
again when a template has ended it.
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
"""How long a chat template may compute for one conversation."""

MOST_CHARACTERS = 16 << 20
"""Of a rendered conversation: twice as many as a request may have bytes."""

_PATIENCE_SECONDS = 300.0
"""How long the process may take in all: a template that had its time is ended long before, but on a busy machine."""

_WORKER = Path(__file__).with_name("template_worker.py")


@dataclass(frozen=True, slots=True)
class Rendering:
    """One conversation for a template. `variables`: names of the template beside the messages: the special tokens, and
    what a client sets. `tools`: None where there are none."""

    template: str
    messages: Sequence[Mapping[str, object]]
    variables: Mapping[str, object]
    tools: Sequence[Mapping[str, object]] | None = None
    add_generation_prompt: bool = True
    seconds: float = TEMPLATE_SECONDS


class TemplateProcess:
    """Renders one conversation after the other. Thread-safe; the process is started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._owner = 0

    def render(self, rendering: Rendering) -> str:
        """The text. Raises `RequestError` if the template refuses the messages, or takes more time or memory than it
        may, or makes more than `MOST_CHARACTERS` of them."""
        request = _written(rendering)
        with self._lock:
            kind, text = self._ask(request, rendering)
        match kind:
            case b"T":
                return text
            case b"R":
                raise RequestError(f"the chat template refused the messages: {cut(text)}", param="messages")
            case b"L":
                raise _too_much(f"produced {text} characters (the limit is {MOST_CHARACTERS})", rendering)
        raise _too_much("exceeded its memory limit", rendering)

    def close(self) -> None:
        """Ends the process. Another one is started when it is needed."""
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
            # By its file, as importing this package takes seconds; -P keeps its neighbours from being taken for others.
            command = [sys.executable, "-P", str(_WORKER)]
            self._process = subprocess.Popen(command, stdin=its.fileno(), stdout=subprocess.DEVNULL)
        mine.settimeout(_PATIENCE_SECONDS)
        self._connection, self._owner = mine, os.getpid()
        return mine

    def _end(self) -> int | None:
        """Ends what is left of the process; its exit status."""
        process = self._process
        assert process is not None
        try:
            status: int | None = process.wait(1.0)
        except subprocess.TimeoutExpired:
            status = None
        self.close()
        return status


def _written(rendering: Rendering) -> bytes:
    request = {
        "template": rendering.template,
        "messages": rendering.messages,
        "tools": rendering.tools,
        "variables": rendering.variables,
        "add_generation_prompt": rendering.add_generation_prompt,
        "seconds": rendering.seconds,
        "most": MOST_CHARACTERS,
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
    """Renders up to `count` conversations at once, each in a process of its own; further ones wait. Thread-safe; a
    process is started when the others are at work."""

    def __init__(self, count: int) -> None:
        self._all = [TemplateProcess() for _ in range(count)]
        self._free: LifoQueue[TemplateProcess] = LifoQueue()  # the one that was used last is running
        for process in reversed(self._all):
            self._free.put(process)

    def render(self, rendering: Rendering) -> str:
        """See `TemplateProcess`."""
        process = self._free.get()
        try:
            return process.render(rendering)
        finally:
            self._free.put(process)

    def close(self) -> None:
        """Ends the processes."""
        for process in self._all:
            process.close()


TEMPLATES = TemplateProcesses(2)
"""Those of this process: templates of all tokenizers run there. A second one, as a long conversation takes some twenty
milliseconds, and short ones are not to wait for it."""

atexit.register(TEMPLATES.close)
