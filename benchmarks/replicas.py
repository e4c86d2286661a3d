"""Throughput of replicas, and the cost of choosing among them.

    python benchmarks/replicas.py [routing] [sleep] [model] [--step-ms 25] [--model-path M] [--json FOLDER]

- `routing`: microseconds to choose a replica, and to remember the choice, with maps of 100,000 tokens for each.
- `sleep`: output tokens per second of 1, 2 and 4 replicas whose steps take `--step-ms` without the host's CPU, like a
  device's: the scheduler, the wire and the router are the real ones. Each replica has 16 rows.
- `model`: output tokens per second of a model on this machine's CPU: one engine with one core, one with two, and two
  replicas with a core each.

Without a name, all three run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import report

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from helpers.engine_fakes import load_tokenizer  # importable only now
from helpers.sleeping_core import launch_sleeping_link

from sglang_jax.config import Device, EngineConfig, LoadBalanceMethod
from sglang_jax.engine.client import AsyncEngineClient
from sglang_jax.engine.launch import launch_replica_link
from sglang_jax.engine.launch_replicated import replicated_client
from sglang_jax.engine.model_core import load_text_tokenizer
from sglang_jax.engine.placement import Placement
from sglang_jax.engine.replica import Replica, start_replicas
from sglang_jax.engine.router import Router
from sglang_jax.engine.routing import Balance, Candidate, create_policy
from sglang_jax.engine.types import EngineClient, GenerateInput
from sglang_jax.sampling.params import SamplingParams

MAP_TOKENS = 100_000
ROWS = 16


def measure_routing(replicas: int, prompt_tokens: int) -> list[dict[str, Any]]:
    """Each policy on prompts half of which is shared in groups of 8, with full maps."""
    rng = np.random.default_rng(0)
    heads = rng.integers(0, 50_000, (400, prompt_tokens // 2), np.int32)
    rows = []
    for method in LoadBalanceMethod:
        policy = create_policy(method, 16, Balance())
        for index in range(replicas):
            policy.reset(index, MAP_TOKENS)
        seconds = []
        for turn in range(4000):
            tail = rng.integers(0, 50_000, prompt_tokens - prompt_tokens // 2, np.int32)
            tokens = np.concatenate((heads[turn // 8 % len(heads)], tail)).tobytes()
            candidates = [Candidate(index, int(load)) for index, load in enumerate(rng.integers(0, 20, replicas))]
            begin = time.perf_counter()
            index = policy.choose(tokens, None, candidates)
            policy.note_sent(index, tokens, None)
            if turn >= 2000:
                seconds.append(time.perf_counter() - begin)
        micro = np.array(seconds) * 1e6
        rows.append(
            {
                "method": method.value,
                "replicas": replicas,
                "prompt tokens": prompt_tokens,
                "map tokens": MAP_TOKENS,
                "mean us": float(micro.mean()),
                "p50 us": float(np.percentile(micro, 50)),
                "p99 us": float(np.percentile(micro, 99)),
            }
        )
    return rows


async def throughput(client: EngineClient, requests: list[GenerateInput], at_once: int) -> float:
    """Output tokens per second with this many requests in flight."""
    todo, tokens = iter(requests), 0

    async def work() -> None:
        nonlocal tokens
        for request in todo:
            async for output in client.generate(request):
                tokens += len(output.token_ids)

    begin = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(at_once)))
    return tokens / (time.perf_counter() - begin)


def make_requests(count: int, prompt: int, output: int, vocab: int) -> list[GenerateInput]:
    rng = np.random.default_rng(0)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=output, ignore_eos=True)
    return [GenerateInput(prompt=rng.integers(1, vocab, prompt).tolist(), sampling=sampling) for _ in range(count)]


async def measure_sleeping(counts: list[int], seconds_per_step: float) -> list[dict[str, Any]]:
    config = EngineConfig(
        model_path=f"sleep:{seconds_per_step}",
        max_running_requests=ROWS,
        load_balance_method=LoadBalanceMethod.LEAST_LOADED,
    )
    rows: list[dict[str, Any]] = []
    for count in counts:

        def start(index: int) -> Any:
            return lambda: launch_sleeping_link(config, Placement(name=f"replica {index}", device=Device.CPU))

        replicas = [Replica(index, start(index)) for index in range(count)]
        await asyncio.gather(*(replica.start() for replica in replicas))
        client = replicated_client(config, replicas, load_tokenizer(config))
        requests = make_requests(8 * ROWS * count, 32, 64, 100)
        rate = await throughput(client, requests, 2 * ROWS * count)
        await client.close()
        rows.append({"replicas": count, "rows": ROWS, "ms per step": 1e3 * seconds_per_step, "tokens/s": rate})
        rows[-1]["of one"] = rate / rows[0]["tokens/s"]
    return rows


async def measure_model(model_path: str) -> list[dict[str, Any]]:
    # few programs, because three or more engines compile theirs
    config = EngineConfig(
        model_path=model_path,
        device=Device.CPU,
        max_running_requests=8,
        max_total_tokens=4096,
        chunked_prefill_size=64,
    )
    cores = sorted(os.sched_getaffinity(0))
    requests = make_requests(32, 48, 48, 10_000)
    rows: list[dict[str, Any]] = []
    for what, parts in (
        ("one engine, one core", [cores[:1]]),
        ("one engine, two cores", [cores[:2]]),
        ("two replicas, a core each", [cores[:1], cores[1:2]]),
    ):
        places = [
            Placement(name=f"replica {index}", device=Device.CPU, cores=tuple(part)) for index, part in enumerate(parts)
        ]

        async def launch(options: EngineConfig, placement: Placement, places: list[Placement] = places) -> Any:
            place = next(one for one in places if one.name == placement.name)
            return await launch_replica_link(options, place)

        replicas = await start_replicas(config, len(parts), launch)
        policy = create_policy(LoadBalanceMethod.LEAST_LOADED, config.page_size, Balance())
        client = AsyncEngineClient(Router(replicas, policy), load_text_tokenizer(config))
        await throughput(client, make_requests(8, 64, 8, 10_000), 8)
        rate = await throughput(client, requests, 16 * len(parts))
        await client.close()
        rows.append({"what": what, "tokens/s": rate, "of one core": rate / rows[0]["tokens/s"] if rows else 1.0})
    return rows


def main() -> None:
    """Runs the named benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="routing|sleep|model")
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--model-path", default="demo")
    parser.add_argument("--json", type=Path, help="folder for one JSON file of each part")
    arguments = parser.parse_args()
    parts = arguments.parts or ["routing", "sleep", "model"]
    for part in parts:
        file = None if arguments.json is None else arguments.json / f"replicas_{part}.json"
        match part:
            case "routing":
                rows = [
                    row for count, size in ((2, 1024), (8, 1024), (2, 100_000)) for row in measure_routing(count, size)
                ]
                report("Choosing a replica", rows, file)
            case "sleep":
                report(
                    "Replicas whose steps sleep",
                    asyncio.run(measure_sleeping([1, 2, 4], arguments.step_ms / 1e3)),
                    file,
                )
            case "model":
                report("Replicas on CPU cores", asyncio.run(measure_model(arguments.model_path)), file)
            case _:
                parser.error(f"there is no part {part!r}; choose among routing, sleep and model")


if __name__ == "__main__":
    main()
