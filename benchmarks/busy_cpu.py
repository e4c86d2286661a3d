"""Output of one request on a quiet CPU, and alongside processes that compute without end.

    python benchmarks/busy_cpu.py [--backend torch|jax] [--others 2] [--turns 3] [--json FILE]

SmolLM2-135M, 64 output tokens, tokens/s: the median of each kind of turn. With two others on two cores the target is
0.35 of a quiet machine's. For torch's default, run it with GOMP_SPINCOUNT=300000 (torch's wheels for Linux).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from machine import report

from sglang_jax import Engine, SamplingParams
from sglang_jax.config import Backend

PROMPT = "The history of the city began when " * 8
SAMPLING = SamplingParams(max_new_tokens=64, ignore_eos=True, temperature=0.0)
BUSY = [sys.executable, "-c", "while True: sum(range(1000))"]


def rate(engine: Engine) -> float:
    """Output tokens per second."""
    start = time.perf_counter()
    engine.generate(PROMPT, SAMPLING)
    return 64 / (time.perf_counter() - start)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Each in a separate session, so that the kernel shares the machine between them and the engine."""
    others = [subprocess.Popen(BUSY, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", type=Backend, choices=list(Backend), default=Backend.TORCH)
    parser.add_argument("--others", type=int, default=2, help="busy processes")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the row to this file")
    options = parser.parse_args()
    quiet, busy = [], []
    with Engine(backend=options.backend, max_running_requests=4, max_total_tokens=4096) as engine:
        rate(engine)
        for _ in range(options.turns):
            quiet.append(rate(engine))
            with busy_processes(options.others):
                busy.append(rate(engine))
    alone, beside = statistics.median(quiet), statistics.median(busy)
    row = {"backend": options.backend.value, "quiet tok/s": alone, "busy tok/s": beside, "ratio": beside / alone}
    report(f"One request, beside {options.others} busy processes", [row], options.json)


if __name__ == "__main__":
    main()
