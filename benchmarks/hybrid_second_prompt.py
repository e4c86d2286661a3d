"""A hybrid model with prompts that come one after the other: how much of a shared prefix the second and the third one
find in the prefix cache, and what that costs prompts that share nothing.

    python benchmarks/hybrid_second_prompt.py [--backend jax|torch] [--chunk N ...] [--repeats N] [--without-guesses]
                                              [--json FILE]

- First table: the scheduler over a runner that costs nothing. Groups of three prompts, each of `shared` tokens, the
  same within its group, and `tail` different ones; lengths vary by a tenth, so that they are not multiples of anything.
  `second` and `third`: cached tokens as a fraction of the shared whole pages, mean of 20 groups of the kind, or of
  groups of all kinds in random order (`mixed`). `excess`: what the second one computed besides its tail, as a fraction
  of the first one's tail. `steps`: of the first one. `chunk`: maximum prompt tokens of a step.
- Second table: the same scheduler, with 96 slots for states and prompts of about 1,100 tokens. One in three comes back
  with another tail of about 100 tokens (`sharers`), one in three as it was (`repeats`), `after` that many other
  prompts: the fraction that they find of what they could.
- Third table: the model of `hybrid_shared_prefix.py`, and 48 prompts of about 1,040 tokens that share nothing, one at
  a time and all at once. `time` is processor time relative to that with the prefix cache off, the median of pairs after
  a first run, whose steps are `first steps`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from host_step import EncodingChannel, FreeRunner
from hybrid_shared_prefix import VOCABULARY, write_model
from machine import report

from sglang_jax import Engine, SamplingParams
from sglang_jax.architectures import CacheKind
from sglang_jax.config import Backend, EngineConfig, LoadFormat
from sglang_jax.mem_cache.guesses import Guesses
from sglang_jax.mem_cache.state_group import StateGroup
from sglang_jax.runner.plan import PoolSpec, RunnerSpec
from sglang_jax.scheduler.messages import NewRequest
from sglang_jax.scheduler.scheduler import Scheduler

PAGE, ROWS, STATES, CONTEXT, TOKENS = 16, 32, 96, 16_384, 160_000
SHARED, TAILS = (200, 500, 1000, 3000, 10_000), (40, 250, 1000)
SHARERS, GROUPS = 3, 20
AFTER = (5, 10, 15, 20, 25)
ALONE, ALONE_TOKENS = 48, 1040
ONE = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
RANDOM = np.random.default_rng(7)


def draw(count: int) -> list[int]:
    tokens: list[int] = RANDOM.integers(3, VOCABULARY, count).tolist()
    return tokens


def about(length: int) -> int:
    return int(RANDOM.integers(length - length // 10, length + length // 10 + 1))


class Server:
    """The scheduler of a hybrid model over a runner that costs nothing."""

    def __init__(self, chunk: int, *, guesses: bool) -> None:
        pools = (
            PoolSpec("full", CacheKind.FULL, TOKENS // PAGE + 1, PAGE),
            PoolSpec("mamba", CacheKind.STATE, STATES + 1, PAGE),
        )
        spec = RunnerSpec(pools, ROWS, chunk + ROWS, CONTEXT, VOCABULARY)
        config = EngineConfig(chunked_prefill_size=chunk, page_size=PAGE)
        self._scheduler = Scheduler(FreeRunner(spec), (0,), config, EncodingChannel())
        states = self._scheduler.cache.groups[1]
        if not guesses and isinstance(states, StateGroup):
            states.guesses = Guesses(PAGE, step_cost=CONTEXT)
        self._requests = 0

    def run(self, prompt: list[int]) -> tuple[int, int]:
        """The cached tokens of a request, and its steps."""
        log = self._scheduler.log
        cached, steps = log.counts.cached_tokens, log.steps
        self._requests += 1
        token_ids = np.array(prompt, np.int32).tobytes()
        self._scheduler.add(NewRequest(id=self._requests, token_ids=token_ids, sampling=ONE, stream=True))
        self._scheduler.step()
        while not self._scheduler.idle:
            self._scheduler.step()
        return log.counts.cached_tokens - cached, log.steps - steps


def sharers(chunk: int, *, guesses: bool) -> Iterator[dict[str, Any]]:
    """The rows of the first table."""
    kinds = [(shared, tail) for shared in SHARED for tail in TAILS]
    mixed = [kinds[place] for place in RANDOM.permutation(len(kinds) * 4) % len(kinds)]
    for name, groups in [*((kind, [kind] * GROUPS) for kind in kinds), (("mixed", "mixed"), mixed)]:
        server, found = Server(chunk, guesses=guesses), []
        for shared, tail in groups:
            prefix, tails = draw(about(shared)), [draw(about(tail)) for _ in range(SHARERS)]
            shareable = len(prefix) // PAGE * PAGE
            (_, steps), (second, _), (third, _) = (server.run([*prefix, *one]) for one in tails)
            found.append((second / shareable, third / shareable, (shareable - second) / len(tails[0]), float(steps)))
        means = [statistics.mean(column) for column in zip(*found, strict=True)]
        names = ("second", "third", "excess", "steps")
        yield {"chunk": chunk, "shared": name[0], "tail": name[1], **dict(zip(names, means, strict=True))}


def returning(chunk: int, after: int, *, guesses: bool) -> dict[str, Any]:
    """A row of the second table."""
    server, choice = Server(chunk, guesses=guesses), random.Random(5)
    due: deque[tuple[int, str, list[int], int]] = deque()
    found: dict[str, list[float]] = {"sharers": [], "repeats": []}
    for turn in range(400):
        if due and due[0][0] <= turn:
            _, kind, prompt, shared = due.popleft()
            found[kind].append(server.run(prompt)[0] / (shared // PAGE * PAGE))
            continue
        prefix, tail = draw(about(1000)), draw(about(100))
        server.run([*prefix, *tail])
        match choice.randrange(3):
            case 0:
                due.append((turn + after, "sharers", [*prefix, *draw(about(100))], len(prefix)))
            case 1:
                due.append((turn + after, "repeats", [*prefix, *tail], len(prefix) + len(tail) - 1))
    return {"chunk": chunk, "after": after, **{kind: statistics.mean(shares) for kind, shares in found.items()}}


def engine_of(folder: Path, backend: Backend, chunk: int, *, cache: bool) -> Engine:
    return Engine(
        config=EngineConfig(
            model_path=str(folder),
            backend=backend,
            device="cpu",
            load_format=LoadFormat.DUMMY,
            page_size=PAGE,
            disable_radix_cache=not cache,
            chunked_prefill_size=chunk,
            max_running_requests=ROWS,
            max_mamba_cache_size=STATES,
            max_total_tokens=TOKENS,
        )
    )


def steps_of(engine: Engine) -> int:
    steps = engine.state()["steps"]
    assert isinstance(steps, int)
    return steps


def alone(engine: Engine, prompts: list[list[int]], *, together: bool) -> tuple[float, int]:
    """Processor seconds and steps of prompts that share nothing."""
    steps, start = steps_of(engine), time.process_time()
    if together:
        engine.generate(prompts, ONE)
    else:
        for prompt in prompts:
            engine.generate(prompt, ONE)
    return time.process_time() - start, steps_of(engine) - steps


def alone_with_and_without(engines: list[Engine], repeats: int, *, together: bool) -> dict[str, Any]:
    """A row of the third table; `engines`: with the prefix cache and without."""
    ratios, steps, first = [], [0, 0], 0
    for turn in range(repeats + 1):
        prompts = [draw(about(ALONE_TOKENS)) for _ in range(ALONE)]
        seconds = [0.0, 0.0]
        for which in (0, 1) if turn % 2 else (1, 0):
            seconds[which], steps[which] = alone(engines[which], prompts, together=together)
        if turn:
            ratios.append(seconds[0] / seconds[1])
        else:
            first = steps[0]
    kind = "all at once" if together else "one at a time"
    time_ = statistics.median(ratios)
    return {"prompts": kind, "time": time_, "first steps": first, "steps": steps[0], "steps without": steps[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", type=Backend, default=Backend.TORCH)
    parser.add_argument("--chunk", type=int, nargs="+", default=(512, 8192), help="maximum prompt tokens per step")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs in the third table, 0 for none")
    parser.add_argument("--without-guesses", action="store_true", help="in the first two tables, guess nothing")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    guesses = not arguments.without_guesses
    rows = [row for chunk in arguments.chunk for row in sharers(chunk, guesses=guesses)]
    rows += [returning(chunk, after, guesses=guesses) for chunk in arguments.chunk for after in AFTER]
    if arguments.repeats:
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), max_position_embeddings=CONTEXT)
            kinds = [(chunk, together) for chunk in arguments.chunk for together in (False, True)]
            for chunk, together in kinds:
                with (
                    engine_of(Path(folder), arguments.backend, chunk, cache=True) as engine,
                    engine_of(Path(folder), arguments.backend, chunk, cache=False) as without,
                ):
                    row = alone_with_and_without([engine, without], arguments.repeats, together=together)
                    rows.append({"chunk": chunk, **row})
    report("A hybrid model, prompts one after the other", rows, arguments.json)


if __name__ == "__main__":
    main()
