"""Work of somebody else's program, such as a chat template, that may never end."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")

LOOKS_PER_SECOND = 10


class _Interrupted(BaseException):
    """Raised from outside in a thread that computes too long. No program's `except Exception` catches it."""


async def in_limited_thread(work: Callable[[], Result], cpu_seconds: float) -> Result:
    """What `work` returns or raises, in a thread. It is interrupted where it has computed for so many seconds; time
    that the thread waits for a core does not count.

    Python looks for interruptions between two of its instructions: one that takes long itself is ended late.

    **Raises:** `TimeoutError`.
    """
    limited = _Limited(work, cpu_seconds)
    running = asyncio.ensure_future(asyncio.to_thread(limited.run))
    try:
        while not (await asyncio.wait({running}, timeout=1 / LOOKS_PER_SECOND))[0]:
            limited.look()
    except asyncio.CancelledError:
        limited.interrupt()
        raise
    return running.result()


class _Limited(Generic[Result]):
    """Work that another thread watches."""

    def __init__(self, work: Callable[[], Result], cpu_seconds: float) -> None:
        self._work = work
        self._seconds = cpu_seconds
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._ends_at = 0.0
        self._interrupted = False

    def run(self) -> Result:
        """Runs the work. Raises `TimeoutError` where it was interrupted."""
        with self._lock:
            self._thread = threading.get_ident()
            self._ends_at = time.thread_time() + self._seconds
        try:
            arrived = False
            try:
                return self._work()
            except _Interrupted:
                arrived = True
                raise
            finally:
                with self._lock:
                    self._thread = None
                while (
                    self._interrupted and not arrived
                ):  # what was raised for it must arrive here, and not in what runs next
                    time.sleep(0.001)
        except _Interrupted:
            raise TimeoutError(f"computed for more than {self._seconds:g} s") from None

    def look(self) -> None:
        """Interrupts the work if it has had its time."""
        with self._lock:
            late = (
                self._thread is not None
                and time.clock_gettime(time.pthread_getcpuclockid(self._thread)) > self._ends_at
            )
        if late:
            self.interrupt()

    def interrupt(self) -> None:
        """Interrupts the work if it still runs."""
        with self._lock:
            if self._thread is not None and not self._interrupted:
                self._interrupted = True
                identity = ctypes.c_ulong(self._thread)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(_Interrupted))
