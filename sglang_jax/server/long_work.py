"""Long work for one client, in a thread and with pauses so that others do not wait."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeVar

from sglang_jax.engine.fair_threads import FairThreads

Result = TypeVar("Result")

PAUSE_FACTOR = 5
"""After a piece of work, no other starts for this many times its duration."""


class LongWork:
    """Runs one piece of work at a time, with a pause after each, in a fair order of tenants and of the pieces of each.
    A thread does not keep the event loop responsive: parsing and validating JSON are single calls that hold Python's
    lock to their end. So long bodies get at most a sixth of the time. Work whose caller is gone does not start."""

    def __init__(self) -> None:
        self._threads = FairThreads(1, "long-bodies", rest=PAUSE_FACTOR)
        self._numbers = itertools.count()

    async def run(self, size: int, work: Callable[[], Result], tenant: str = "") -> Result:
        """Returns the result of `work` on `size` bytes of a tenant, or raises its error."""
        return await self._threads.run(work, size=size, tenant=tenant, flow=str(next(self._numbers)))
