"""Estimate of a whole decode step on a TPU without one, next to its minimum time.

    python benchmarks/tpu_step_estimate.py [--step MODEL:TOPOLOGY:TP:ROWS:CONTEXT ...] [--latency 0.6] [--json FILE]

Needs libtpu and no TPU (`pip install --no-deps --target FOLDER libtpu` and PYTHONPATH=FOLDER). A decode program of two
of the model's layers is compiled as `tpu.check` does. Microseconds of one layer:

- `layer`: the compiler's estimate of everything except Pallas kernels and exchanges.
- `attention`: bundles of the decode kernel, or the wait for its copies where that is longer
  (`tpu_kernels.kernel_costs.decode_with_copies`), each copy taking `--latency` microseconds to start.
- `kv_write`: `WRITE_BUNDLES` for each row.

Milliseconds of a step: `around` the layers, by the same estimate; `exchange`, the bytes that devices send over the
slice's links; `step`, all of it with the model's own number of layers; `least`, weights, keys and values at the speed
of the memory, and the exchange (`tpu.roofline`); `share`, the least of the step. `memory_alone`: the same share where
the exchange counts as no part of the least time, though it does of the step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from machine import report
from tpu_kernels.schedule import DUMP_FLAGS

from sglang_jax.architectures.parallelism import Parallelism
from sglang_jax.config import Device as Backend
from sglang_jax.config import EngineConfig
from tpu.choices import memory_fraction, weight_bytes
from tpu.figures import Deployment, ProgramFailure, ProgramFigures, Refusal, Request, Selection
from tpu.roofline import Device, Work, roofline
from tpu.shapes import load_shape
from tpu.topologies import Topology, parse_topology
from tpu.worker import compile_in_child

WRITE_BUNDLES = 60
"""Bundles per row of the kernel that writes keys and values: 46 with one kv head, 59 with eight (docs/tpu.md)."""

PAGE_SIZE = 64

STEPS = ("qwen3-32b:v6e-8:8:64:4096", "llama-3.1-8b:v6e-8:8:64:4096", "qwen3-8b:v6e-4:4:64:1536")


@dataclass(frozen=True)
class Wanted:
    """`rows` decode rows of `context` tokens each."""

    model: str
    topology: Topology
    tp: int
    rows: int
    context: int

    @staticmethod
    def parse(text: str) -> Wanted:
        model, *slice_, tp, rows, context = text.split(":")
        return Wanted(model, parse_topology(":".join(slice_)), int(tp), int(rows), int(context))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", nargs="+", default=STEPS)
    parser.add_argument("--latency", type=float, default=0.6)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--attention", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.attention is not None:
        folder = Path(args.attention)
        print(json.dumps(attention_here(Wanted.parse(args.step[0]), folder, args.latency)))
        return
    report("Decode steps by the TPU compiler's estimate", [row(text, args.latency) for text in args.step], args.json)


def row(text: str, latency: float) -> dict[str, Any]:
    """A row of the table."""
    wanted = Wanted.parse(text)
    chip, config = wanted.topology.chip, load_shape(wanted.model)
    deployment, program = compile_two_layers(wanted)
    if program.estimate is None:
        raise RuntimeError("the compiler gave no text to read the estimate in")
    clock = chip.clock / 1e6
    layer = program.estimate.layer_cycles / 2 / clock
    around = (program.estimate.cycles - program.estimate.layer_cycles) / clock
    attention = attention_in_child(text, latency)
    write = WRITE_BUNDLES * wanted.rows / clock
    share = wanted.topology.chips / deployment.devices
    least = roofline(
        config,
        Work.decode(wanted.rows, wanted.context),
        Device(chip.bf16_flops * share, chip.hbm_bandwidth * share, wanted.topology.exchange_bandwidth(deployment.box)),
        tp=wanted.tp,
        weight_bytes=weight_bytes(config, Parallelism(wanted.tp)),
        kv_bytes_per_token=deployment.page // deployment.page_size // 2 * config.num_layers,
    )
    step = config.num_layers * (layer + attention + write) + around + least.exchange * 1e6
    return {
        "step": text,
        "layer": layer,
        "attention": attention,
        "kv_write": write,
        "around": around / 1e3,
        "exchange": least.exchange * 1e3,
        "step_ms": step / 1e3,
        "least_ms": least.seconds * 1e3,
        "share": least.seconds * 1e6 / step,
        "memory_alone": max(least.memory, least.compute) * 1e6 / step,
    }


def compile_two_layers(wanted: Wanted) -> tuple[Deployment, ProgramFigures]:
    """The largest decode program of the model's first two layers."""
    options = EngineConfig(
        model_path=wanted.model,
        tp_size=wanted.tp,
        device=Backend.TPU,
        page_size=PAGE_SIZE,
        max_running_requests=wanted.rows,
        context_length=max(2 * wanted.context, 4096),
        mem_fraction_static=memory_fraction(wanted.topology.chip),
    )
    config = load_shape(wanted.model)
    request = Request(
        model=replace(config, layers=config.layers[:2]),
        options=options,
        topology=wanted.topology,
        selection=Selection.QUICK,
    )
    deployment = None
    for message in compile_in_child(request):
        match message:
            case Deployment():
                deployment = message
            case ProgramFigures() if deployment is not None:
                return deployment, message  # the decode step comes first
            case ProgramFailure(reason=reason) | Refusal(reason=reason):
                raise RuntimeError(reason)
    raise RuntimeError("the compiling process ended without a result")


def attention_in_child(text: str, latency: float) -> float:
    """Microseconds of a layer, measured in a process for which libtpu writes schedules."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "LIBTPU_INIT_ARGS": DUMP_FLAGS.format(folder=folder),
            "XLA_FLAGS": f"--xla_dump_to={folder}/hlo --xla_dump_hlo_as_text",
        }
        own = ["--step", text, "--latency", str(latency), "--attention", folder]
        done = subprocess.run(
            [sys.executable, __file__, *own], env=os.environ | environment, stdout=subprocess.PIPE, check=True
        )
    return float(json.loads(done.stdout.decode().splitlines()[-1]))


def attention_here(wanted: Wanted, folder: Path, latency: float) -> float:
    from tpu_kernel_estimate import TOPOLOGIES
    from tpu_kernels.compiles import Kernels  # here: libtpu reads its flags once
    from tpu_kernels.kernel_costs import Step

    mixer = load_shape(wanted.model).attention[0]
    heads, kv_heads = mixer.num_heads // wanted.tp, mixer.num_kv_heads // wanted.tp
    topology = TOPOLOGIES[wanted.topology.chip.generation.value]
    kernels = Kernels.on(topology, heads, kv_heads, PAGE_SIZE, folder, None, [latency])
    step = Step("rows", (1,) * wanted.rows, (wanted.context,) * wanted.rows)
    found = kernels.ours(step, kernels.arrays(step))
    return float(found["bytes_us"] / found[f"of_memory_{latency}"])


if __name__ == "__main__":
    main()
