"""The worker's side of decode_cpu.py: an engine in a separate process that answers one batch at a time.

A worker reads lines of JSON, each a batch (`{"prompts": [[...], ...], "output": n}`), from standard input. It writes a
line when it is loaded, and one with the `Times` of each batch. What libraries print goes to standard error. Only the
standard library is imported, so that any interpreter can run a worker.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TextIO


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one batch: until each request has its first token, and until all have their last."""

    first: float
    whole: float


class FirstTokens:
    """Notes when the last of `requests` gets its first token. Create it when the batch starts."""

    def __init__(self, requests: int) -> None:
        self._start = time.perf_counter()
        self._waiting = set(range(requests))
        self._first = 0.0

    def saw(self, request: int) -> None:
        """Tokens of the request have arrived; cheap if they are not its first."""
        if request in self._waiting:
            self._waiting.remove(request)
            if not self._waiting:
                self._first = time.perf_counter() - self._start

    def end(self) -> Times:
        """To be called when the batch has ended."""
        assert not self._waiting, f"no token arrived for requests {sorted(self._waiting)}"
        return Times(self._first, time.perf_counter() - self._start)


Run = Callable[[list[Any], int], Times]
"""Runs prompts (token ids) at once, each for a number of greedy output tokens, whatever the model's end token; or makes
vectors of texts."""


def answer_batches(load: Callable[[], Run]) -> None:
    """Loads the engine, then answers batches until standard input ends."""
    answers = _take_standard_output()
    run = load()
    print(json.dumps("loaded"), file=answers, flush=True)
    for line in sys.stdin:
        batch = json.loads(line)
        print(json.dumps(asdict(run(batch["prompts"], batch["output"]))), file=answers, flush=True)


def _take_standard_output() -> TextIO:
    """What was standard output; its descriptor then leads to standard error, for native code too."""
    taken = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return taken
