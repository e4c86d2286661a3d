"""Runs an engine core in a thread of this process, or in a separate process."""

from __future__ import annotations

import asyncio
import atexit
import faulthandler
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import zmq

from sglang_jax import logs
from sglang_jax.config import EngineConfig
from sglang_jax.engine.allocator import releasing_free_memory
from sglang_jax.engine.channel import CoreChannel
from sglang_jax.engine.collector import frozen_heap
from sglang_jax.engine.core import Core, CoreLoader, run_core
from sglang_jax.engine.placement import Placement
from sglang_jax.errors import ConfigError
from sglang_jax.runner.processes import STACKS_SIGNAL, die_with_parent, write_stacks_on_signal
from sglang_jax.runner.pulse import Pulse, Words, shared_words

CORE_NAME = "sglang-jax-core"
# Exit status of a core whose script has no guard. Other failures give 1, or a signal.
UNGUARDED_STATUS = 78

UNGUARDED = (
    "this script needs a guard: an engine in a process of its own (dp_size above 1, for one) runs the script once more "
    'in that process, where it must not create the engine again. Put what creates it under\n\nif __name__ == "__main__"'
    ":\n    with Engine(dp_size=2, ...) as engine:\n        ..."
)
NO_FILE = (
    "an engine in a process of its own (dp_size above 1, for one) runs the script once more in that process, and this "
    "one has no file ({}): write it to a file, or use one engine in this process"
)

logger = logging.getLogger(__name__)


class CoreThread:
    """A core in a thread. It ends on request, or with the interpreter."""

    def __init__(
        self, config: EngineConfig, context: zmq.Context[zmq.Socket[bytes]], address: str, load: CoreLoader
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str] = self._loop.create_future()
        channel = CoreChannel(context, address)
        self._thread = threading.Thread(
            target=self._run, args=(config, channel, load), name="sglang-jax-core", daemon=True
        )
        self._thread.start()

    @property
    def ended(self) -> asyncio.Future[str]:
        return self._ended

    @property
    def pulse(self) -> Pulse | None:
        """None: a thread cannot be killed, so it is not watched."""
        return None

    def dump_stacks(self) -> None:
        """Does nothing: the core's threads belong to the caller's process."""

    def kill(self) -> None:
        """Does nothing: the thread ends by itself after the step in flight."""

    def _run(self, config: EngineConfig, channel: CoreChannel, load: CoreLoader) -> None:
        try:
            run_core(config, channel, load)
        finally:
            self._loop.call_soon_threadsafe(self._on_end)

    def _on_end(self) -> None:
        self._thread.join()
        self._ended.set_result("the engine thread ended")


class CoreProcess:
    """A core in a spawned process, which ends with this one. Its end is noticed at once. `placement`: its part of the
    machine, None for all of it. Raises `ConfigError` if the main module cannot be run once more: see `check_main`.

    The core leads a process group, so that the processes that it starts (ranks on other devices) end with it, even
    stopped or stuck ones. It ignores SIGINT and SIGTERM, which a terminal or a service manager sends to the whole
    group: this process decides what to do.
    """

    def __init__(
        self, config: EngineConfig, address: str, load: CoreLoader, placement: Placement | None = None
    ) -> None:
        check_main()
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str] = self._loop.create_future()
        log_level = logs.own_level()
        words = shared_words()
        self._pulse = Pulse(words)
        self._process = multiprocessing.get_context("spawn").Process(
            target=_process_main,
            args=(config, address, load, log_level, logs.writes_json(), placement, words),
            name=CORE_NAME,
            daemon=True,
        )
        self._process.start()
        atexit.register(self._process.kill)
        self._loop.add_reader(self._process.sentinel, self._on_end)

    @property
    def ended(self) -> asyncio.Future[str]:
        return self._ended

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def pulse(self) -> Pulse | None:
        return self._pulse

    def dump_stacks(self) -> None:
        """See `CoreHandle.dump_stacks`. Also continues a stopped process, which handles no signal except SIGKILL."""
        if self._ended.done():
            return
        logger.error("Process %d of the engine is in state %s; the stacks of its threads:", self.pid, _state(self.pid))
        self._signal_group(STACKS_SIGNAL)
        self._signal_group(signal.SIGCONT)

    def kill(self) -> None:
        if not self._ended.done():
            self._signal_group(signal.SIGKILL)
            self._process.kill()  # it may not lead its group yet

    def _signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # the process may not have created its group yet
            os.killpg(self.pid, number)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        # Before the process is reaped: until then, no other group can have its number.
        self._signal_group(signal.SIGKILL)
        self._process.join()
        atexit.unregister(self._process.kill)
        self._ended.set_result(_describe_exit(self._process.exitcode))
        self._process.close()


def _describe_exit(exitcode: int | None) -> str:
    if exitcode == UNGUARDED_STATUS:
        return UNGUARDED
    if exitcode is not None and exitcode < 0:
        reason = f"the engine process was killed by {signal.Signals(-exitcode).name}"
        return f"{reason} (out of memory?)" if -exitcode == signal.SIGKILL else reason
    return f"the engine process exited with status {exitcode}"


def _state(pid: int) -> str:
    """Returns a process's state from /proc, such as `S (sleeping)`, `T (stopped)`, `D (disk sleep)`."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("State:")), "unknown")


def _process_main(
    config: EngineConfig,
    address: str,
    load: CoreLoader,
    log_level: int,
    json_logs: bool,
    placement: Placement | None,
    words: Words,
) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    write_stacks_on_signal()
    if placement is not None:
        placement.apply()
    logs.configure(log_level, as_json=json_logs, process="" if placement is None else placement.name)
    threading.Thread(target=_follow_parent, args=(address,), name="parent-watch", daemon=True).start()

    loaded = False
    with ExitStack() as stack:

        def load_and_guard(config: EngineConfig, channel: CoreChannel) -> Core:
            nonlocal loaded
            core = load(config, channel)
            loaded = True
            die_with_parent()  # from now on the kernel may kill it: there is nothing left to clean up
            stack.enter_context(frozen_heap())
            stack.enter_context(releasing_free_memory())
            return core

        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.term)
        well = run_core(config, CoreChannel(context, address, Pulse(words)), load_and_guard)
    if loaded:  # A compiler may still run on another thread, and would fail if its libraries were unloaded.
        logging.shutdown()
        os._exit(0 if well else 1)
    raise SystemExit(1)


def _follow_parent(address: str) -> None:
    """Kills this process and those that it started after its parent has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    folder = Path(address.removeprefix("ipc://")).parent
    shutil.rmtree(folder, ignore_errors=True)  # the parent may not have removed it
    os.killpg(os.getpgrp(), signal.SIGKILL)


def check_main() -> None:
    """Checks the main script before an engine starts a process: `multiprocessing` runs it in that process, as
    `__mp_main__`, and if it creates engines there, each starts further processes, without end. Raises `ConfigError` if
    it cannot be run once more, or is being run for that just now. In an engine's process, exits instead; the parent
    reports the error."""
    main = sys.modules["__main__"]
    if _runs_once_more():
        if multiprocessing.current_process().name == CORE_NAME:
            os._exit(UNGUARDED_STATUS)  # works on any thread; there is nothing to save
        raise ConfigError(UNGUARDED)
    path = getattr(main, "__file__", None)
    if path is not None and getattr(main, "__spec__", None) is None and not Path(path).exists():
        raise ConfigError(NO_FILE.format(path))


def _runs_once_more() -> bool:
    """Whether this process is still being set up. Afterwards, `__mp_main__` is the main module."""
    again = sys.modules.get("__mp_main__")
    return again is not None and again.__name__ == "__mp_main__" and again is not sys.modules["__main__"]
