"""The TPU compiler's figures for top-k and top-p: as XLA's operations, and as one kernel.

    python benchmarks/tpu_sampler_estimate.py [--chips v5e v6e] [--vocab-size 128256] [--lines 16 64] [--json FILE]

Needs libtpu and no TPU: `pip install --no-deps --target FOLDER libtpu` and PYTHONPATH=FOLDER. Lines are those of one
device: of 64 rows each of four devices has 16. Microseconds of one filter, without waiting for memory:

- `XLA`: cycles that the compiler expects of a bisection over the bits of a distance, which is 31 passes.
- `kernel`: bundles of the loops of the kernel, each as often as it runs, at one a cycle. Eight lines are in vector
  memory meanwhile; `spills`: stores of vector registers that ran out, in the loop over columns.
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
from tpu_kernels.schedule import DUMP_FLAGS, Loop, read_schedule

from tpu.operations import Module

TOPOLOGIES = {"v5e": "v5e:1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:2x2x1"}
PASSES = 31


def kernel_cycles(whole: Loop, programs: int, columns: int) -> tuple[int, int, int]:
    """Bundles of top-k, of top-p, and spills in their inner loops.

    The kernel has loops over columns within one over passes: first those of top-k, then what weighs the tokens, which
    has no loop around it, then those of top-p.
    """
    (grid,) = whole.loops
    ranks, weigh, masses = grid.loops

    def passes(loop: Loop) -> int:
        (inner,) = loop.loops
        return PASSES * (len(loop.bundles) + columns * len(inner.bundles))

    rank = programs * passes(ranks)
    mass = programs * (columns * len(weigh.bundles) + passes(masses))
    return rank, mass, sum(loop.vector_spills for outer in (ranks, masses) for loop in outer.loops)


def compile_all(chip: str, vocab_size: int, counts: list[int], folder: Path) -> list[dict[str, Any]]:
    """Rows of the table for one chip, in a separate process: libtpu reads its flags once."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.experimental.pallas import tpu as pltpu
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from sglang_jax.jax_runner.filters import distance_of_mass, distance_of_rank
    from sglang_jax.kernels.kept_distance_pallas import COLUMNS, LINES, UNROLLED, kept_distance

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    mesh = Mesh(np.array(topology.devices[:1]), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())

    def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    def cycles(function: Any, *arguments: Any) -> int:
        text = jax.jit(function).lower(*arguments).compile().as_text() or ""
        return sum(operation.total for operation in Module(text).operations())

    rows = []
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        info = pltpu.get_tpu_info()
        per_microsecond = info.bf16_ops_per_second / (524_288 if info.generation >= 6 else 131_072) / 1e6
        for lines in counts:
            distances, ranks, shares = array(lines, vocab_size), array(lines, dtype=jnp.int32), array(lines)
            flags = array(lines, dtype=jnp.bool_)
            by_rank = cycles(distance_of_rank, distances, ranks)
            by_mass = cycles(distance_of_mass, distances, shares, shares, shares)
            jax.jit(kept_distance).lower(distances, ranks, shares, flags, flags).compile()
            columns = -(-vocab_size // (COLUMNS * UNROLLED))
            rank, mass, spills = kernel_cycles(read_schedule(folder, "kept_distance"), -(-lines // LINES), columns)
            for name, before, now in (("top-k", by_rank, rank), ("top-p", by_mass, mass)):
                figures = {"XLA": f"{before / per_microsecond:.0f}", "kernel": f"{now / per_microsecond:.0f}"}
                rows.append({"chip": chip, "lines": lines, "filter": name, **figures, "spills": spills})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES))
    parser.add_argument("--vocab-size", type=int, default=128_256)
    parser.add_argument("--lines", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--dumped-to", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dumped_to is not None:
        print(json.dumps(compile_all(args.chips[0], args.vocab_size, args.lines, args.dumped_to)))
        return
    rows = [row for chip in args.chips for row in _in_own_process(chip, args.vocab_size, args.lines)]
    report("Filters of the sampler by the TPU compiler's account, microseconds", rows, args.json)


def _in_own_process(chip: str, vocab_size: int, lines: list[int]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        quiet = {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
        own = ["--chips", chip, "--vocab-size", str(vocab_size), "--lines", *map(str, lines), "--dumped-to", folder]
        done = subprocess.run(
            [sys.executable, __file__, *own],
            env={**os.environ, **quiet, "LIBTPU_INIT_ARGS": DUMP_FLAGS.format(folder=folder)},
            stdout=subprocess.PIPE,
            check=True,
        )
        return json.loads(done.stdout.decode().splitlines()[-1])


if __name__ == "__main__":
    main()
