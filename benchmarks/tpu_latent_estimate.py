"""The TPU compiler's figures for attention over latent vectors: bundles, spills, and shares of the memory's speed.

    python benchmarks/tpu_latent_estimate.py [--chips v5e v6e tpu7x] [--heads 16 128] [--storage bfloat16]
        [--latent 512] [--rotary 64] [--page-size 64] [--rival FOLDER] [--json FILE]

Needs libtpu and no TPU, as `tpu_kernel_estimate`. Decode rows: `loop` bundles of a block of keys, of which memory takes
`bytes` cycles; `of_memory`: the share of the memory's speed that 64 rows of 4,096 and of 1,536 tokens reach, with
copies that take 0.6 us to start. Prompts, on v6e only: microseconds of a prompt of
2,048 tokens, and of its multiply-adds at the chip's peak. Blocks are those that a server would choose. `--rival`: the
folder of the package tpu-inference (`pip install --no-deps --target FOLDER tpu-inference`), whose kernel for decode
rows over latent vectors is compiled with blocks of as many keys: `rival_loop` without its branches, `rival_spills`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from machine import report
from tpu_kernels.schedule import DUMP_FLAGS

from tpu import worker
from tpu.figures import Refusal
from tpu.topologies import CHIPS, Generation, Topology

_SMALLEST_REGION = 64
"""Bundles of a part of the rival's loop that is taken for its products; branches around copies have fewer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chips = [Generation.V5E.value, Generation.V6E.value, Generation.TPU7X.value]
    parser.add_argument("--chips", nargs="+", choices=chips, default=chips)
    parser.add_argument("--heads", nargs="+", type=int, default=[16, 32, 64, 128])
    parser.add_argument("--storage", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--latent", type=int, default=512)
    parser.add_argument("--rotary", type=int, default=64)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--rival", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    sizes = args.latent, args.rotary, args.page_size, args.storage, args.rival
    for chip in args.chips:
        for row in worker.run_in_child(estimate, Generation(chip), tuple(args.heads), *sizes):
            if isinstance(row, Refusal):
                sys.exit(row.reason)
            print(f"{chip}, {row['heads']} heads: done", file=sys.stderr)
            rows.append(row)
    report("Attention over latent vectors by the TPU compiler's schedule", rows, args.json)


def estimate(
    folder: Path,
    send: Callable[[dict[str, Any]], None],
    generation: Generation,
    heads: tuple[int, ...],
    latent: int,
    rotary: int,
    page_size: int,
    storage: str,
    rival_folder: Path | None,
) -> None:
    """The work of the child; see `tpu.worker.run_in_child`."""
    import os

    dumps = worker.prepare_compiler(folder)
    os.environ["LIBTPU_INIT_ARGS"] = DUMP_FLAGS.format(folder=dumps)
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from tpu_kernels.compiles import load_latent_rival
    from tpu_kernels.kernel_costs import Step, loops_with_products
    from tpu_kernels.schedule import read_schedule
    from tpu_kernels.tuning import KernelCall

    from sglang_jax.kernels.ragged_paged_attention.pallas.blocks import decode_blocks, prefill_blocks
    from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import VMEM_LIMITS, Chip, Shape
    from sglang_jax.kernels.ragged_paged_attention.pallas.table import Entry, Phase, Source

    chip = CHIPS[generation]
    topology = Topology(chip, chip.one_node[0])
    devices = topologies.get_topology_desc(str(topology), "tpu", **topology.configuration).devices
    mesh = Mesh(np.array(devices[:1]), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())

    def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    def call_of(shape: Shape, phase: Phase, rows: int, pages: int) -> KernelCall:
        call = KernelCall(Entry(shape, phase, rows, pages, Source.SCHEDULE), value_dim=latent)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            jax.jit(call.run).lower(*call.arguments(array, array, array)).compile()
        return call

    def rival_row(rival: Any, count: int, keys: int) -> dict[str, Any]:
        """One row at a time, as its kernel for any number of rows; batches of rows only pay for short ones."""
        rows, numbers = 64, jnp.dtype(storage)
        queries = [array((count, rows, latent), numbers), array((rows, count, rotary), numbers)]
        fresh = [array((rows, latent), numbers), array((rows, rotary), numbers)]
        lanes = -(-latent // 128) * 128 + -(-rotary // 128) * 128
        pages = array(rival.get_kv_cache_shape(1024, page_size, lanes, numbers), numbers)
        places = [array((size,), jnp.int32) for size in (rows, rows * 4096 // page_size, rows + 1, 3)]
        attend = partial(
            rival.mla_ragged_paged_attention,
            num_kv_pages_per_block=(keys // page_size, 2, 2),
            num_queries_per_block=(1, 4, 4),
            vmem_limit_bytes=VMEM_LIMITS[Chip(generation.value)],
        )
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            jax.jit(attend, donate_argnums=4).lower(*queries, *fresh, pages, *places).compile()
        (inner,) = loops_with_products(read_schedule(dumps, "MLA-d-"))
        # Branches copy pages, and write the step's own vectors: those with products are the work of each block.
        own = sum(len(region) for region in inner.regions() if len(region) >= _SMALLEST_REGION)
        return {"rival_loop": own, "rival_spills": inner.vector_spills}

    rival = None if rival_folder is None else load_latent_rival(rival_folder)
    for count in heads:
        lanes = -(-(latent + rotary) // 128) * 128
        shape = Shape(Chip(generation.value), count, 1, 1, lanes, page_size, storage)
        columns = 4096 // page_size
        few = decode_blocks(shape, 64, columns)
        call = call_of(shape, Phase.DECODE, few.rows, few.pages)
        row: dict[str, Any] = {"chip": generation.value, "heads": count, "keys": few.pages * page_size}
        transfer = shape.bytes_per_key / (chip.hbm_bandwidth / chip.devices) * chip.clock
        for length in (4096, 1536):
            cost = call.cost(dumps, Step("rows", (1,) * 64, (length,) * 64))
            share = cost.keys_read * transfer / call.cycles(cost, chip)
            row |= {"loop": round(cost.loop), "spills": cost.spills, f"of_memory_{length}": round(share, 2)}
        row["bytes"] = round(few.pages * page_size * transfer)
        if rival is not None:
            row |= rival_row(rival, count, few.pages * page_size)
        if generation is not Generation.V6E:
            send(row)
            continue
        wide = prefill_blocks(shape, 2048, columns)
        call = call_of(shape, Phase.PREFILL, wide.queries, wide.pages)
        prompt = call.cost(dumps, Step("a prompt", (2048,), (2048,)))
        products = count * 2048 * 2049 // 2 * (2 * latent + rotary)
        row |= {
            "prompt_queries": wide.queries,
            "prompt_us": round(prompt.cycles / chip.clock * 1e6),
            "peak_us": round(2 * products / (chip.bf16_flops / chip.devices) * 1e6),
        }
        send(row)


if __name__ == "__main__":
    main()
