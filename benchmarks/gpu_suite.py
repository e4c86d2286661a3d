"""Correctness and speed of the Torch backend's kernels and engine on a GPU, in one run of some minutes.

    PYTHONPATH=. python benchmarks/gpu_suite.py [--only SECTION ...] [--name NAME] [--output FILE]
    PYTHONPATH=. python benchmarks/gpu_suite.py --device cpu --small [--kernels triton]

Every section runs in a separate process, under a time limit: one that fails, hangs or runs out of memory is reported,
and the others still run. Tables are printed as they come and written, with the machine, to
benchmarks/results/gpu_NAME.json (for a dry run: only to --output). Exit status: 0; 1 if a section failed or a result
was wrong, whatever the speed; 2 without a GPU.

`--small` is a dry run on tiny shapes: its times mean nothing. `--device cpu` runs the native implementations, or with
`--kernels triton` the kernels in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from machine import describe, format_table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the suite: `run` of the module `gpu.<module>` yields its tables."""

    module: str
    seconds: int
    what: str


SECTIONS = {
    "check-operations": Section("check_operations", 90, "fused operations are right"),
    "check-products": Section("check_products", 120, "products with 8 bits are right"),
    "check-groups": Section("check_groups", 120, "products with matrices and experts in groups are right"),
    "check-experts": Section("check_experts", 90, "layers with experts are right"),
    "check-sampling": Section("check_sampling", 60, "sampled tokens are right"),
    "check-attention": Section("check_attention", 240, "attention is right"),
    "decode": Section("decode_speed", 120, "decode attention against copy bandwidth"),
    "extend": Section("extend_speed", 120, "extend attention against matrix products"),
    "operations": Section("operations_speed", 60, "fused operations against copy bandwidth"),
    "products": Section("products_speed", 120, "products with 8 bits against those of bfloat16"),
    "experts": Section("experts_speed", 120, "layers with experts against copy bandwidth and torch's grouped product"),
    "sampling": Section("sampling_speed", 60, "sampling over 128k tokens"),
    "engine": Section("engine_speed", 300, "an 8B model through the engine"),
    "eager": Section("eager_speed", 240, "the same without CUDA graphs"),
}


@dataclass(slots=True)
class Outcome:
    """The results of a section before it ended or failed. Tables are `{"title", "rows"}`."""

    section: str
    seconds: float = 0.0
    error: str | None = None
    device: dict[str, Any] = field(default_factory=dict)
    tables: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether it ended early, or one of its results was wrong."""
        return self.error is not None or self.wrong() > 0

    def wrong(self) -> int:
        """Checks that did not hold."""
        return sum(row.get("ok") is False for table in self.tables for row in table["rows"])

    def write(self, file: Path) -> None:
        """Written atomically: the process may be killed at any time."""
        new = file.with_suffix(".new")
        new.write_text(json.dumps(asdict(self)))
        new.replace(file)


def main() -> None:
    arguments = _parse()
    if arguments.part is not None:
        run_section(arguments.only[0], arguments.part, arguments)
        return
    if arguments.device == "cuda" and not _has_gpu():
        print("No CUDA GPU that torch can use, so nothing was measured. A dry run: --device cpu --small")
        raise SystemExit(2)
    start = time.perf_counter()
    outcomes = []
    for name in arguments.only:
        print(f"\n== {name}: {SECTIONS[name].what}", flush=True)
        outcome = run_apart(name, arguments)
        outcomes.append(outcome)
        if outcome.error is not None:
            print(f"{name} FAILED after {outcome.seconds:.0f} s: {outcome.error}")
        write_results(outcomes, arguments)
    print_summary(outcomes, time.perf_counter() - start)
    raise SystemExit(int(any(outcome.failed for outcome in outcomes)))


def run_apart(name: str, arguments: argparse.Namespace) -> Outcome:
    """Runs a section in a separate process with this one's output."""
    with tempfile.TemporaryDirectory(prefix="gpu-suite-") as folder:
        part = Path(folder) / "part.json"
        command = [sys.executable, __file__, "--only", name, "--part", str(part), "--device", arguments.device]
        command += ["--kernels", arguments.kernels, *(["--small"] if arguments.small else [])]
        start = time.perf_counter()
        error = None
        limit = arguments.time_limit or SECTIONS[name].seconds
        try:
            status = subprocess.run(command, timeout=limit).returncode
            if status:
                error = f"its process ended with status {status}; see above"
        except subprocess.TimeoutExpired:
            error = f"it took longer than {limit} s and was ended"
        outcome = Outcome(**json.loads(part.read_text())) if part.exists() else Outcome(name)
        outcome.seconds = round(time.perf_counter() - start, 1)
        outcome.error = outcome.error or error
        return outcome


def run_section(name: str, part: Path, arguments: argparse.Namespace) -> None:
    """The process of one section: writes its results after every table."""
    if arguments.kernels == "triton" and arguments.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read once, when Triton is imported
    import torch
    from gpu.bench import Bench, describe_device

    section = SECTIONS[name]
    device = torch.device(arguments.device)
    outcome = Outcome(name, device=describe_device(device))
    outcome.write(part)
    try:
        bench = Bench(device, small=arguments.small, kernels_name=arguments.kernels)
        with torch.inference_mode():
            for table in importlib.import_module(f"gpu.{section.module}").run(bench):
                print(f"\n{table.title}\n{format_table(table.rows)}", flush=True)
                outcome.tables.append(asdict(table))
                outcome.write(part)
    except ModuleNotFoundError as error:
        outcome.error = f"it needs the Python package {error.name!r}, which is not installed"
        outcome.write(part)
        raise
    except Exception as error:  # after any failure the other sections must run; the traceback follows
        outcome.error = f"{type(error).__name__}: {error}".splitlines()[0]
        outcome.write(part)
        raise


def write_results(outcomes: Sequence[Outcome], arguments: argparse.Namespace) -> None:
    """Writes all results so far, so that an interrupted run keeps them."""
    device = next((outcome.device for outcome in outcomes if outcome.device), {})
    file = arguments.output
    if file is None and not arguments.small and arguments.device == "cuda":
        name = arguments.name or re.sub(r"\W+", "_", str(device.get("device", "unknown"))).strip("_").lower()
        RESULTS.mkdir(exist_ok=True)
        file = RESULTS / f"gpu_{name}.json"
    if file is None:
        return
    settings = {"device": arguments.device, "kernels": arguments.kernels, "small": arguments.small}
    found = {
        "title": "GPU suite",
        "machine": describe() | device,
        "settings": settings,
        "sections": [asdict(outcome) for outcome in outcomes],
    }
    file.write_text(json.dumps(found, indent=1) + "\n")


def print_summary(outcomes: Sequence[Outcome], seconds: float) -> None:
    """One line for each section, and the missed targets."""
    rows = []
    for outcome in outcomes:
        lines = [row for table in outcome.tables for row in table["rows"]]
        met = [row[key] for row in lines for key in ("met", "gap met") if key in row]
        rows.append(
            {
                "section": outcome.section,
                "seconds": outcome.seconds,
                "lines": len(lines),
                "wrong": outcome.wrong(),
                "targets met": f"{sum(met)} of {len(met)}" if met else "",
                "error": outcome.error or "",
            }
        )
    print(f"\nSummary; {seconds:.0f} s\n{format_table(rows)}")
    digests = [_digests(outcomes, name) for name in ("engine", "eager")]
    common = digests[0].keys() & digests[1].keys()
    if common:
        agree = all(digests[0][batch] == digests[1][batch] for batch in common)
        print(f"Tokens with and without CUDA graphs (batches {sorted(common)}): {'equal' if agree else 'DIFFERENT'}")


def _digests(outcomes: Sequence[Outcome], section: str) -> dict[int, str]:
    tables = [table for outcome in outcomes if outcome.section == section for table in outcome.tables]
    rows = [row for table in tables for row in table["rows"] if "tokens digest" in row]
    return {row["batch"]: row["tokens digest"] for row in rows}


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--kernels", choices=["auto", "triton", "native"], default="auto", help="auto: triton on a GPU")
    parser.add_argument("--small", action="store_true", help="tiny shapes: a dry run")
    parser.add_argument("--name", help="of the file of results; default: the GPU's")
    parser.add_argument("--output", type=Path, help="file of results, wherever it may be")
    parser.add_argument("--time-limit", type=int, metavar="SECONDS", help="of each section; default: its own")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not arguments.small:
        parser.error("--device cpu needs --small: it is for dry runs alone")
    if arguments.kernels == "auto":
        arguments.kernels = "triton" if arguments.device == "cuda" else "native"
    return arguments


if __name__ == "__main__":
    main()
