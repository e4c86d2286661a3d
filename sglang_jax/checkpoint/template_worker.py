"""The process in which chat templates run: see `template_process`. It is started as a file and imports nothing of this
project, so that it is there soon.

A request is 8 bytes of length (little endian) and JSON: `template`, `messages`, `tools`, `variables`,
`add_generation_prompt`, `seconds` of processor time, and `most` characters of the text. An answer is a byte that says
of what kind it is, 8 bytes of length, and UTF-8 that may hold halves of surrogate pairs.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

TEXT, REFUSED, TOO_LONG, NO_MEMORY = b"T", b"R", b"L", b"M"
"""Kinds of answers: the text, the template's own error, how many characters the text has, and nothing."""

MEMORY_BYTES = 256 << 20
"""What a template may take beside what this process takes anyway: a conversation of 8 MiB takes a quarter of it."""

_MOST_OF_AN_ERROR = 1000

_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a template can raise: it is a program of the checkpoint's authors, run on the client's messages."""


def main() -> None:
    """Answers requests until the connection, which is the standard input, is closed."""
    # These go to all processes of a terminal or a service. This one ends with the process that it works for.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    connection.setblocking(True)
    _limit_memory()
    while (size := _read(connection, 8)) is not None:
        request = _read(connection, int.from_bytes(size, "little"))
        if request is None:
            return
        kind, text = _answer(json.loads(request))
        content = text.encode("utf-8", "surrogatepass")
        connection.sendall(kind + len(content).to_bytes(8, "little") + content)


def _answer(request: dict[str, Any]) -> tuple[bytes, str]:
    # The kernel ends this process where the time is over, in whatever instruction it is.
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])
    try:
        rendered: Any = render_jinja_template(
            conversations=[request["messages"]],
            tools=request["tools"],
            chat_template=request["template"],
            add_generation_prompt=request["add_generation_prompt"],
            **request["variables"],
        )
        text = str(rendered[0][0])
    except MemoryError:
        return NO_MEMORY, ""
    except _TEMPLATE_ERRORS as error:
        return REFUSED, str(error)[:_MOST_OF_AN_ERROR]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return (TEXT, text) if len(text) <= request["most"] else (TOO_LONG, str(len(text)))


def _limit_memory() -> None:
    """Where the system tells how much this process has."""
    status = Path("/proc/self/statm")
    if status.exists():
        taken = int(status.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, taken + MEMORY_BYTES))


def _read(connection: socket.socket, size: int) -> bytearray | None:
    """So many bytes; None once there are no more."""
    content = bytearray(size)
    view, there = memoryview(content), 0
    while there < size:
        count = connection.recv_into(view[there:])
        if count == 0:
            return None
        there += count
    return content


if __name__ == "__main__":
    main()
