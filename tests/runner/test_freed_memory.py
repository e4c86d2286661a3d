"""Memory freed between blocks that stay goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

FREE_EVERY_OTHER = """
import ctypes, sys
from pathlib import Path
from sglang_jax.runner.freed_memory import FreedMemory

def owned():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

size, count = 1 << 20, 200
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.free(libc.malloc(30 << 20))  # from here on, glibc keeps blocks of this size when they are freed
before, blocks, freed = owned(), [libc.malloc(size) for _ in range(count)], FreedMemory()
for block in blocks:
    ctypes.memset(block, 1, size)
for block in blocks[::2]:
    libc.free(block)
    freed.add(size)
print((owned() - before) // size)
freed.give_back()
print((owned() - before) // size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_freed_between_blocks_that_stay_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", FREE_EVERY_OTHER], capture_output=True, text=True, check=True)
    while_freeing, at_the_end = map(int, done.stdout.split())
    assert 100 <= at_the_end < 110
    assert while_freeing < 110 + 64
