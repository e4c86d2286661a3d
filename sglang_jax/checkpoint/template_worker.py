"""Main program of the processes that render chat templates: see `template_process`. It imports neither this project nor
transformers, so that it starts fast.

Templates get the same names and sandbox as from transformers' `apply_chat_template`.

A request is 8 bytes of length (little endian) and JSON: `template`, `messages`, `tools`, `variables`,
`add_generation_prompt`, `seconds` of processor time, and `most` characters of the text. An answer is one byte for its
kind, 8 bytes of length, and UTF-8 that may hold lone surrogates.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEXT, REFUSED, TOO_LONG, NO_MEMORY = b"T", b"R", b"L", b"M"
"""Kinds of answers. They contain the text, the template's error, the number of characters, and nothing."""

MEMORY_BYTES = 256 << 20
"""Memory limit in addition to the process at its start; a conversation of 8 MiB takes a quarter of it."""

_MAX_ERROR_CHARACTERS = 1000

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages have their reasoning; templates use the first two."""

_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""Exceptions that a template may raise."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks text for training; its body is rendered as any other text."""

    tags = {"generation"}  # noqa: RUF012  # as jinja has it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, without names that start with an underscore, which are Python's."""

    def __init__(*args: Any, **values: Any) -> None:  # `self` may be one of the names
        self, *pairs = args
        names = dict(*pairs, **values)
        for name in names:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"names in a namespace must not start with an underscore: {name!r}")


class _Dict:
    """`dict` for templates: only calls and `dict.fromkeys`."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Replaces Jinja's filter, which escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": _now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(template)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def main() -> None:
    """Answers requests from standard input, a socket, until it is closed."""
    # These signals go to all processes of a terminal or service. This process ends when its parent closes the socket.
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
    # The kernel kills this process when the time is over.
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])
    try:
        given = {
            **request["variables"],
            "messages": [_with_reasoning(message) for message in request["messages"]],
            "tools": request["tools"],
            "documents": None,
            "add_generation_prompt": request["add_generation_prompt"],
        }
        text = _compiled(request["template"]).render(given)
    except MemoryError:
        return NO_MEMORY, ""
    except _TEMPLATE_ERRORS as error:
        return REFUSED, str(error)[:_MAX_ERROR_CHARACTERS]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return (TEXT, text) if len(text) <= request["most"] else (TOO_LONG, str(len(text)))


def _limit_memory() -> None:
    """Limits memory, if /proc shows how much this process has."""
    status = Path("/proc/self/statm")
    if status.exists():
        taken = int(status.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, taken + MEMORY_BYTES))


def _read(connection: socket.socket, size: int) -> bytearray | None:
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
