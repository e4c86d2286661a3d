"""A hybrid model with prompts that share prefixes: requests per second and time to the first token with and without the
prefix cache, and the cached tokens.

    python benchmarks/hybrid_shared_prefix.py [--backend jax|torch] [--page-size N] [--shapes short long] [--json FILE]

The model has Qwen3.5's structure (gated delta nets, every fourth layer attention) and random weights. Two loads:

- `short`: 8 groups of 16 prompts with 1,000 shared tokens and 40 different ones each, 16 output tokens, all submitted
  at once with the groups interleaved.
- `long`: 50 groups of 10 prompts with 10,240 shared tokens and 256 different ones, 128 output tokens, in random order,
  5 at a time. `--scale 0.1` is a tenth of the groups and of all lengths.

Each load also has prompts without shared prefixes: there the cache should cost less than 2 %. Runs with and without the
cache alternate. A row has the figures of the quickest of `--turns`; `times off` compares it with the run without the
cache, and `by processor` compares the least processor times, which other programs disturb less. Every prompt except the
first of its group could hit the whole pages of the shared tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from machine import report
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sglang_jax import Engine, SamplingParams
from sglang_jax.config import Backend, EngineConfig, LoadFormat

VOCABULARY = 4096
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 16_384,
    "dtype": "float32",
}


def write_model(folder: Path, **fields: Any) -> None:
    """Writes the config, with other values for `fields`, and a tokenizer of bytes; the weights are random."""
    (folder / "config.json").write_text(json.dumps({**MODEL, **fields}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(f"{folder}/tokenizer.json")


@dataclass(frozen=True)
class Shape:
    """A load: `groups` of `sharers` prompts with `common` shared tokens and `tail` others, of which `at_once` run."""

    name: str
    groups: int
    sharers: int
    common: int
    tail: int
    output: int
    at_once: int
    shuffled: bool

    @property
    def requests(self) -> int:
        return self.groups * self.sharers

    @property
    def tokens(self) -> int:
        """Of one request."""
        return self.common + self.tail + self.output

    def pool_tokens(self, page_size: int) -> int:
        """Tokens of a pool that keeps all groups and their requests while `at_once` run."""
        kept = self.groups * self.common + self.requests * (self.tail + self.output + 2 * page_size)
        return kept + self.at_once * (self.tokens + 2 * page_size)

    def scaled(self, scale: float) -> Shape:
        def part(size: int) -> int:
            return max(1, round(size * scale))

        return replace(
            self,
            groups=part(self.groups),
            common=part(self.common),
            tail=part(self.tail),
            output=part(self.output),
        )

    def prompts(self, *, shared: bool) -> list[list[int]]:
        """Without sharing, no two prompts share a prefix."""
        random = np.random.default_rng(7)
        common = random.integers(3, VOCABULARY, (self.groups if shared else self.requests, self.common)).tolist()
        tails = random.integers(3, VOCABULARY, (self.requests, self.tail)).tolist()
        prompts = [[*common[k % len(common)], *tail] for k, tail in enumerate(tails)]
        return [prompts[k] for k in random.permutation(self.requests)] if self.shuffled else prompts


SHAPES = (
    Shape("short", 8, 16, 1000, 40, 16, 8 * 16, shuffled=False),
    Shape("long", 50, 10, 10_240, 256, 128, 5, shuffled=True),
)


@dataclass(frozen=True)
class Run:
    """`seconds`, `processor`: of all requests, by the clock and of the processor; `first_token`: median seconds from a
    request to its first token; `cached`: mean prompt tokens found in the cache."""

    seconds: float
    processor: float
    first_token: float
    cached: float


def start(folder: Path, backend: Backend, page_size: int, shape: Shape, *, cache: bool) -> Engine:
    config = EngineConfig(
        model_path=str(folder),
        backend=backend,
        device="cpu",
        load_format=LoadFormat.DUMMY,
        page_size=page_size,
        context_length=max(2048, shape.tokens),
        disable_radix_cache=not cache,
        max_running_requests=min(32, shape.at_once),
        max_mamba_cache_size=max(96, 4 * shape.groups),
        max_total_tokens=shape.pool_tokens(page_size),
    )
    return Engine(config=config)


async def run(engine: Engine, shape: Shape, prompts: list[list[int]]) -> Run:
    """Sends the prompts in order, each as soon as fewer than `at_once` run."""
    sampling = SamplingParams(max_new_tokens=shape.output, temperature=0.0, ignore_eos=True)
    waits: list[float] = []
    cached: list[int] = []
    todo: Iterator[list[int]] = iter(prompts)

    async def work() -> None:
        for prompt in todo:
            asked, waiting = time.perf_counter(), True
            async for output in engine.async_generate(prompt, sampling, stream=True):
                if waiting:
                    waits.append(time.perf_counter() - asked)
                    cached.append(output.cached_tokens)
                    waiting = False

    begin, processor = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(shape.at_once)))
    spent = time.process_time() - processor
    return Run(time.perf_counter() - begin, spent, statistics.median(waits), statistics.mean(cached))


def measure(
    folder: Path, backend: Backend, page_size: int, shape: Shape, turns: int, *, shared: bool
) -> list[dict[str, Any]]:
    """Two rows of the table: with the cache, and without."""
    prompts = shape.prompts(shared=shared)
    with (
        start(folder, backend, page_size, shape, cache=True) as cached,
        start(folder, backend, page_size, shape, cache=False) as plain,
    ):
        runs: dict[bool, list[Run]] = {True: [], False: []}
        for engine in (cached, plain):
            engine.generate(prompts[:1], SamplingParams(max_new_tokens=shape.output, temperature=0.0))
        for _ in range(turns):
            for cache, engine in ((True, cached), (False, plain)):
                engine.flush_cache()
                runs[cache].append(asyncio.run(run(engine, shape, prompts)))
    processor = {cache: min(one.processor for one in each) for cache, each in runs.items()}
    best = {cache: min(each, key=lambda one: one.seconds) for cache, each in runs.items()}
    cacheable = (1 - 1 / shape.sharers) * (shape.common // page_size * page_size)
    return [
        {
            "backend": backend.value,
            "page size": page_size,
            "load": shape.name,
            "prompts begin": "alike" if shared else "differently",
            "cache": "on" if cache else "off",
            "requests/s": shape.requests / one.seconds,
            "times off": best[False].seconds / one.seconds,
            "by processor": processor[False] / processor[cache],
            "tokens/s": shape.requests * shape.tokens / one.seconds,
            "median TTFT ms": one.first_token * 1e3,
            "cached of what could be": one.cached / cacheable if shared else 0.0,
        }
        for cache, one in best.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", type=Backend, default=Backend.TORCH)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--shapes", nargs="+", choices=[shape.name for shape in SHAPES], default=["short"])
    parser.add_argument("--scale", type=float, default=1.0, help="of the groups and lengths of the long load")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        rows = []
        for shape in SHAPES:
            if shape.name in arguments.shapes:
                load = shape if shape.name == "short" else shape.scaled(arguments.scale)
                for shared in (True, False):
                    rows += measure(
                        Path(folder), arguments.backend, arguments.page_size, load, arguments.turns, shared=shared
                    )
    report("A hybrid model with the prefix cache and without", rows, arguments.json)


if __name__ == "__main__":
    main()
