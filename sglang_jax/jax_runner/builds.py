"""Builds programs: at their first use, before that on other threads, or in the background with a lower priority."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from sglang_jax.runner.pulse import Building
from sglang_jax.runner.this_machine import available_host_memory

_THREADS = Path("/proc/self/task")
_NICENESS = 10
_SHARE = 0.25
_MIN_TICKS = 300
"""Minimum ticks of a compiler thread, three seconds: other threads may have used less than that."""

logger = logging.getLogger(__name__)

_MEMORY_OF_A_BUILD = 2 << 30
"""Maximum memory of the compiler for a step of tens of layers, in bytes."""

Executable = Callable[..., Any]
Build = Callable[[], Executable]
Around = Callable[[], AbstractContextManager[None]]


def builds_at_once() -> int:
    """How many programs to build at once, by cores and memory. Tracing takes one core, while other programs compile."""
    return max(1, min(len(os.sched_getaffinity(0)), available_host_memory() // _MEMORY_OF_A_BUILD))


class Builds:
    """Programs by name, each built once, by the first thread that needs it. Thread-safe. `building`: entered around
    each build that a thread waits for."""

    def __init__(self) -> None:
        self.building: Building = nullcontext
        self._built: dict[str, Executable] = {}
        self._started: dict[str, Future[Executable]] = {}
        self._lock = threading.Lock()  # guards the started builds
        self._in_background: BackgroundBuilds | None = None
        self._compilers: list[int] = []  # threads of the compiler

    def __len__(self) -> int:
        return len(self._built)

    def __contains__(self, name: str) -> bool:
        return name in self._built

    def get(self, name: str, build: Build) -> Executable:
        program = self._built.get(name)
        return self.build_or_wait(name, build) if program is None else program

    def begin(self, builders: Mapping[str, Build]) -> dict[Future[Executable], str]:
        """Starts to build programs on other threads, in this order. Returns their futures, with names, at once."""
        pool = ThreadPoolExecutor(builds_at_once(), thread_name_prefix="build")
        with self._lock:
            for name, build in builders.items():
                if name not in self._started:
                    self._started[name] = pool.submit(self._build, name, build)
            futures = {self._started[name]: name for name in builders}
        pool.shutdown(wait=False)  # its threads end after their builds
        return futures

    def build(self, builders: Mapping[str, Build], progress: Callable[[int, int, str], None]) -> None:
        """Builds the programs that are not built yet, on `builds_at_once` threads. Calls `progress(done, total, what)`
        on this thread; `what` is the program built last."""
        progress(0, len(builders), "compiling")
        before = ticks_of_threads()
        futures = self.begin(builders)
        with self.building():
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                progress(done, len(builders), futures[future])
        self._compilers = compiler_threads(before, ticks_of_threads())

    def build_in_background(self, builders: Mapping[str, Build], around: Around) -> None:
        """Builds the programs that are not built yet on one thread, in this order, and returns at once. The thread, and
        the compiler's threads that `build` has found, get a low priority. It enters `around` around each build."""
        left = {name: build for name, build in builders.items() if name not in self._built}
        self._in_background = BackgroundBuilds(self, left, around, self._compilers)

    @property
    def num_left(self) -> int:
        return 0 if self._in_background is None else self._in_background.num_left

    @property
    def failed(self) -> Sequence[str]:
        return () if self._in_background is None else self._in_background.failed

    @property
    def complete(self) -> bool:
        """False during background builds, and for good if one of them has failed."""
        background = self._in_background
        return background is None or not (background.num_left or background.failed)

    def abandon(self) -> None:
        """Cancels started builds that do not run yet."""
        if self._in_background is not None:
            self._in_background.stop()
        with self._lock:
            self._started = {name: future for name, future in self._started.items() if not future.cancel()}

    def build_or_wait(self, name: str, build: Build, *, awaited: bool = True) -> Executable:
        """Builds a program, or waits for another thread that builds it. `awaited`: whether a thread waits for it."""
        with self._lock:
            future = self._started.get(name)
            own = future is None or future.cancel()
            if future is None or own:
                future = self._started[name] = Future()
                future.set_running_or_notify_cancel()  # prevents cancellation
        if not own:
            with self.building() if awaited else nullcontext():
                return future.result()
        try:
            future.set_result(self._build(name, build, awaited=awaited))
        except BaseException as error:
            future.set_exception(error)
            raise
        return future.result()

    def _build(self, name: str, build: Build, *, awaited: bool = True) -> Executable:
        try:
            with self.building() if awaited else nullcontext():
                program = self._built[name] = build()
        except BaseException:
            with self._lock:
                self._started.pop(name, None)  # the next use tries again
            raise
        return program


class BackgroundBuilds:
    """The thread that builds programs in the background. `compilers`: ids of the compiler's threads."""

    def __init__(
        self, builds: Builds, builders: Mapping[str, Build], around: Around, compilers: Sequence[int] = ()
    ) -> None:
        self._builds = builds
        self._builders = builders
        self._around = around
        self._compilers = compilers
        self._left = len(builders)
        self._stopped = False
        self.failed: list[str] = []
        self._thread = threading.Thread(target=self._run, name="background-build", daemon=True)
        # The compiler crashes if its libraries are unloaded while it works.
        atexit.register(self._wait)
        self._thread.start()

    @property
    def num_left(self) -> int:
        return self._left

    def stop(self) -> None:
        self._stopped = True

    def _wait(self) -> None:
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._build_all()
        finally:
            atexit.unregister(self._wait)

    def _build_all(self) -> None:
        if sys.platform == "linux":  # other systems have no priorities per thread
            for thread in (threading.get_native_id(), *self._compilers):
                lower_priority(thread)
        begin = time.monotonic()
        for name, build in self._builders.items():
            if self._stopped:
                return
            try:
                with self._around():
                    self._builds.build_or_wait(name, build, awaited=False)
            except Exception:
                self.failed.append(name)
                logger.exception("%s could not be compiled: steps that it would fit run a larger program", name)
            self._left -= 1
        if not self.failed:
            seconds = time.monotonic() - begin
            logger.info("Compiled %d more programs in %.0f s, while serving", len(self._builders), seconds)


def ticks_of_threads() -> dict[int, int]:
    """Processor time of each thread, by id, in the kernel's ticks (10 ms on most machines). Empty except on Linux."""
    found: dict[int, int] = {}
    for folder in _THREADS.iterdir() if _THREADS.is_dir() else ():
        try:
            stat = (folder / "stat").read_text()
        except OSError:  # the thread has ended
            continue
        user, system = stat.rpartition(")")[2].split()[11:13]
        found[int(folder.name)] = int(user) + int(system)
    return found


def compiler_threads(before: Mapping[int, int], after: Mapping[int, int]) -> list[int]:
    """The compiler's threads, which it does not expose: the threads other than Python's that used the most processor
    time between two calls of `ticks_of_threads`, while little else than builds ran. Empty if they used too little, for
    example because programs came from a cache."""
    python = {thread.native_id for thread in threading.enumerate()}
    used = {thread: ticks - before.get(thread, 0) for thread, ticks in after.items() if thread not in python}
    most = max(used.values(), default=0)
    return [thread for thread, ticks in used.items() if most >= _MIN_TICKS and ticks >= _SHARE * most]


def lower_priority(thread: int) -> None:
    """Gives a thread, by id, a lower priority than all others of this process. Only Linux has priorities per thread."""
    try:
        own = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(own + _NICENESS, 19))
    except OSError as error:
        logger.warning("Thread %d, which compiles in the background, keeps its priority: %s", thread, error)
