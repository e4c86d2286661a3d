"""Memory of threads and of large blocks goes back to the system. Each test runs in its own process, as these settings
last."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from sglang_jax.engine import allocator
from sglang_jax.engine.allocator import ARENAS, GROWTH_BYTES, FreeMemory, limit_free_memory, release_free_memory

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has its own ways")

SETTLED = "from sglang_jax.engine.allocator import limit_free_memory; assert limit_free_memory()"

LARGE_BLOCKS = """
def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096 / 2**20

bytes(24 * 2**20)  # from now on, glibc's default keeps blocks up to this size in the heap
before, blocks, kept = resident(), [], []
for _ in range(8):
    blocks.append(b"x" * (4 * 2**20))
    kept.append(b"x" * 3000)  # lies behind it
blocks.clear()
print(resident() - before)
"""

THREADS = """
import ctypes, sys, threading
barrier = threading.Barrier(12)

def work():
    barrier.wait()
    for _ in range(50):
        blocks = [bytearray(3000) for _ in range(100)]
    barrier.wait()

threads = [threading.Thread(target=work) for _ in range(12)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
library = ctypes.CDLL(None)
library.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(library.fopen(sys.argv[1].encode(), b"w"))
library.malloc_info(0, file)
library.fclose(file)
with open(sys.argv[1]) as told:
    print(told.read().count("<heap nr"))
"""


def printed_number(*lines: str, path: str = "") -> float:
    run = subprocess.run([sys.executable, "-c", "\n".join(lines), path], capture_output=True, text=True, check=True)
    return float(run.stdout)


def test_large_blocks_do_not_stay_in_the_heap() -> None:
    assert printed_number(SETTLED, LARGE_BLOCKS) < 2
    assert printed_number(LARGE_BLOCKS) > 16


def test_threads_share_a_few_arenas(tmp_path: object) -> None:
    path = f"{tmp_path}/arenas"
    assert printed_number(SETTLED, THREADS, path=path) <= ARENAS
    assert printed_number(THREADS, path=path) > ARENAS


FREE_BETWEEN = """
from sglang_jax.engine.allocator import GROWTH_BYTES, FreeMemory, resident_bytes
memory = FreeMemory()
before = resident_bytes()
blocks = [bytearray(3000) for _ in range(20_000)]
between = blocks[::20]
blocks.clear()
kept = resident_bytes() - before
memory.look()
assert kept > 8 * GROWTH_BYTES, kept
print((resident_bytes() - before) / kept)
"""


def test_free_memory_between_live_blocks_goes_back_once_a_process_has_grown() -> None:
    assert printed_number(SETTLED, FREE_BETWEEN) < 0.25
    assert printed_number(SETTLED, FREE_BETWEEN.replace("memory.look()", "")) > 0.9


OVER_LATER = """
from sglang_jax.engine.allocator import FIRST_WAIT, FreeMemory, resident_bytes
memory = FreeMemory()
before = resident_bytes()
blocks = [bytearray(3000) for _ in range(20_000)]
grown = resident_bytes() - before
for _ in range(1 + FIRST_WAIT):
    memory.look()
assert resident_bytes() - before > 0.9 * grown, "it is in use"
between = blocks[::20]
blocks.clear()
for _ in range(2 * FIRST_WAIT):
    memory.look()
print((resident_bytes() - before) / grown)
"""


def test_memory_freed_some_time_after_growth_goes_back_too() -> None:
    assert printed_number(SETTLED, OVER_LATER) < 0.25
    assert printed_number(SETTLED, OVER_LATER.replace("(2 * FIRST_WAIT)", "(2 * FIRST_WAIT - 1)")) > 0.9


LOADED = """
import threading, time
from sglang_jax.engine.allocator import releasing_free_memory, resident_bytes
before = resident_bytes()
kept = []

def compile():
    blocks = [bytearray(3000) for _ in range(20_000)]
    kept.append(blocks[::20])

def in_threads():
    threads = [threading.Thread(target=compile) for _ in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]

in_threads()
grown = resident_bytes() - before
assert grown > 24 * 2**20, grown
with releasing_free_memory(seconds=0.01):
    print((resident_bytes() - before) / grown)
    in_threads()
    until = time.monotonic() + 60
    while resident_bytes() - before > 0.5 * grown and time.monotonic() < until:
        time.sleep(0.01)
    assert resident_bytes() - before <= 0.5 * grown, "what a step took is kept"
assert "memory" not in [thread.name for thread in threading.enumerate()]
"""


def test_a_core_gives_back_memory_of_the_load_at_once_and_of_steps_later() -> None:
    assert printed_number(LOADED) < 0.25


def test_trimming_stops_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    resident = [100 * GROWTH_BYTES]
    monkeypatch.setattr(allocator, "resident_bytes", lambda: resident[0])
    monkeypatch.setattr(allocator, "release_free_memory", lambda: bool(trims.append(look)) or True)
    memory = FreeMemory()
    for look in range(3000):
        if look == 5:
            resident[0] += 2 * GROWTH_BYTES
        memory.look()
    assert [one - 5 for one in trims] == [0, 2, 6, 14, 30, 62, 126, 254, 510, 1022]


def test_another_c_library_is_left_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("musl", "1.2"))
    assert not limit_free_memory()
    assert not release_free_memory()
