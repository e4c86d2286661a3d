"""Estimate of the experts of one layer on a TPU without one, next to the least time.

    python benchmarks/tpu_expert_estimate.py [--layer MODEL:CHIP:EP:TOKENS ...] [--json FILE]

Needs libtpu and no TPU (`pip install --no-deps --target FOLDER libtpu` and PYTHONPATH=FOLDER). The products of the
experts of one device (`multiply_experts`) are compiled, for whole experts on each of EP devices, and the schedule of
both kernels is read. Tokens choose experts at random, with a fixed seed. Thousands of cycles:

- `gate_up`, `down`: of each kernel: for every expert the bundles of its tiles, or the copy of its matrices at the
  memory's speed, where that is longer; and the copies of tokens and of their sums, with the loops over these.
- `around`: the compiler's estimate of everything else; it has none for sorts, and none for copies of single numbers
  that it leaves to the SparseCores.
- `least`: matrices of the chosen experts, tokens and float32 sums at the memory's speed, or the products at the peak
  of the matrix units.
- `share`: the least of the sum.

CHIP may be a slice of EP devices (`qwen3-30b-a3b:v6e-8:8:64`). Then there is also the all-reduce after the experts:

- `sent`: kB that each device sends, in a ring and in float32, as compiled: `sglang-jax check` counts the result, which
  is bfloat16.
- `links`: thousands of cycles that this takes at least, by the bandwidth of the slice's links.
- `exposed`: `links` as a share of `gate_up`, `down`, `around` and `links`: nothing else runs meanwhile (docs/tpu.md).
- `by_rows`: kB that each device would send if tokens were divided among the devices: in an all-to-all, a row for each
  choice to the expert's device, and its output back, in bfloat16. Attention would have to be divided in the same way,
  and is not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from machine import report
from tpu_kernels.schedule import DUMP_FLAGS, Loop, read_schedule

from sglang_jax.architectures.kinds.experts import ExpertsConfig
from tpu.hlo import Collective
from tpu.shapes import load_shape
from tpu.topologies import Topology, parse_topology

TOPOLOGIES = {"v5e": "v5e:1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:2x2x1"}
LAYERS = tuple(
    f"{model}:{chip}:{devices}:{tokens}"
    for model, devices in (("qwen3-30b-a3b", 4), ("qwen3-235b-a22b", 32))
    for chip in ("v6e", "tpu7x")
    for tokens in (8, 64, 256, 2048)
)


@dataclass(frozen=True)
class Layer:
    """`own` experts of each of `devices` devices, with activations of `hidden` numbers. `slice_`: their links, if
    known."""

    config: ExpertsConfig
    hidden: int
    chip: str
    devices: int
    tokens: int
    slice_: Topology | None = None

    @staticmethod
    def parse(text: str) -> Layer:
        """Reads MODEL:CHIP:EP:TOKENS. Raises `ValueError` for a slice of another number of devices, and `ConfigError`
        for an unknown one."""
        model, *of_slice, devices, tokens = text.split(":")
        chip = ":".join(of_slice)
        slice_ = None if chip in TOPOLOGIES else parse_topology(chip)
        if slice_ is not None:
            chip = slice_.chip.generation.value
            if slice_.devices != int(devices):
                raise ValueError(f"{text}: {slice_} has {slice_.devices} devices, not {devices}")
        config = load_shape(model)
        experts = next(each.feed_forward for each in config.layers if isinstance(each.feed_forward, ExpertsConfig))
        return Layer(experts, config.hidden_size, chip, int(devices), int(tokens), slice_)

    @property
    def own(self) -> int:
        return self.config.num_experts // self.devices

    @property
    def matrix_bytes(self) -> int:
        return 2 * self.config.size * self.hidden

    def rows_of_experts(self, at_once: int) -> np.ndarray:
        """Rows of each own expert for each part of a step, `[parts, own]`, of tokens that choose at random."""
        random, experts = np.random.default_rng(0), self.config.num_experts
        chosen = np.array([random.choice(experts, self.config.chosen, replace=False) for _ in range(self.tokens)])
        parts = (chosen[first : first + at_once].reshape(-1) for first in range(0, self.tokens, at_once))
        return np.array([np.bincount(part, minlength=experts)[: self.own] for part in parts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", nargs="+", default=LAYERS)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--here", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here is not None:
        print(json.dumps(compiled(Layer.parse(args.layer[0]), args.here)))
        return
    report("Experts of a layer by the TPU compiler's schedule", [row(text) for text in args.layer], args.json)


def row(text: str) -> dict[str, Any]:
    """A row of the table."""
    layer = Layer.parse(text)
    found = compiled_in_child(text)
    chip = parse_topology(TOPOLOGIES[layer.chip]).chip
    bandwidth, flops = (each / chip.devices for each in (chip.hbm_bandwidth, chip.bf16_flops))
    rows = layer.rows_of_experts(found["tokens"])
    tiles = -(-rows // found["rows"])
    cycles = {
        name: sum(programs * max(count * kernel["bundles"] / programs, (count > 0) * copied) for count in tiles.flat)
        for name, matrices in (("gate_up", 2), ("down", 1))
        for kernel in [found[name]]
        for programs in [kernel["programs"]]
        for copied in [matrices * layer.matrix_bytes / programs / bandwidth * chip.clock]
    }
    inputs, sums = (each * layer.tokens * layer.hidden / bandwidth * chip.clock for each in (2, 4))
    cycles["gate_up"] += max(inputs, len(tiles) * found["gate_up"]["once"])
    cycles["down"] += sums + len(tiles) * found["down"]["once"]
    read = 3 * layer.matrix_bytes * int((rows.sum(0) > 0).sum()) / bandwidth * chip.clock + inputs + sums
    computed = 2 * 3 * layer.config.size * layer.hidden * int(rows.sum()) / flops * chip.clock
    least, total = max(read, computed), sum(cycles.values()) + found["around"]
    return {
        "layer": text,
        "gate_up": cycles["gate_up"] / 1e3,
        "down": cycles["down"] / 1e3,
        "around": found["around"] / 1e3,
        "least": least / 1e3,
        "share": least / total,
        **({} if layer.slice_ is None else exchange(layer, layer.slice_, total)),
    }


def exchange(layer: Layer, slice_: Topology, cycles: float) -> dict[str, float]:
    """Columns about the exchange after experts that take `cycles`."""
    numbers = layer.tokens * layer.hidden
    sent = _sent("all-reduce", 4 * numbers, layer.devices)
    links = sent / slice_.exchange_bandwidth(slice_.shape) * slice_.chip.clock
    return {
        "sent": sent / 1e3,
        "links": links / 1e3,
        "exposed": links / (cycles + links),
        "by_rows": 2 * _sent("all-to-all", 2 * numbers * layer.config.chosen / layer.devices, layer.devices) / 1e3,
    }


def _sent(kind: str, result: float, devices: int) -> float:
    """Bytes that each of `devices` devices sends in one collective, whose result has `result` bytes on each."""
    return Collective(kind, "", True, False, count=1, bytes=int(result), largest="").sent(devices)


def compiled_in_child(text: str) -> dict[str, Any]:
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
        own = ["--layer", text, "--here", folder]
        done = subprocess.run(
            [sys.executable, __file__, *own], env=os.environ | environment, stdout=subprocess.PIPE, check=True
        )
    found: dict[str, Any] = json.loads(done.stdout.decode().splitlines()[-1])
    return found


def compiled(layer: Layer, folder: Path) -> dict[str, Any]:
    """Rows of a tile, bundles and programs of each kernel, and cycles of everything else."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    from sglang_jax.kernels.experts import ExpertChoice, ExpertProducts, ExpertWeights, multiply_experts
    from tpu.hlo import take_text
    from tpu.operations import Module

    device = topologies.get_topology_desc(TOPOLOGIES[layer.chip], "tpu").devices[0]
    mesh = jax.sharding.Mesh([device], ("x",))

    def array(shape: Sequence[int], dtype: str) -> jax.ShapeDtypeStruct:
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=whole)

    config, tokens = layer.config, layer.tokens
    matrices = array((layer.own, config.size, layer.hidden), "bfloat16")
    choices = (tokens, config.chosen)

    def products(x: jax.Array, weights: ExpertWeights, choice: ExpertChoice) -> jax.Array:
        gate = lambda gates, ups: jax.nn.silu(gates) * ups  # noqa: E731
        choice = choice.among(layer.own, jnp.int32(0))
        return multiply_experts(ExpertProducts.KERNELS, x, weights, choice, gate, experts=config.num_experts)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        weights = ExpertWeights(matrices, matrices, matrices)
        part = weights.part(tokens, config.chosen, config.num_experts)
        choice = ExpertChoice(array(choices, "int32"), array(choices, "float32"))
        jax.jit(products).lower(array((tokens, layer.hidden), "bfloat16"), weights, choice).compile()
    assert part is not None
    text = take_text(folder / "hlo")
    assert text is not None
    inner, outputs = -(-config.size // part.widths.inner), -(-layer.hidden // part.widths.outputs)
    blocks, groups, of_sums = (-(-part.tokens // count) for count in (128, 16, 8))
    return {
        "tokens": part.tokens,
        "rows": part.rows,
        "around": sum(each.total for each in Module(text).operations() if not each.conditional)
        + sum(len(loop.bundles) for loop in read_schedule(folder, "expert_tiles").walk()),
        # Tokens are copied and packed once; each program of outputs clears and writes their sums.
        "gate_up": kernel(folder, "expert_gate_up", part.rows, inner, [blocks, groups]),
        "down": kernel(folder, "expert_down_sum", part.rows, outputs, [outputs * of_sums] * 2),
    }


def kernel(folder: Path, name: str, rows: int, programs: int, once: list[int]) -> dict[str, int]:
    """Programs of an expert's tile; their bundles: of a step of the grid, and of the loop over its rows, as if all were
    filled; and those of the other loops, which have `once` steps. The compiler unrolls some of one step."""
    grid = max(read_schedule(folder, name).walk(), key=_products)
    loops = grid.walk()[1:]
    over_rows = max(loops, key=lambda loop: loop.count("= sld"))
    others = [loop for loop in loops if loop is not over_rows]
    assert len(others) <= len(once), f"{name} has {len(others)} loops besides that over rows, not {len(once)}"
    return {
        "programs": programs,
        "bundles": programs * (len(grid.bundles) + len(over_rows.bundles) * rows // 8),
        "once": sum(
            len(loop.bundles) * count for loop, count in zip(others, once[len(once) - len(others) :], strict=True)
        ),
    }


def _products(loop: Loop) -> int:
    return loop.products


if __name__ == "__main__":
    main()
