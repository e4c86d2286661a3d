"""Runs an engine core: loads it, reports that it is ready, serves until shutdown, and reports how it ended."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

from sglang_jax.config import EngineConfig
from sglang_jax.engine.channel import CoreChannel, Ready, StartFailed, Stopped
from sglang_jax.engine.collector import rare_collections
from sglang_jax.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)


class Core(Protocol):
    """A model with its scheduler."""

    @property
    def ready(self) -> Ready: ...

    def run(self) -> None: ...

    def close(self) -> None: ...


CoreLoader = Callable[[EngineConfig, CoreChannel], Core]
"""Creates a core that serves a channel. Must be a module-level function: a new process imports it by name."""


def run_core(config: EngineConfig, channel: CoreChannel, load: CoreLoader) -> bool:
    """Runs a core from start to end; True if it ended on request. The outermost frame of the core's thread or process:
    it logs all errors and reports them to the client, whose requests then fail."""
    try:
        core = _load(config, channel, load)
        return core is not None and _serve(core, channel)
    finally:
        channel.close()


def _load(config: EngineConfig, channel: CoreChannel, load: CoreLoader) -> Core | None:
    try:
        with rare_collections():
            core = load(config, channel)
    except (ConfigError, CheckpointError) as error:  # the message is complete without a traceback
        channel.send(StartFailed(type(error).__name__, str(error)))
        return None
    except Exception as error:
        logger.exception("The engine failed to start")
        channel.send(StartFailed(type(error).__name__, str(error)))
        return None
    channel.send(core.ready)
    return core


def _serve(core: Core, channel: CoreChannel) -> bool:
    try:
        with contextlib.closing(core):
            core.run()
    except Exception as error:
        logger.exception("The engine failed")
        channel.send(Stopped(f"{type(error).__name__}: {error}"))
        return False
    channel.send(Stopped())
    return True
