"""A batch driver over an application with scripted answers, without an engine."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_jax.batch.answers import Answer
from sglang_jax.batch.driver import Driver
from sglang_jax.batch.journal import Sink
from sglang_jax.batch.lines import Line
from sglang_jax.batch.source import JsonLines, Record
from sglang_jax.batch.work_queue import WorkQueue
from sglang_jax.engine.lookahead import Lookahead
from sglang_jax.errors import EngineDeadError

BODY = json.dumps(
    {
        "id": "cmpl-1",
        "choices": [{"index": 0, "text": "hello"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
    }
).encode()
LOST = json.dumps({"error": {"message": "the engine is lost", "code": "engine_dead"}}).encode()


def answering(
    status: int = 200, body: bytes = BODY, before: Callable[[bytes], Awaitable[None]] | None = None
) -> ASGIApp:
    """An application that gives every request the same answer, once `before` has seen it."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked = (await receive())["body"]
        if before is not None:
            await before(asked)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    return app


class FakeReplica:
    """Serves one engine after the other; once none is left it is given up. `losses` engines die at a request."""

    def __init__(self, index: int = 0, *, rows: int = 2, engines: int = 1) -> None:
        self.index = index
        self._rows = rows
        self._engines = engines
        self._engine: Any = None

    async def serving(self) -> Any:
        if self._engine is None or not self._engine.alive:
            if not self._engines:
                raise EngineDeadError(f"replica {self.index} is stopped")
            self._engines -= 1
            self._engine = SimpleNamespace(alive=True, max_running_requests=self._rows, replica=self.index)
        return self._engine

    def lose(self) -> None:
        """The current engine is lost."""
        self._engine.alive = False


class Watched:
    """A `Watcher` that keeps its answers, if `keep` is set."""

    def __init__(self, *, keep: bool = True) -> None:
        self.answers: list[Answer] = []
        self._keep = keep

    def finished(self, answer: Answer) -> None:
        if self._keep:
            self.answers.append(answer)


def records(path: Path, sink: Sink) -> Iterator[Record]:
    return JsonLines(path).records(sink.is_written)


def make_driver(
    records: Iterator[Record],
    sink: Sink,
    make_app: Callable[[Any], ASGIApp],
    *,
    watcher: Watched | None = None,
    lookahead: int = 64,
    reorder: bool = True,
    max_retries: int = 3,
    max_ahead: int = 10**9,
) -> Driver:
    """A driver made of the command's own parts."""
    window: Lookahead[Line] = Lookahead(lookahead, 2**26, reorder=reorder)
    return Driver(
        records,
        sink,
        WorkQueue(window, max_retries),
        watcher or Watched(keep=False),
        defaults={},
        random_seed=0,
        read_lines=min(256, lookahead),
        max_ahead=max_ahead,
        make_app=make_app,
    )
