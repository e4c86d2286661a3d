"""Host time of bursts: many prompts that arrive, end or are aborted at once, over a runner that costs nothing.

    python benchmarks/arrivals.py [--page-size 16] [--only WORDS] [--part 1] [--json FILE]

Time of only the scheduler's thread (`time.thread_time`), milliseconds of the worst turn of the loop and microseconds
for each request. A turn is the work between two launches: messages from the inbox, planning, finishing, publishing.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
from host_step import FreeRunner
from machine import report

from sglang_jax.architectures import CacheKind
from sglang_jax.config import EngineConfig, SchedulePolicy
from sglang_jax.runner.plan import PoolSpec, RunnerSpec
from sglang_jax.sampling.params import SamplingParams
from sglang_jax.scheduler.commands import inbound_types
from sglang_jax.scheduler.loop import SchedulerLoop
from sglang_jax.scheduler.messages import AbortRequest, Inbound, NewRequest, Outbound

CHUNK = 16_384
REPEATS = 5

Measure = Callable[[int, int], dict[str, float]]
"""The cases of one page size; the number of prompts is divided by a given number."""


class PackedChannel:
    """A channel whose messages are packed, as on the wire: a turn unpacks what it receives."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Inbound] = msgspec.msgpack.Decoder(inbound_types())
        self._inbox: list[bytes] = []
        self._taken = 0

    def put(self, messages: list[Inbound]) -> None:
        """Puts messages where the next turns find them."""
        self._inbox = [*self._inbox[self._taken :], *map(self._encoder.encode, messages)]
        self._taken = 0

    def receive(self, block: bool, seconds: float | None = None) -> Iterator[Inbound]:
        while self._taken < len(self._inbox):
            self._taken += 1
            yield self._decoder.decode(self._inbox[self._taken - 1])

    def send(self, message: Outbound) -> None:
        self._encoder.encode(message)


class Burst:
    """A loop over a free runner, and the time of each turn."""

    def __init__(
        self,
        rows: int,
        context: int,
        page_size: int,
        *,
        pool_tokens: int | None = None,
        policy: SchedulePolicy = SchedulePolicy.FCFS,
    ) -> None:
        pages = (pool_tokens or rows * context) // page_size + rows + 1
        spec = RunnerSpec((PoolSpec("full", CacheKind.FULL, pages, page_size),), rows, CHUNK + rows, context, 1000)
        config = EngineConfig(
            chunked_prefill_size=CHUNK, page_size=page_size, debug_memory=False, schedule_policy=policy
        )
        self.channel = PackedChannel()
        self.loop = SchedulerLoop(FreeRunner(spec), (0,), config, self.channel)
        self.scheduler = self.loop.scheduler
        self.turns: list[float] = []
        self._next_id = 0

    def add(self, prompts: list[np.ndarray], new_tokens: int = 8, **fields: object) -> list[int]:
        """Puts requests into the inbox; returns their ids."""
        sampling = SamplingParams(max_new_tokens=new_tokens, seed=1)
        ids = list(range(self._next_id, self._next_id + len(prompts)))
        self._next_id += len(prompts)
        self.channel.put(
            [
                NewRequest(id=request, token_ids=prompt.tobytes(), sampling=sampling, stream=True, **fields)
                for request, prompt in zip(ids, prompts, strict=True)
            ]
        )
        return ids

    def take_in(self) -> None:
        """Queues the inbox before the next turn, the first whose time counts."""
        for message in self.channel.receive(block=False):
            assert isinstance(message, NewRequest)
            self.scheduler.add(message)
        self.turns.clear()

    def figures(self, requests: int) -> dict[str, float]:
        """The figures of the turns since then."""
        worst, total = max(self.turns), sum(self.turns)
        mean = total / len(self.turns)
        return {"worst ms": worst * 1e3, "mean ms": mean * 1e3, "us per request": total / requests * 1e6}

    def abort(self, ids: list[int]) -> None:
        """Puts their aborts into the inbox."""
        self.channel.put([AbortRequest(request) for request in ids])

    def turn(self) -> float:
        """Runs one turn; returns its thread time in seconds."""
        start = time.thread_time()
        self.loop.turn()
        self.turns.append(time.thread_time() - start)
        return self.turns[-1]

    def run(self, until: Callable[[], bool]) -> None:
        """Runs turns until the condition holds."""
        while not until():
            self.turn()

    def all_decode(self, count: int) -> None:
        """Runs turns until `count` requests have sampled two tokens."""
        wanted = self.scheduler.log.counts.generation_tokens + 2 * count
        self.run(lambda: self.scheduler.log.counts.generation_tokens >= wanted)


def random_prompts(count: int, length: int, *, same: int = 0) -> list[np.ndarray]:
    """`count` prompts of `length` tokens that share the first `same` and differ after that."""
    prompts = np.random.default_rng(count).integers(2, 1000, (count, length), dtype=np.int32)
    prompts[:, :same] = prompts[0, :same]
    if same < length:
        prompts[:, same] = np.arange(count) % 1000
    return list(prompts)


def worst_turn_of(prompts: list[np.ndarray], rows: int, page_size: int) -> dict[str, float]:
    """All prompts are queued when the first step is planned; runs until all have ended."""
    burst = Burst(rows, len(prompts[0]) + 16, page_size)
    burst.add(prompts)
    burst.take_in()
    burst.run(lambda: burst.scheduler.idle)
    return {"worst ms": max(burst.turns) * 1e3, "us per request": sum(burst.turns) / len(prompts) * 1e6}


def arrivals_while_decoding(page_size: int, part: int) -> dict[str, float]:
    """64 rows decode; 5,000 prompts of 256 tokens arrive at once."""
    arriving = 5000 // part
    burst = Burst(64, 4096, page_size)
    burst.add(random_prompts(64, 64), new_tokens=4000)
    burst.turn()
    burst.all_decode(64)
    burst.turns.clear()
    burst.add(random_prompts(arriving, 256))
    burst.run(lambda: len(burst.scheduler.requests) == 64 + arriving)
    return {"worst ms": max(burst.turns) * 1e3, "us per request": sum(burst.turns) / arriving * 1e6}


def all_end_at_once(page_size: int, part: int) -> dict[str, float]:
    """1,024 rows sample their last token in one step."""
    rows = 1024 // part
    burst = Burst(rows, 128, page_size)
    burst.add(random_prompts(rows, 16, same=0), new_tokens=40)
    burst.turn()
    burst.all_decode(rows)
    burst.turns.clear()
    burst.run(lambda: burst.scheduler.idle)
    return {"worst ms": max(burst.turns) * 1e3, "us per request": sum(sorted(burst.turns)[-20:]) / rows * 1e6}


def all_aborted_at_once(page_size: int, part: int) -> dict[str, float]:
    """1,024 rows decode, and all are aborted by messages that arrive together."""
    rows = 1024 // part
    burst = Burst(rows, 256, page_size)
    ids = burst.add(random_prompts(rows, 16), new_tokens=200)
    burst.turn()
    burst.all_decode(rows)
    burst.turns.clear()
    burst.abort(ids)
    burst.run(lambda: burst.scheduler.idle)
    return {"worst ms": max(burst.turns) * 1e3, "us per request": sum(burst.turns) / rows * 1e6}


def burst_of_2k(page_size: int, part: int) -> dict[str, float]:
    """5,000 different prompts of 2,000 tokens through 256 rows and a pool that must evict."""
    arriving = 5000 // part
    burst = Burst(256, 2064, page_size, pool_tokens=600_000)
    burst.add(random_prompts(arriving, 2000), new_tokens=8)
    burst.turn()
    burst.run(lambda: burst.scheduler.idle)
    return {"worst ms": max(burst.turns) * 1e3, "us per request": sum(burst.turns) / arriving * 1e6}


def burst_of(count: int, length: int, *, same: int = 0, most_rows: int = 1024) -> Measure:
    """A case of `worst_turn_of`."""

    def measure(page_size: int, part: int) -> dict[str, float]:
        prompts = random_prompts(count // part, length, same=same)
        return worst_turn_of(prompts, min(len(prompts), most_rows), page_size)

    return measure


def deep_path(branches: int, policy: SchedulePolicy) -> Measure:
    """64 rows, one of which ends in each step, and 400 queued prompts that share a path of this many branch nodes of
    one token each."""

    def measure(page_size: int, part: int) -> dict[str, float]:
        waiting, rows, depth = 400 // part, 64, max(branches // part, 1)
        burst = Burst(rows, depth + 128, 1, policy=policy)
        path = np.full(depth, 2, np.int32)
        burst.add([np.append(path[:length], np.int32(3)) for length in range(depth)], new_tokens=1)
        burst.turn()
        burst.run(lambda: burst.scheduler.idle)
        tails = np.arange(rows + waiting, dtype=np.int32).reshape(-1, 1) + 4
        for number, tail in enumerate(tails):
            burst.add([np.append(path, tail)], new_tokens=2 + number if number < rows else 64)
        burst.take_in()
        burst.run(lambda: len(burst.scheduler.queue) <= waiting // 20)
        return burst.figures(waiting)

    return measure


def long_queue(policy: SchedulePolicy) -> Measure:
    """20,000 prompts of 16 tokens are queued for 1,024 rows, a few of which end in each step."""

    def measure(page_size: int, part: int) -> dict[str, float]:
        waiting, rows = 20_000 // part, 1024 // part
        burst = Burst(rows, 1200, page_size, policy=policy)
        prompts = random_prompts(rows + waiting, 16)
        for number, prompt in enumerate(prompts[:rows]):
            burst.add([prompt], new_tokens=2 + number)
        burst.add(prompts[rows:], new_tokens=512)
        burst.take_in()
        for _ in range(200):
            burst.turn()
        return burst.figures(waiting)

    return measure


CASES: dict[str, tuple[Measure, str, float]] = {
    "256 x 64 tokens": (burst_of(256, 64), "worst ms", 16),
    "1,024 x 16 tokens": (burst_of(1024, 16), "worst ms", 45),
    "256 x the same 2k": (burst_of(256, 2000, same=2000), "worst ms", 15),
    "5,000 x 2k, 1,999 shared": (burst_of(5000, 2000, same=1999, most_rows=256), "worst ms", 25),
    "5,000 arrive, 64 decode": (arrivals_while_decoding, "worst ms", 10),
    "1,024 end at once": (all_end_at_once, "worst ms", 6),
    "1,024 aborted at once": (all_aborted_at_once, "worst ms", 6),
    "5,000 x different 2k": (burst_of_2k, "us per request", 150),
}
for one in (SchedulePolicy.FCFS, SchedulePolicy.LPM):
    CASES |= {f"400 wait, path of {depth:,}, {one}": (deep_path(depth, one), "mean ms", 1) for depth in (100, 1000)}
    CASES[f"20,000 wait, {one}"] = (long_queue(one), "mean ms", 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--part", type=int, default=1, help="divides all numbers of prompts: to try the script")
    arguments = parser.parse_args()
    table = []
    for name, (measure, figure, target) in CASES.items():
        if arguments.only not in name:
            continue
        runs = []
        for _ in range(arguments.repeats):
            gc.collect()
            runs.append(measure(arguments.page_size, arguments.part))
        row: dict[str, object] = {"burst": name}
        row |= {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        row |= {f"least {figure}": min(run[figure] for run in runs), "target": target, "of": figure}
        table.append(row)
    report(f"Host time of bursts, pages of {arguments.page_size}", table, arguments.json)


if __name__ == "__main__":
    main()
