"""The TPU compiler's figures for the kernels of recurrent layers: bundles of a token and head, next to the bytes.

    python benchmarks/tpu_state_estimate.py [--chips v6e tpu7x] [--rival FILE] [--json FILE]

Needs libtpu and no TPU: `pip install --no-deps --target FOLDER libtpu` and PYTHONPATH=FOLDER. `--rival`: the file
`tpu_inference/kernels/gdn/v2/gdn_decode_kernel.py` of the package tpu-inference (`pip install --no-deps --target FOLDER
tpu-inference`), whose kernel for decode rows of gated delta nets is compiled in the same run. Columns:

- `bundles`: of the kernel's main loop, for one token and one head, at one bundle a cycle; of
  convolutions for one token with all channels, and of XLA's operations the cycles that the compiler expects.
- `bytes`: cycles in which memory delivers and takes the matrix of a head, and for chunks its queries, keys, values and
  outputs; of convolutions inputs and outputs of a token in float32, and of decode rows the kept inputs, twice.
  Copies overlap with computing: the larger of the two is the expected time.
- `spills`: stores of vector registers that ran out, in that loop.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import report
from tpu_kernels.schedule import DUMP_FLAGS, Loop, read_schedule

from tpu.operations import Module

TOPOLOGIES = {"v5e": "v5e:1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:2x2x1"}
ROWS, TOKENS, SLOTS = 64, 512, 80


@dataclass(frozen=True)
class Heads:
    """Heads of a layer. `groups`: of keys."""

    heads: int
    groups: int
    key_dim: int
    value_dim: int
    delta: bool
    channels: int
    """Of the convolution, whose width is 4."""

    @property
    def matrix_bytes(self) -> int:
        return 4 * self.key_dim * self.value_dim


MODELS = {"Qwen3-Next": Heads(32, 16, 128, 128, True, 8192), "Granite 4": Heads(128, 1, 128, 64, False, 8448)}


def bundles_in(loop: Loop) -> int:
    """Bundles of a loop and its inner loops, each once."""
    return sum(len(found.bundles) for found in loop.walk())


def _stores(loop: Loop) -> int:
    """Stores of vector registers in the loop's own bundles."""
    return loop.count("= vst [")


def largest(loops: list[Loop]) -> Loop:
    return max(loops, key=bundles_in)


def compile_all(chip_name: str, rival: Path | None, folder: Path) -> list[dict[str, Any]]:
    """Rows of the table for one chip, in a separate process: libtpu reads its flags once."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.experimental.pallas import tpu as pltpu
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from sglang_jax.kernels.causal_convolution import convolve_with_pool, tail_shape
    from sglang_jax.kernels.causal_convolution_pallas import TILE, convolve_in_place
    from sglang_jax.kernels.state_rows import StateRows
    from sglang_jax.kernels.state_scan import BLOCK, ScanInputs
    from sglang_jax.kernels.state_scan_pallas import heads_at_once, scan_in_place

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip_name])
    mesh = Mesh(np.array(topology.devices[:1]), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())

    def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    def rows_of(tokens: int) -> StateRows:
        numbers, of_tokens = array(ROWS, dtype=jnp.int32), array(tokens, dtype=jnp.int32)
        return StateRows(
            begin=numbers,
            fresh=array(ROWS, dtype=jnp.bool_),
            own=numbers,
            sequences=of_tokens,
            offsets=of_tokens,
            query_starts=array(ROWS + 1, dtype=jnp.int32),
            num_decode=array(dtype=jnp.int32),
            decode_only=tokens == ROWS,
        )

    def compile_convolution(heads: Heads, tokens: int, convolve: Any, *, tiled: bool) -> str:
        x, weight = array(tokens, heads.channels, dtype=jnp.bfloat16), array(heads.channels, 4, dtype=jnp.bfloat16)
        pool = array(SLOTS, *tail_shape(3, heads.channels, tiled=tiled), dtype=jnp.bfloat16)
        step = jax.jit(lambda x, weight, pool, rows: convolve(x, weight, None, pool, rows), donate_argnums=2)
        return step.lower(x, weight, pool, rows_of(tokens)).compile().as_text() or ""

    def convolution_rows(heads: Heads, place: dict[str, str], bytes_per_cycle: float) -> Iterator[dict[str, Any]]:
        for kernel, tokens in (("decode", ROWS), ("chunks", TOKENS)):
            text = compile_convolution(heads, tokens, convolve_with_pool, tiled=False)
            by_xla = sum(operation.total for operation in Module(text).operations()) / tokens
            compile_convolution(heads, tokens, convolve_in_place, tiled=True)
            if kernel == "decode":
                # a row is requested, computed, and awaited when it has left
                loops = sorted(read_schedule(folder, "convolution_rows").walk()[2:], key=bundles_in)[-3:]
                bundles = sum(map(bundles_in, loops))
            else:
                # a tile's tokens, some channels in each loop
                every = read_schedule(folder, "convolution_chunks").walk()
                loops = [loop for loop in every if not loop.loops and _stores(loop) >= TILE]
                bundles = sum(len(loop.bundles) for loop in loops) / TILE
            of_token = (8 + (12 if kernel == "decode" else 0)) * heads.channels / bytes_per_cycle
            spills = sum(loop.vector_spills for loop in loops)
            found = {"bundles": f"{bundles:.0f}", "bytes": f"{of_token:.0f}", "spills": spills}
            yield {**place, "kernel": f"convolution, {kernel}", **found}
            yield {**place, "kernel": f"convolution, {kernel}, XLA", **found, "bundles": f"{by_xla:.0f}", "spills": ""}

    def compile_step(heads: Heads, tokens: int) -> None:
        keys, decays = array(tokens, heads.groups, heads.key_dim), array(tokens, heads.heads)
        values = array(tokens, heads.heads, heads.value_dim)
        inputs = ScanInputs(keys, keys, values, decays, decays if heads.delta else None)
        pool = array(SLOTS, heads.heads, heads.key_dim, heads.value_dim)
        jax.jit(scan_in_place, donate_argnums=1).lower(inputs, pool, rows_of(tokens)).compile()

    rows = []
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        info = pltpu.get_tpu_info()
        products_per_cycle = 524_288 if info.generation >= 6 else 131_072
        bytes_per_cycle = info.mem_bw_bytes_per_second / (info.bf16_ops_per_second / products_per_cycle)
        for model, heads in MODELS.items():
            place = {"chip": chip_name, "model": model}
            compile_step(heads, ROWS)
            loop = largest(read_schedule(folder, "state_rows").loops)
            per_head = bundles_in(loop) / heads_at_once(heads.heads)
            of_matrix = 2 * heads.matrix_bytes / bytes_per_cycle
            rows.append({**place, "kernel": "decode", **_row(per_head, of_matrix, loop)})
            compile_step(heads, TOKENS)
            loop = max(read_schedule(folder, "state_chunks").walk(), key=lambda loop: loop.products)
            of_tokens = 4 * 2 * (heads.key_dim + heads.value_dim) / bytes_per_cycle
            rows.append({**place, "kernel": "chunks", **_row(len(loop.bundles) / BLOCK, of_tokens, loop)})
            rows.extend(convolution_rows(heads, place, bytes_per_cycle))
        if rival is not None:
            heads = MODELS["Qwen3-Next"]
            per_head, loop = _rival(rival, heads, array, folder)
            place = {"chip": chip_name, "model": "Qwen3-Next", "kernel": "decode, tpu-inference"}
            rows.append({**place, **_row(per_head, 2 * heads.matrix_bytes / bytes_per_cycle, loop)})
    return rows


def _row(per_head: float, byte_cycles: float, loop: Loop) -> dict[str, Any]:
    spills = sum(found.vector_spills for found in loop.walk())
    return {"bundles": f"{per_head:.1f}", "bytes": f"{byte_cycles:.1f}", "spills": spills}


def _rival(file: Path, heads: Heads, array: Any, folder: Path) -> tuple[float, Loop]:
    """Bundles per token and head of the other kernel, whose loop handles as many rows at once as its name says."""
    import jax
    import jax.numpy as jnp

    spec = importlib.util.spec_from_file_location("rival", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    keys, values = array(ROWS, heads.groups, heads.key_dim), array(ROWS, heads.heads, heads.value_dim)
    gates, rates = array(ROWS, heads.heads, heads.key_dim), array(ROWS, heads.heads, 128)
    pool = array(SLOTS, heads.heads, heads.key_dim, heads.value_dim)
    before = set(folder.glob("*final_bundles.txt"))

    def step(q: Any, k: Any, v: Any, g: Any, b: Any, state: Any, slots: Any, counts: Any) -> Any:
        return module.fused_decoding_gdn(
            q, k, v, initial_state=state, state_indices=slots, g=g, b=b, distribution=counts, scale=1.0
        )

    numbers, counts = array(ROWS, dtype=jnp.int32), array(3, dtype=jnp.int32)
    jax.jit(step, donate_argnums=5).lower(keys, keys, values, gates, rates, pool, numbers, counts).compile()
    found = [
        file
        for file in sorted(set(folder.glob("*final_bundles.txt")) - before)
        if "schedule-analysis" not in file.name and "gdn" in file.name
    ]
    name = found[-1].name.split("-", 1)[1].split("-final_bundles")[0]
    loop = largest(read_schedule(folder, name).loops)
    rows = int(name.split("bt_")[1].split("-")[0].split(".")[0])
    return bundles_in(loop) / (heads.heads * rows), loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=TOPOLOGIES, default=["v6e", "tpu7x"])
    parser.add_argument("--rival", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--dumped-to", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dumped_to is not None:
        print(json.dumps(compile_all(args.chips[0], args.rival, args.dumped_to)))
        return
    rows = [row for chip in args.chips for row in _in_own_process(chip, args.rival)]
    report("Kernels of recurrent layers by the TPU compiler's schedule", rows, args.json)


def _in_own_process(chip: str, rival: Path | None) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        quiet = {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
        own = ["--chips", chip, "--dumped-to", folder, *(["--rival", str(rival)] if rival else [])]
        done = subprocess.run(
            [sys.executable, __file__, *own],
            env={**os.environ, **quiet, "LIBTPU_INIT_ARGS": DUMP_FLAGS.format(folder=folder)},
            stdout=subprocess.PIPE,
            check=True,
        )
        return json.loads(done.stdout.decode().splitlines()[-1])


if __name__ == "__main__":
    main()
