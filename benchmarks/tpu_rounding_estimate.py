"""Products with 8-bit matrices on a TPU without one: with widened weights (W8A16), and with rounded rows (W8A8).

    python benchmarks/tpu_rounding_estimate.py [--chips v6e tpu7x] [--rows 512] [--matrices 4096x6144 ...] [--json FILE]

Needs libtpu and no TPU: `pip install --no-deps --target FOLDER libtpu` and PYTHONPATH=FOLDER. Matrices, inputs x
outputs, are by default those of Llama-3.1-8B. Each product is one program that reads rows of bfloat16 and writes such
rows; with W8A8 it rounds them first, as `layers.rounded_rows` does. Thousands of cycles:

- `W8A16`, `W8A8`: for each of the program's operations the largest of its bundles in the compiler's schedule, the
  cycles in which memory delivers and takes what it reads and writes, and for the product the multiply-adds at the
  chip's peak. On tpu7x, the bundles of a product are fewer than the cycles that its peak allows.
- `estimate`: the same by the compiler's own cost model.

Memory of programs may hold operands of one operation for the next; these count as no bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import report
from tpu_kernels.schedule import DUMP_FLAGS, read_schedule


@dataclass(frozen=True)
class Peaks:
    """Of one device, in a cycle: bytes of memory, multiply-adds of bfloat16 and of `values`, the type with the faster
    product of 8 bits. `vmem`: KiB that an operation may take, so that the compiler copies no weights there before the
    program."""

    topology: str
    values: str
    bytes: float
    wide: int
    narrow: int
    vmem: int


CHIPS = {
    "v6e": Peaks("v6e:1x1", "int8", 936, 262_144, 524_288, 120_000),
    "tpu7x": Peaks("tpu7x:2x2x1", "float8_e4m3fn", 1677, 262_144, 524_288, 60_000),
}
MATRICES = ("4096x6144", "4096x4096", "4096x28672", "14336x4096")

_OPERATION = re.compile(r"\s+(?:ROOT )?%([\w.-]+) = (\S+|\(.*?\)) [a-z][\w-]*\((.*?)\)")
_ARRAY = re.compile(r"([a-z]+)(\d+)\w*\[([\d,]*)\](\{[^}]*\})?")
_CYCLES, _BOUNDS = re.compile(r'"estimated_cycles":"(\d+)"'), re.compile(r'"iteration_bounds":\[([^]]*)\]')


def bytes_in_hbm(shape: str) -> int:
    """Bytes of the arrays of a result that are not in vector memory."""
    found = 0
    for _, bits, sizes, layout in _ARRAY.findall(shape):
        if "S(1)" not in layout:
            found += math.prod(int(size) for size in sizes.split(",") if size) * int(bits) // 8
    return found


def cycles_of(text: str, products: int, peak: int, chip: Peaks, folder: Path) -> tuple[float, int]:
    """Cycles of a program whose last operation is its product. `products`: its multiply-adds. And the cycles of the
    compiler's cost model."""
    (entry,) = re.findall(r"^ENTRY .*?^}", text, re.DOTALL | re.MULTILINE)
    results: dict[str, str] = {}
    found: list[float] = []
    estimate = 0
    for line in entry.splitlines():
        if (operation := _OPERATION.match(line)) is None:
            continue
        name, result, operands = operation.groups()
        results[name] = result
        if (cycles := _CYCLES.search(line)) is None:
            continue
        estimate += int(cycles[1])
        bounds = _BOUNDS.search(line)
        runs = math.prod(map(int, re.findall(r"\d+", bounds[1]))) if bounds else 1
        read = sum(bytes_in_hbm(results.get(each, "")) for each in re.findall(r"%([\w.-]+)", operands))
        whole = read_schedule(folder, name)
        inner = sum(len(loop.bundles) for loop in whole.walk()[1:])
        found.append(max(len(whole.bundles) + runs * inner, (read + bytes_in_hbm(result)) / chip.bytes))
    found[-1] = max(found[-1], products / peak)
    return sum(found), estimate


def compile_all(name: str, all_rows: list[int], matrices: list[str], folder: Path) -> list[dict[str, Any]]:
    """Rows of the table for one chip, in a separate process: libtpu reads its flags once."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from sglang_jax.architectures.axes import Axis
    from sglang_jax.checkpoint.encoding import Encoding, ValueType
    from sglang_jax.layers.matrix import ScaledMatrix

    chip = CHIPS[name]
    topology = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology)
    place = NamedSharding(Mesh(np.array(topology.devices[:1]), ("tensor",)), PartitionSpec())
    bfloat16 = jnp.dtype(jnp.bfloat16)

    def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def measure(rows: int, inputs: int, outputs: int, rounded: bool) -> tuple[float, int]:
        encoding, sizes = Encoding(ValueType(chip.values)), ([(Axis.HIDDEN, inputs)], [(Axis.VOCABULARY, outputs)])
        matrix = ScaledMatrix(encoding, *sizes, (), bfloat16, 0 if rounded else None)
        graph, state = nnx.split(matrix)
        shapes = jax.tree.map(lambda each: array(each.shape, each.dtype), state)
        for file in folder.iterdir():
            file.unlink()
        multiply = jax.jit(lambda state, x: nnx.merge(graph, state).multiply(x).astype(bfloat16))
        text = multiply.lower(shapes, array((rows, inputs), bfloat16)).compile().as_text() or ""
        return cycles_of(text, rows * inputs * outputs, chip.narrow if rounded else chip.wide, chip, folder)

    table = []
    for rows in all_rows:
        for matrix in matrices:
            inputs, outputs = map(int, matrix.split("x"))
            (widened, its), (narrow, own) = (measure(rows, inputs, outputs, each) for each in (False, True))
            cycles = {"W8A16": round(widened / 1000, 1), "W8A8": round(narrow / 1000, 1)}
            ratios = {"of W8A16": round(narrow / widened, 2), "estimate": round(own / its, 2)}
            table.append({"chip": name, "rows": rows, "matrix": matrix, **cycles, **ratios})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--matrices", nargs="+", default=list(MATRICES))
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--dumped-to", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dumped_to is not None:
        print(json.dumps(compile_all(args.chips[0], args.rows, args.matrices, args.dumped_to)))
        return
    rows = [row for chip in args.chips for row in _in_own_process(chip, args.rows, args.matrices)]
    report("Products with 8-bit matrices by the TPU compiler's account, thousands of cycles", rows, args.json)


def _in_own_process(chip: str, rows: list[int], matrices: list[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_tpu_scoped_vmem_limit_kib={CHIPS[chip].vmem} {DUMP_FLAGS.format(folder=folder)}"
        quiet = {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "LIBTPU_INIT_ARGS": flags,
        }
        own = ["--chips", chip, "--rows", *map(str, rows), "--matrices", *matrices, "--dumped-to", folder]
        done = subprocess.run(
            [sys.executable, __file__, *own], env=os.environ | quiet, stdout=subprocess.PIPE, check=True
        )
        found: list[dict[str, Any]] = json.loads(done.stdout.decode().splitlines()[-1])
        return found


if __name__ == "__main__":
    main()
