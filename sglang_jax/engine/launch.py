"""Starts an engine core and hands out its client."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import zmq

from sglang_jax.config import EngineConfig
from sglang_jax.engine.channel import ClientChannel, Published, Ready, StartFailed
from sglang_jax.engine.client import LAST_WORDS_SECONDS, AsyncEngineClient, CoreHandle
from sglang_jax.engine.core import CoreLoader
from sglang_jax.engine.model_core import load_core, load_text_tokenizer
from sglang_jax.engine.process import CoreProcess, CoreThread
from sglang_jax.engine.types import TextTokenizer
from sglang_jax.errors import CheckpointError, ConfigError, EngineDeadError
from sglang_jax.scheduler.messages import Shutdown

TokenizerLoader = Callable[[EngineConfig], TextTokenizer]

_START_ERRORS: dict[str, type[Exception]] = {error.__name__: error for error in (CheckpointError, ConfigError)}


async def launch_engine(
    config: EngineConfig,
    *,
    in_process: bool = False,
    load: CoreLoader = load_core,
    load_tokenizer: TokenizerLoader = load_text_tokenizer,
) -> AsyncEngineClient:
    """Starts an engine and waits until it can serve.

    **Arguments:**

    - `in_process`: the core runs in a thread of this process; otherwise in a process of its own, which cannot slow down
      this one's event loop, and whose death this one survives.
    - `load`, `load_tokenizer`: what is served.

    **Raises:** `ConfigError`, `CheckpointError`; `EngineDeadError` if the engine failed for another reason.
    """
    with ExitStack() as resources:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        resources.callback(context.term)
        address = "inproc://core"
        if not in_process:
            folder = tempfile.mkdtemp(prefix="sglang-jax-")
            resources.callback(shutil.rmtree, folder, ignore_errors=True)
            address = f"ipc://{folder}/core"
        channel = ClientChannel(context, address)
        resources.callback(channel.close)
        core = CoreThread(config, context, address, load) if in_process else CoreProcess(config, address, load)
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, config)
            ready = await _wait_ready(channel, core)
        except BaseException:
            with suppress(EngineDeadError):  # it ended by itself
                channel.send(Shutdown(drain=False))
            core.kill()
            await core.ended
            raise
        return AsyncEngineClient(channel, core, ready, tokenizer, resources.pop_all())


async def launch_in_thread(config: EngineConfig) -> AsyncEngineClient:
    """An engine in this process."""
    return await launch_engine(config, in_process=True)


async def _wait_ready(channel: ClientChannel, core: CoreHandle) -> Ready:
    first = asyncio.ensure_future(channel.receive_one())
    try:
        either: set[asyncio.Future[Any]] = {first, core.ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            await asyncio.wait({first}, timeout=LAST_WORDS_SECONDS)
        if not first.done():
            raise EngineDeadError(f"the engine failed to start: {core.ended.result()}")
        return _check_ready(first.result())
    finally:
        first.cancel()


def _check_ready(message: Published) -> Ready:
    if isinstance(message, Ready):
        return message
    assert isinstance(message, StartFailed)
    if message.name in _START_ERRORS:
        raise _START_ERRORS[message.name](message.message)
    raise EngineDeadError(f"the engine failed to start: {message.name}: {message.message}")
