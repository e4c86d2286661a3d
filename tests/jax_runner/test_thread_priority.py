"""Background compilation has a lower priority than serving."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import nullcontext

import pytest

from sglang_jax.jax_runner.builds import Builds, Executable, compiler_threads, lower_priority, ticks_of_threads


def test_the_compilers_threads_have_the_lowest_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two threads that are not Python's and one that is, the one that was busy while programs were built."""
    counts = iter(({1: 5, 2: 100}, {1: 905, 2: 250, 3: 4, threading.get_native_id(): 2000}))
    monkeypatch.setattr("sglang_jax.jax_runner.builds.ticks_of_threads", lambda: next(counts))
    lowered: list[int] = []
    monkeypatch.setattr("sglang_jax.jax_runner.builds.lower_priority", lowered.append)
    builds = Builds()
    builds.build({"a": lambda: print}, lambda done, total, what: None)
    own: list[int] = []

    def build() -> Executable:
        own.append(threading.get_native_id())
        return print

    builds.build_in_background({"b": build}, nullcontext)
    while builds.num_left:
        time.sleep(0.01)
    assert lowered == ([*own, 1] if sys.platform == "linux" else [])


def test_few_ticks_identify_no_compiler_thread() -> None:
    assert compiler_threads({1: 5}, {1: 304}) == []


@pytest.mark.skipif(sys.platform != "linux", reason="threads have separate priorities only on Linux")
def test_a_thread_has_a_lower_priority_than_before() -> None:
    found: list[int] = []

    def lower() -> None:
        own = threading.get_native_id()
        found.extend([os.getpriority(os.PRIO_PROCESS, own), ticks_of_threads()[own]])
        lower_priority(own)
        found.append(os.getpriority(os.PRIO_PROCESS, own))

    thread = threading.Thread(target=lower)
    thread.start()
    thread.join()
    before, ticks, after = found
    assert (after, ticks >= 0) == (min(before + 10, 19), True)
