"""The process in which chat templates run: see `template_process`. It is started as a file and imports nothing of this
project, nor transformers, so that it is there soon.

Templates find what transformers gives them (its `apply_chat_template`): the same names, the same sandbox.

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
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEXT, REFUSED, TOO_LONG, NO_MEMORY = b"T", b"R", b"L", b"M"
"""Kinds of answers: the text, the template's own error, how many characters the text has, and nothing."""

MEMORY_BYTES = 256 << 20
"""What a template may take beside what this process takes anyway: a conversation of 8 MiB takes a quarter of it."""

_MOST_OF_AN_ERROR = 1000

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""What messages call their reasoning; templates look for the first two."""

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


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the parts that a model is trained on: here, text as any other."""

    tags = {"generation"}  # noqa: RUF012  # as jinja has it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The block's body, whose variables are its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's, without names that begin with an underscore: those are Python's."""

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
    """`dict` for templates: what calls it, and `dict.fromkeys`, and nothing else of the class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As dict's."""
        return dict.fromkeys(*args)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter writes for HTML."""
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
    """A message with its reasoning by the names that templates look for."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


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
