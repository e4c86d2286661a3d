"""How often a batch of rows was begun: counted where neither a killed actor nor a killed node loses the count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


class AttemptBook:
    """Batches that were begun and not finished, with how often. It holds no more than what is under way."""

    def __init__(self) -> None:
        self._begun: Counter[str] = Counter()

    def begin(self, key: str) -> int:
        """A batch is begun; for which time, from 1."""
        self._begun[key] += 1
        return self._begun[key]

    def finish(self, key: str) -> None:
        """A batch is answered. If its answers are lost later, with the node that holds them, it counts as new."""
        del self._begun[key]

    def under_way(self) -> int:
        """How many batches are begun and not finished."""
        return len(self._begun)


class Attempts(Protocol):
    """Counts how often a batch was begun."""

    @contextmanager
    def of(self, key: str) -> Iterator[int]:
        """Around the work on a batch: for which time it is begun, from 1. Left by an error, it stays begun."""
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

    def under_way(self) -> int:
        """See `AttemptBook`."""
        number: int = ray.get(self._book.under_way.remote())
        return number
