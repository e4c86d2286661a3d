"""How often work was begun, a batch of rows or an engine's start: counted where no killed actor or node loses it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


class AttemptBook:
    """Work that was begun and not finished, with how often. It holds no more than what is under way."""

    def __init__(self) -> None:
        self._begun: Counter[str] = Counter()
        self._finished = 0

    def begin(self, key: str) -> int:
        """A piece of work is begun; for which time, from 1."""
        self._begun[key] += 1
        return self._begun[key]

    def finish(self, key: str) -> None:
        """It is done. If its answers are lost later, with the node that holds them, it counts as new. It may be done
        twice: by an actor on a node that was only thought lost, and by its successor."""
        self._begun.pop(key, None)
        self._finished += 1

    def under_way(self) -> int:
        """How much is begun and not finished."""
        return len(self._begun)

    def finished(self) -> int:
        """How much is done."""
        return self._finished


class Attempts(Protocol):
    """Counts how often work was begun."""

    @contextmanager
    def of(self, key: str) -> Iterator[int]:
        """Around the work: for which time it is begun, from 1. Left by an error, it stays begun."""
        ...


class SharedAttempts:
    """Counts for all actors of a job, in an actor on the node of whoever makes this: the driver's, without which there
    is no job. It lives as long as somebody holds this."""

    def __init__(self) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._book: ActorHandle = ray.remote(AttemptBook).options(num_cpus=0, scheduling_strategy=here).remote()

    @contextmanager
    def of(self, key: str) -> Iterator[int]:
        """See `Attempts`."""
        yield ray.get(self._book.begin.remote(key))
        ray.get(self._book.finish.remote(key))

    def finished(self) -> int:
        """See `AttemptBook`."""
        number: int = ray.get(self._book.finished.remote())
        return number
