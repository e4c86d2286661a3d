"""What `--deterministic` costs with the embedded model on a CPU.

    python benchmarks/deterministic.py [--json FILE] [--backend torch jax] [--dtype float32 bfloat16] [--level batch]
        [--keep-gguf-blocks] [--repeats N]

Two engines, with and without the option, are in this process and alternate, each first in every other turn. "batch"
rows: output tokens per second of that number of requests at once (prompts and outputs of `decode_cpu.py`); "prompt"
rows: tokens per second of one prompt of 512 tokens that nothing is cached of. "share" is the median over the turns of
the option's rate over the other one; "share by CPU time" the same per second of processor time, which a busy machine
changes less (give OMP_NUM_THREADS=1 there).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from decode_engine import OUTPUT, measure_engine
from machine import report

from sglang_jax import Engine, SamplingParams

PROMPT = 512


def turns(
    engines: tuple[Engine, Engine], work: Callable[[Engine, int], float], repeats: int
) -> Iterator[list[tuple[float, float]]]:
    """The rates of both engines in each turn, by the clock and by processor time, after a turn that does not count."""
    for run in range(repeats + 1):
        found: list[tuple[float, float]] = [(0.0, 0.0)] * 2
        for number in (0, 1) if run % 2 else (1, 0):
            begin, processor = time.perf_counter(), time.process_time()
            tokens = work(engines[number], run)
            found[number] = (
                tokens / (time.perf_counter() - begin),
                tokens / (time.process_time() - processor),
            )
        if run:
            yield found


def decode(batch: int) -> Callable[[Engine, int], float]:
    def work(engine: Engine, run: int) -> float:
        measure_engine(engine, batch, run)
        return batch * OUTPUT

    return work


def read_prompt(engine: Engine, run: int) -> float:
    tokens = [100 + (7 * place + 31 * run) % 40_000 for place in range(PROMPT)]
    engine.generate(tokens, SamplingParams(max_new_tokens=1))
    return PROMPT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--backend", nargs="+", default=["torch", "jax"])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--level", choices=["batch", "tp"], default="batch", help="of --deterministic")
    parser.add_argument("--keep-gguf-blocks", action="store_true", help="in both engines, in bfloat16")
    parser.add_argument("--repeats", type=int, default=4, help="turns that count")
    arguments = parser.parse_args()
    rows = []
    for backend in arguments.backend:
        for dtype in arguments.dtype:
            common = {"model_path": "demo", "backend": backend, "device": "cpu", "dtype": dtype}
            common |= {"context_length": 1024, "debug_memory": False, "keep_gguf_blocks": arguments.keep_gguf_blocks}
            common["cpu_activations"] = "exact"
            with Engine(**common) as plain, Engine(**common, deterministic=arguments.level) as fixed:
                works = {f"batch {batch}": decode(batch) for batch in arguments.batch} | {"prompt": read_prompt}
                for name, work in works.items():
                    found = list(turns((plain, fixed), work, arguments.repeats))
                    rows.append(
                        {
                            "backend": backend,
                            "dtype": dtype,
                            "work": name,
                            "tok/s": statistics.median(theirs[0] for theirs, _ in found),
                            "deterministic tok/s": statistics.median(ours[0] for _, ours in found),
                            "share": statistics.median(ours[0] / theirs[0] for theirs, ours in found),
                            "share by CPU time": statistics.median(ours[1] / theirs[1] for theirs, ours in found),
                        }
                    )
    report(f"The demo with and without --deterministic {arguments.level}", rows, arguments.json)


if __name__ == "__main__":
    main()
