"""Has the kernel kill a process for lack of memory, by a separate memory cgroup (Linux, as root or delegated)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIMIT = 64 << 20

HOG = """
import os, sys, time
open(sys.argv[1], "w").write(str(os.getpid()))
taken = []
for _ in range(200):
    taken.append(bytearray(os.urandom(1 << 20)))
    time.sleep(0.002)
"""
"""Allocates more than the limit. The kernel then kills the largest process of the group."""


def why_not() -> str:
    """Why this process may not create such groups; empty if it may."""
    try:
        group, _ = _new_group()
    except OSError as error:
        return f"no memory cgroup can be made here: {error}"
    group.rmdir()
    return ""


@contextmanager
def out_of_memory(pid: int) -> Iterator[None]:
    """Moves the process into a group with little memory, together with one that allocates all of it."""
    group, members = _new_group()
    members.write_text(str(pid))
    hog = subprocess.Popen([sys.executable, "-c", HOG, str(members)])
    try:
        yield
    finally:
        hog.kill()
        hog.wait()
        end = time.monotonic() + 10
        while members.read_text() and time.monotonic() < end:
            time.sleep(0.1)
        group.rmdir()


def _new_group() -> tuple[Path, Path]:
    """A group below this process's own, with little memory, and the file of its members. Raises `OSError`."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    first = [path for _, controllers, path in lines if "memory" in controllers.split(",")]
    second = [path for number, _, path in lines if number == "0"]
    if not first and not second:
        raise FileNotFoundError("this system has none")
    root, limit = ("memory", "memory.limit_in_bytes") if first else ("", "memory.max")
    group = Path("/sys/fs/cgroup") / root / (first or second)[0].lstrip("/") / f"faults-{os.getpid()}"
    group.mkdir()
    try:
        (group / limit).write_text(str(LIMIT))
    except OSError:
        group.rmdir()
        raise
    return group, group / "cgroup.procs"
