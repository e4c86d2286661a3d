"""llama.cpp on the embedded model's GGUF file: a reference of decode_cpu.py, which runs it with `--peers`.

Reads batch sizes from standard input, one per line, and answers each with a line: the output tokens per second of
that batch, run once. Needs `xllamacpp` (llama.cpp in a wheel); its server runs in this process, without HTTP.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xllamacpp

PROMPT = 64
OUTPUT = 64
MOST = 32
"""Concurrent requests."""


def load(path: str) -> xllamacpp.Server:
    """The file's weights unmodified, on as many threads as there are cores."""
    import xllamacpp  # here, so that --help works without it

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = MOST * 2 * (PROMPT + OUTPUT)
    params.n_parallel = MOST
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    params.warmup = True
    return xllamacpp.Server(params)


def rate(server: xllamacpp.Server, batch: int) -> float:
    """Output tokens per second of one batch, prefill included."""
    bodies = [
        {
            "prompt": random.sample(range(100, 40_000), PROMPT),
            "n_predict": OUTPUT,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        for _ in range(batch)
    ]
    start = time.perf_counter()
    with ThreadPoolExecutor(batch) as pool:
        answers = list(pool.map(server.handle_completions, bodies))
    seconds = time.perf_counter() - start
    counts = [answer["usage"]["completion_tokens"] for answer in answers]
    assert counts == [OUTPUT] * batch, counts
    return batch * OUTPUT / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="GGUF file")
    server = load(parser.parse_args().path)
    for line in sys.stdin:
        print(rate(server, int(line)), flush=True)


if __name__ == "__main__":
    main()
