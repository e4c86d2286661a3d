"""Starts an engine core and its front end."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

import zmq

from sglang_jax.config import EngineConfig, ModelImpl
from sglang_jax.engine.channel import ClientChannel, CoreChannel, Published, Ready, StartFailed
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.core import Core, CoreLoader
from sglang_jax.engine.core_link import DUMP_SECONDS, LAST_WORDS_SECONDS, CoreHandle, CoreLink
from sglang_jax.engine.placement import Placement
from sglang_jax.engine.process import UNGUARDED, CoreProcess, CoreThread
from sglang_jax.engine.single_link import SingleLink
from sglang_jax.engine.types import TextTokenizer
from sglang_jax.errors import CheckpointError, ConfigError, EngineDeadError, NoRoomError
from sglang_jax.scheduler.messages import Shutdown

Result = TypeVar("Result")

TokenizerLoader = Callable[[EngineConfig], TextTokenizer]

_START_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (CheckpointError, ConfigError, NoRoomError)
}


async def launch_engine(
    config: EngineConfig,
    *,
    in_process: bool = False,
    placement: Placement | None = None,
    load_tokenizer: TokenizerLoader | None = None,
) -> AsyncEngineClient:
    """Starts an engine for the model that `config` names. `load_tokenizer`: None for the tokenizer that `config` names.
    All else is as for `launch_core`."""
    return await launch_core(
        config,
        in_process=in_process,
        load=load_model,
        load_tokenizer=load_tokenizer or tokenizer_of_model,
        placement=placement,
    )


def load_model(config: EngineConfig, channel: CoreChannel) -> Core:
    """Loads the model that `config` names. Importing the libraries that read checkpoints takes longer than all other
    imports, so the core's process does it, while this one continues."""
    from sglang_jax.engine.model_core import load_core

    return load_core(config, channel)


def tokenizer_of_model(config: EngineConfig) -> TextTokenizer:
    from sglang_jax.engine.model_core import load_text_tokenizer

    return load_text_tokenizer(config)


async def launch_core(
    config: EngineConfig,
    *,
    in_process: bool,
    load: CoreLoader,
    load_tokenizer: TokenizerLoader,
    placement: Placement | None = None,
) -> AsyncEngineClient:
    """Starts an engine core and waits until it serves. `load` and `load_tokenizer` load the model and its tokenizer.

    - `in_process`: the core runs in a thread of this process; otherwise in a separate process, which cannot slow down
      this one's event loop, and whose end this one survives.
    - `placement`: the core process's part of the machine, None for all of it.

    Raises `ConfigError`, `CheckpointError`; `EngineDeadError` if it failed for another reason.
    """
    if in_process and config.model_impl is ModelImpl.TRANSFORMERS:
        from sglang_jax.checkpoint.tokenizer import import_tokenizers  # here: see `load_model`

        # If two threads start to import from transformers at once, one finds half-imported modules.
        await asyncio.to_thread(import_tokenizers)
    meanwhile = asyncio.to_thread(load_tokenizer, config)
    link, tokenizer = await _launch(config, in_process, load, placement, meanwhile)
    return AsyncEngineClient(SingleLink(link), tokenizer)


async def launch_link(
    config: EngineConfig, *, in_process: bool, load: CoreLoader, placement: Placement | None = None
) -> CoreLink:
    """Like `launch_core`, for a front end that exists already."""
    link, _ = await _launch(config, in_process, load, placement, asyncio.sleep(0))
    return link


async def launch_replica_link(config: EngineConfig, placement: Placement | None) -> CoreLink:
    """Starts an engine core for the model that `config` names in a separate process."""
    return await launch_link(config, in_process=False, load=load_model, placement=placement)


async def _launch(
    config: EngineConfig,
    in_process: bool,
    load: CoreLoader,
    placement: Placement | None,
    meanwhile: Coroutine[Any, Any, Result],
) -> tuple[CoreLink, Result]:
    """Starts a core, and awaits `meanwhile` while it starts. Returns a link to the core and that result."""
    with ExitStack() as resources:
        resources.callback(meanwhile.close)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        resources.callback(context.term)
        address, folder = "inproc://core", None
        if not in_process:
            folder = tempfile.TemporaryDirectory(prefix="sglang-jax-", ignore_cleanup_errors=True)
            address = f"ipc://{resources.enter_context(folder)}/core"
        channel = ClientChannel(context, address)
        resources.callback(channel.close)
        core = (
            CoreThread(config, context, address, load) if in_process else CoreProcess(config, address, load, placement)
        )
        try:
            result = await meanwhile
            ready = await _wait_ready(channel, core, config.engine_start_timeout)
        except BaseException:
            with suppress(EngineDeadError):  # it has ended already
                channel.send(Shutdown(drain=False))
            core.kill()
            await _wait_ended(core)
            raise
        if folder is not None:
            folder.cleanup()  # both ends are connected, so the path is no longer needed
        link = CoreLink(
            channel,
            core,
            ready,
            resources.pop_all(),
            config.watchdog_timeout,
            config.max_unread_bytes,
            config.engine_start_timeout,
        )
        return link, result


async def _wait_ended(core: CoreHandle) -> None:
    """Waits for the end of a stopped core, even if cancelled: a thread that still loads uses its resources."""
    while not core.ended.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait({core.ended})


async def _wait_ready(channel: ClientChannel, core: CoreHandle, timeout: float) -> Ready:
    """Waits for the core's first message. A core that hangs and can be killed logs its stacks first. Raises
    `EngineDeadError` if the core ends, or is not ready after `timeout` seconds; `ConfigError` if its script has no
    guard; the error with which it failed to start."""
    first = asyncio.ensure_future(channel.receive_one())
    try:
        either: set[asyncio.Future[Any]] = {first, core.ended}
        await asyncio.wait(either, timeout=None if core.pulse is None else timeout, return_when=asyncio.FIRST_COMPLETED)
        if not first.done() and not core.ended.done():
            core.dump_stacks()
            await asyncio.wait({core.ended}, timeout=DUMP_SECONDS)
            raise EngineDeadError(
                f"the engine failed to start: it was not ready after {timeout:g} s (--engine-start-timeout)"
            )
        if not first.done():
            await asyncio.wait({first}, timeout=LAST_WORDS_SECONDS)
        if not first.done():
            reason = core.ended.result()
            raise (
                ConfigError(reason) if reason == UNGUARDED else EngineDeadError(f"the engine failed to start: {reason}")
            )
        return _check_ready(first.result())
    finally:
        first.cancel()
        await asyncio.wait({first})  # it must have left the socket before that is closed


def _check_ready(message: Published) -> Ready:
    if isinstance(message, Ready):
        return message
    assert isinstance(message, StartFailed)
    if message.name in _START_ERRORS:
        raise _START_ERRORS[message.name](message.message)
    raise EngineDeadError(f"the engine failed to start: {message.name}: {message.message}")
