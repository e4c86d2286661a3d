"""The scheduler's end of the line to its client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from sglang_jax.scheduler.messages import Inbound, Outbound


class Channel(Protocol):
    """Carries messages in order, both ways."""

    def receive(self, block: bool, seconds: float | None = None) -> Iterator[Inbound]:
        """Waiting messages, one after the other; with `block`, waits (on a poll) until there is at least one, for so
        many `seconds` at most. Who stops asking leaves the others for the next call."""
        ...

    def send(self, message: Outbound) -> None: ...
