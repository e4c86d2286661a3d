"""The TPU compiler's figures for the attention kernels: bundles, spills, memory, next to JAX's shipped kernel.

    python benchmarks/tpu_kernel_estimate.py [--chips v6e tpu7x] [--models llama-8b qwen3-32b] [--pages 64 128]
        [--latency 0.4 0.6 1.0] [--rival FOLDER] [--json FILE]

Needs libtpu and no TPU: `pip install --no-deps --target FOLDER libtpu` and PYTHONPATH=FOLDER. Every kernel is compiled
for the chip and its final schedule is read (`tpu_kernels.schedule`). `--rival`: the folder of the package tpu-inference
(`pip install --no-deps --target FOLDER tpu-inference`), whose third ragged kernel, with the blocks of its table, is
compiled in the same run (`tpu_kernels.compiles`). Columns:

- `loop`, `per_key_head`, `spills`: see `tpu_kernels.kernel_costs.Cost`, which also lists what it excludes.
- `compute_us`: `cycles` by the clock that the chip's peak of products implies.
- `bytes_us`: `keys_read` by the bandwidth of the chip's memory. Where `compute_us` is below it, copies overlap with
  computing and the step is expected to take slightly more than the time of the bytes.
- `of_memory_L`: of decode rows, the share of the memory's speed that they reach where blocks wait for copies whose
  first byte takes L microseconds (`--latency`): see `tpu_kernels.kernel_costs.decode_with_copies`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import report
from tpu_kernels.schedule import DUMP_FLAGS

TOPOLOGIES = {"v5e": "v5e:1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:2x2x1"}
HEADS = {
    "llama-8b": (32, 8),
    "qwen3-32b": (64, 8),
    "llama-8b tp4": (8, 2),
    "qwen3-32b tp4": (16, 2),
    "llama-8b tp8": (4, 1),
    "qwen3-32b tp8": (8, 1),
}
"""Query and kv heads of one device. Those of Qwen3-8B are Llama-3.1-8B's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=TOPOLOGIES, default=["v6e", "tpu7x"])
    parser.add_argument("--models", nargs="+", choices=HEADS, default=["llama-8b", "qwen3-32b"])
    parser.add_argument("--pages", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--latency", nargs="+", type=float, default=[0.6])
    parser.add_argument("--rival", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--dumped-to", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dumped_to is not None:
        from tpu_kernels.compiles import Kernels  # here, in a separate process, as libtpu reads its flags once

        heads, kv_heads = HEADS[args.models[0]]
        topology = TOPOLOGIES[args.chips[0]]
        kernels = Kernels.on(topology, heads, kv_heads, args.pages[0], args.dumped_to, args.rival, args.latency)
        place = {"chip": args.chips[0], "model": args.models[0], "page": args.pages[0]}
        print(json.dumps([{**place, **row} for row in kernels.rows()]))
        return
    rows = []
    for chip in args.chips:
        for model in args.models:
            for page_size in args.pages:
                rows += _in_own_process(chip, model, page_size, args.rival, args.latency)
                print(f"{chip}, {model}, pages of {page_size}: done", file=sys.stderr)
    report("Attention kernels by the TPU compiler's schedule", rows, args.json)


def _in_own_process(
    chip: str, model: str, page_size: int, rival: Path | None, latencies: list[float]
) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        quiet = {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
        own = ["--chips", chip, "--models", model, "--pages", str(page_size), "--dumped-to", folder]
        own += ["--latency", *map(str, latencies)]
        own += [] if rival is None else ["--rival", str(rival)]
        done = subprocess.run(
            [sys.executable, __file__, *own],
            env={
                **os.environ,
                **quiet,
                "LIBTPU_INIT_ARGS": DUMP_FLAGS.format(folder=folder),
                "XLA_FLAGS": f"--xla_dump_to={folder}/hlo --xla_dump_hlo_as_text",
            },
            stdout=subprocess.PIPE,
            check=True,
        )
        return json.loads(done.stdout.decode().splitlines()[-1])


if __name__ == "__main__":
    main()
