"""An engine core driven by the test, which sees what a front end sends and delivers the answers, message by message."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from helpers.engine_fakes import CONTEXT_LENGTH, MAX_RUNNING, MODEL_INFO, ByteTokenizer

from sglang_jax.engine.channel import Published, Ready, Stopped
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.core_link import CoreLink
from sglang_jax.engine.single_link import SingleLink
from sglang_jax.scheduler.messages import AbortRequest, Inbound, NewRequest, Shutdown, StopRequest

READY = Ready(model_info=MODEL_INFO, max_running_requests=MAX_RUNNING, max_total_tokens=CONTEXT_LENGTH)


class ScriptedCore:
    """Both the client's end of the wire and the core behind it. `new`, `stopped`, `aborted`: the messages that were
    sent."""

    def __init__(self) -> None:
        self.new: list[NewRequest] = []
        self.stopped: list[int] = []
        self.aborted: list[int] = []
        self.deliver: Callable[[Published], None] = lambda message: None
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def client(self, **options: Any) -> AsyncEngineClient:
        """A front end over this core. `options`: of `CoreLink`."""
        end: Any = self
        link = CoreLink(end, end, READY, contextlib.ExitStack(), **options)
        return AsyncEngineClient(SingleLink(link), ByteTokenizer())

    def start(self, deliver: Callable[[Published], None]) -> None:
        self.deliver = deliver

    def send(self, message: Inbound) -> None:
        match message:
            case NewRequest():
                self.new.append(message)
            case StopRequest():
                self.stopped.append(message.id)
            case AbortRequest():
                self.aborted.append(message.id)
            case Shutdown():
                self.deliver(Stopped())
                self.kill()

    def kill(self) -> None:
        if not self.ended.done():
            self.ended.set_result("told to stop")
