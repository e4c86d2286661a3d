"""Latencies while a long prompt is computed: over HTTP, in real time, with a real model.

    python benchmarks/fair_prefill_http.py [--backend torch] [--target 0 --target 100] [--url URL] [--json FILE]

Like `fair_prefill.py`, whose time is simulated. Some requests decode all the time; prompts of `--long` tokens arrive
one after the other, as do short ones. For each case a server is started (or the one at `--url` is used), given a single
prompt of `LEARNING` tokens from which it learns step times, and then measured for a number of seconds. A case takes a
minute or two; on a slow machine choose a target that a few dozen tokens of a prompt can meet.

- ITL: milliseconds between two tokens of a decoding request, while a long prompt is computed. `alone`: without one.
- TTFT: of the short prompts in milliseconds, of the long ones in seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx2
import numpy as np
from faults import Server
from machine import format_table, report

from sglang_jax.cli.bench.load import Api, GenerateDialogue, Target, send
from sglang_jax.cli.bench.metrics import RequestRecord
from sglang_jax.cli.bench.workloads import Turn
from sglang_jax.cli.server_client import open_client

DECODING = 4
SHORT = 20
LEARNING = 1000
ALONE_SECONDS = 5.0
PATIENCE_SECONDS = 300.0


async def ask(http: httpx2.AsyncClient, length: int, count: int, records: list[RequestRecord]) -> None:
    """Sends a random prompt, and appends its record, which gets the answer's tokens as they arrive."""
    turn = Turn(tuple(random.randrange(100, 40_000) for _ in range(length)), count)
    record = RequestRecord(requested_tokens=count)
    records.append(record)
    target = Target(base_url=str(http.base_url), api=Api.SGLANG, model="", extra_body={})
    await send(http, target, GenerateDialogue(), turn, record)
    if not record.ok:
        raise RuntimeError(record.error)


async def ask_again(
    http: httpx2.AsyncClient, length: int, count: int, pause: float, records: list[RequestRecord]
) -> None:
    while True:
        await ask(http, length, count, records)
        await asyncio.sleep(pause)


async def measure(url: str, seconds: float, length: int) -> dict[str, object]:
    """Loads a server, and returns what its clients measured."""
    decoded: list[RequestRecord] = []
    short: list[RequestRecord] = []
    long: list[RequestRecord] = []
    async with open_client(url, None) as http:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await ask(http, LEARNING, 1, [])
        streams = [asyncio.create_task(ask_again(http, SHORT, 2000, 0.0, decoded)) for _ in range(DECODING)]
        await asyncio.sleep(1.0)
        begin = time.perf_counter()
        await asyncio.sleep(ALONE_SECONDS)
        loaded = time.perf_counter()
        streams.append(asyncio.create_task(ask_again(http, SHORT, 1, 0.2, short)))
        streams.append(asyncio.create_task(ask_again(http, length, 1, 0.0, long)))
        await asyncio.wait(streams, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        end = time.perf_counter()
        for stream in streams:
            stream.cancel()
        for outcome in await asyncio.gather(*streams, return_exceptions=True):
            if not isinstance(outcome, asyncio.CancelledError):
                raise SystemExit(f"a request failed: {outcome!r}")
        state = (await http.get("/server_info")).json()["internal_states"][0]
    alone, beside = gaps(decoded, begin, loaded), gaps(decoded, loaded, end)
    waits = np.array(first_tokens(short)) * 1e3
    return {
        "ITL alone p50": float(np.median(alone)),
        "ITL p50": float(np.median(beside)),
        "ITL p99": float(np.quantile(beside, 0.99)),
        "ITL max": float(beside.max()),
        "short": len(waits),
        "short TTFT p50": float(np.median(waits)),
        "short TTFT max": float(waits.max()),
        "long TTFT s": float(np.mean(first_tokens(long))) if first_tokens(long) else "",
        "long": len(first_tokens(long)),
        "step error": state.get("step_time_error", ""),
    }


def first_tokens(records: Sequence[RequestRecord]) -> list[float]:
    """Seconds to the first token of each prompt that has one."""
    waits = (record.time_to_first_token for record in records)
    return [wait for wait in waits if wait is not None]


def gaps(records: Sequence[RequestRecord], begin: float, end: float) -> np.ndarray:
    """Milliseconds between tokens that arrived from `begin` to `end`."""
    times = [np.array([chunk.time for chunk in record.chunks]) for record in records]
    between = [np.diff(one)[(one[:-1] >= begin) & (one[1:] <= end)] for one in times]
    return np.concatenate(between) * 1e3


async def measure_case(
    backend: str, chunk: int, target: float | None, seconds: float, length: int, options: list[str]
) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="fair-prefill-") as folder:
        flags = ["--backend", backend, "--chunked-prefill-size", str(chunk), "--disable-radix-cache"]
        flags += [] if target is None else ["--target-itl-ms", str(target)]
        server = Server([*flags, *options], Path(folder) / "log")
        try:
            await server.ready()
            found = await measure(server.url, seconds, length)
        finally:
            server.end()
    return {"backend": backend, "chunk": chunk, "target ms": target or ""} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--backend", default="jax", choices=["jax", "torch"])
    parser.add_argument("--chunk", type=int, default=512, help="--chunked-prefill-size of the server")
    parser.add_argument("--target", type=float, action="append", help="a case with this --target-itl-ms; 0: none")
    parser.add_argument("--seconds", type=float, default=30.0, help="of load")
    parser.add_argument("--url", help="measure this running server, whatever its options")
    parser.add_argument("--long", type=int, default=7000, help="tokens of a long prompt")
    arguments, options = parser.parse_known_args()
    random.seed(1)
    if arguments.url is not None:
        table = [asyncio.run(measure(arguments.url, arguments.seconds, arguments.long))]
    else:
        cases = [target or None for target in arguments.target or [0.0]]
        table = []
        for target in cases:
            case = measure_case(arguments.backend, arguments.chunk, target, arguments.seconds, arguments.long, options)
            table.append(asyncio.run(case))
            print(format_table(table[-1:]), flush=True)  # in case a later one fails
    title = f"Prompts of {arguments.long} tokens next to short ones and decoding requests, over HTTP, ms"
    report(title, table, arguments.json)


if __name__ == "__main__":
    main()
