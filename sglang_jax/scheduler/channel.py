"""The scheduler's end of the line to its client."""

from __future__ import annotations

from typing import Protocol

from sglang_jax.scheduler.messages import Inbound, Outbound


class Channel(Protocol):
    """Carries messages in order, both ways."""

    def receive(self, block: bool) -> list[Inbound]:
        """All waiting messages; with `block`, waits (on a poll) until there is at least one."""
        ...

    def send(self, message: Outbound) -> None: ...
