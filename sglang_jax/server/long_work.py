"""Work for one client that others would wait for, in a thread and with pauses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeVar

from sglang_jax.engine.fair_threads import FairThreads

Result = TypeVar("Result")

OTHERS_SHARE = 5
"""So many times as long as a piece of work took, no other begins."""


class LongWork:
    """Does one piece at a time, and none for a while after each.

    A thread alone does not leave the event loop free: to parse and to check JSON is one call each, which keeps Python's
    lock to its end. However many clients send megabytes, a sixth of the time is theirs. Of that tenants have equal
    shares, and so have the pieces of each: small ones go before large ones, and none waits for ever. What nobody waits
    for any more is not begun.
    """

    def __init__(self) -> None:
        self._threads = FairThreads(1, "long-bodies", rest=OTHERS_SHARE)
        self._numbers = itertools.count()

    async def run(self, size: int, work: Callable[[], Result], tenant: str = "") -> Result:
        """What `work`, on so many bytes of a tenant's, returns or raises."""
        return await self._threads.run(work, size=size, tenant=tenant, flow=str(next(self._numbers)))
