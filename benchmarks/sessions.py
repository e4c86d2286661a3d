"""Concurrent sessions of many turns: the time of turns as conversations grow, and outputs equal to those of whole
prompts.

    python benchmarks/sessions.py [--model demo|hybrid] [--backend jax|torch] [--turns N] [--json FILE]

8 conversations at once, 150 turns of 8 tokens each, 4 output tokens; the `hybrid` model has Qwen3.5's structure with
random weights. `first tenth` and `last tenth` are mean milliseconds of a turn, without each conversation's first.
`last / first` should be at most 1.15 where the model's work does not grow by more; `model's last / first` is that of
the same conversations' steps run without the engine (`session_steps.py`). `last over the model's` is the time of a
turn of the last tenth over that of its steps in that run: it should be at most 1.15, and at most that of the first
tenth, or the engine makes turns slower as a conversation grows. `scheduler only`: the same two figures of scheduler
and cache without front end, wire and client. The second row sends whole prompts instead, whose prefixes are also
cached. `cached`: the share of the earlier tokens that a turn found in the cache, apart from less than a page. In
float32, since outputs are compared: fails if they differ, or if pages are left in use.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from hybrid_shared_prefix import write_model
from machine import report
from session_steps import measure_steps

from sglang_jax import Engine, SamplingParams
from sglang_jax.config import Backend, Device, Dtype, EngineConfig, LoadFormat

TALKS, TURNS, INPUT, OUTPUT = 8, 150, 8, 4
SAMPLING = SamplingParams(max_new_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
PAGE = 16


def hybrid_model(folder: Path) -> EngineConfig:
    write_model(folder, max_position_embeddings=4096)
    return EngineConfig(
        model_path=str(folder), load_format=LoadFormat.DUMMY, max_mamba_cache_size=64, max_total_tokens=65536
    )


def inputs_of(number: int, turns: int) -> list[list[int]]:
    """The tokens that each turn of a conversation adds."""
    inputs: list[list[int]] = np.random.default_rng(number).integers(3, 4096, (turns, INPUT)).tolist()
    return inputs


class Talk:
    """One conversation: of each turn the output, its time, and the cached share of the earlier tokens."""

    def __init__(self, engine: Engine, number: int, turns: int) -> None:
        self.outputs: list[list[int]] = []
        self.seconds: list[float] = []
        self.cached: list[float] = []
        self._engine = engine
        self._inputs = inputs_of(number, turns)

    def run(self, in_session: bool) -> None:
        if not in_session:
            return self._turns(lambda history, new: self._engine.generate([*history, *new], SAMPLING))
        with self._engine.open_session() as session:
            return self._turns(lambda history, new: session.generate(new, SAMPLING))

    def _turns(self, ask: Any) -> None:
        history: list[int] = []
        for new in self._inputs:
            start = time.perf_counter()
            output = ask(history, new)
            self.seconds.append(time.perf_counter() - start)
            self.outputs.append(output.output_ids)
            self.cached.append(output.cached_tokens / max(len(history) // PAGE * PAGE, 1))
            history += [*new, *output.output_ids]


def tenths(seconds: Any) -> tuple[float, float]:
    """Mean milliseconds of the first tenth of turns, except each conversation's first, and of the last; from seconds
    `[conversations, turns]`."""
    tenth = max(seconds.shape[1] // 10, 1)
    return float(seconds[:, 1 : 1 + tenth].mean() * 1e3), float(seconds[:, -tenth:].mean() * 1e3)


def add_model(row: dict[str, Any], config: EngineConfig, turns: int, *, in_session: bool) -> None:
    """Adds the model's share of the row's figures."""
    inputs = [inputs_of(number, turns) for number in range(TALKS)]
    taken = measure_steps(config, inputs, SAMPLING, in_session=in_session)
    (first, last), (first_alone, last_alone) = tenths(taken.seconds), tenths(taken.model_seconds)
    row |= {
        "model's first ms": first_alone,
        "model's last ms": last_alone,
        "model's last / first": last_alone / first_alone,
        "first over the model's": row["first tenth ms"] / first_alone,
        "last over the model's": row["last tenth ms"] / last_alone,
        "scheduler only": f"{first / first_alone:.2f}, {last / last_alone:.2f}",
        "steps of a turn": float(taken.steps[:, -max(turns // 10, 1) :].mean()),
    }


def measure(engine: Engine, turns: int, *, in_session: bool) -> tuple[dict[str, Any], list[list[list[int]]]]:
    """One row of the table, and all outputs."""
    engine.flush_cache()
    talks = [Talk(engine, number, turns) for number in range(TALKS)]
    with ThreadPoolExecutor(TALKS) as pool:
        list(pool.map(lambda talk: talk.run(in_session), talks))
    first, last = tenths(np.array([talk.seconds for talk in talks]))
    row = {
        "turns send": "what is new" if in_session else "the whole prompt",
        "first tenth ms": first,
        "last tenth ms": last,
        "last / first": last / first,
        "cached": float(np.mean([talk.cached[4:] for talk in talks])),
    }
    return row, [talk.outputs for talk in talks]


def run(config: EngineConfig, turns: int) -> list[dict[str, Any]]:
    rows, outputs = [], []
    with Engine(config=config) as engine:
        for in_session in (True, False):
            Talk(engine, 99, 2).run(in_session)
            row, given = measure(engine, turns, in_session=in_session)
            rows.append({"model": Path(config.model_path).name, "backend": config.backend.value, **row})
            outputs.append(given)
        while engine.state()["num_running"]:
            time.sleep(0.01)
        state = engine.state()
    for in_session, row in zip((True, False), rows, strict=True):
        add_model(row, config, turns, in_session=in_session)
    assert outputs[0] == outputs[1], "turns of sessions give other outputs than whole prompts"
    assert (state["num_used_tokens"], state["num_memory_faults"]) == (0, 0), state
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("demo", "hybrid"), default="demo")
    parser.add_argument("--backend", type=Backend, default=Backend.TORCH)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(model_path="demo") if arguments.model == "demo" else hybrid_model(Path(folder))
        options = {
            "backend": arguments.backend,
            "device": Device.CPU,
            "page_size": PAGE,
            "max_running_requests": TALKS,
            "dtype": Dtype.FLOAT32,
        }
        config = config.model_copy(update={**options, "context_length": 4096})
        rows = run(config, arguments.turns)
    report(f"{TALKS} conversations of {arguments.turns} turns", rows, arguments.json)


if __name__ == "__main__":
    main()
