"""Has the kernel kill a process because memory ran out, by a memory cgroup of its own (Linux, as root or delegated)."""

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
"""Takes more than there is. When that is noticed, the process that dies is the largest one of the group."""


@contextmanager
def out_of_memory(pid: int) -> Iterator[None]:
    """Puts the process into a group with little memory, together with one that takes all of it.

    **Raises:** `SystemExit` where this process may not make such groups.
    """
    parent, limit = _own_group()
    group = parent / f"faults-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(LIMIT))
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        raise SystemExit(f"no memory cgroup can be made here: {error}") from error
    hog = subprocess.Popen([sys.executable, "-c", HOG, str(group / "cgroup.procs")])
    try:
        yield
    finally:
        hog.kill()
        hog.wait()
        end = time.monotonic() + 10
        while (group / "cgroup.procs").read_text() and time.monotonic() < end:
            time.sleep(0.1)
        group.rmdir()


def _own_group() -> tuple[Path, str]:
    """The folder of this process's memory group, and the name of the file that has its limit."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/"), "memory.limit_in_bytes"
    for number, _, path in lines:
        if number == "0":
            return Path("/sys/fs/cgroup") / path.lstrip("/"), "memory.max"
    raise SystemExit("this system has no memory cgroups")
