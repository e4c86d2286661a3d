"""What the TPU compiler says of the attention kernels: bundles, spills, memory, beside JAX's shipped kernel.

    python benchmarks/tpu_kernel_estimate.py [--chips v6e tpu7x] [--models llama-8b qwen3-32b] [--pages 64 128]
        [--rival FOLDER] [--json FILE]

Needs libtpu and no TPU: `pip install --no-deps --target FOLDER libtpu` and PYTHONPATH=FOLDER. Every kernel is compiled
for the chip and its final schedule is read (`tpu.schedule`). `--rival`: where the package tpu-inference lies
(`pip install --no-deps --target FOLDER tpu-inference`), whose third ragged kernel, in the blocks that its own table
says, is compiled in the same run for steps of decode rows alone. Columns:

- `loop`, `per_key_head`, `spills`: see `tpu.kernel_costs.Cost`, which also says what such an estimate leaves out.
- `compute_us`: `cycles` by the clock that the chip's peak of products implies.
- `bytes_us`: `keys_read` by the bandwidth of the chip's memory. Where `compute_us` is below it, copies run beside
  computing and the step is expected to take the time of the bytes and a little.
- `copies_us`: of decode rows, where blocks wait for copies whose first byte takes `LATENCY`: see
  `tpu.kernel_costs.decode_with_copies`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import types
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from machine import report

from tpu.hlo import take_text
from tpu.kernel_costs import (
    DECODE_KERNEL,
    LATENCY,
    PREFILL_KERNEL,
    Cost,
    Step,
    decode_cost,
    decode_with_copies,
    issue,
    loops_with_products,
    prefill_cost,
)
from tpu.schedule import DUMP_FLAGS, Loop, read_schedule

TOPOLOGIES = {"v5e": "v5e:1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:2x2x1"}
HEADS = {"llama-8b": (32, 8), "qwen3-32b": (64, 8), "llama-8b tp8": (4, 1), "qwen3-32b tp8": (8, 1)}
HEAD_DIM = 128
SHIPPED_KEYS, SHIPPED_QUERY_HEADS = 1024, 32 * 32
"""The shipped kernel's blocks, as its own table has them for v5e and v6e, 32 heads, and contexts of 1024 tokens, the
longest that it holds: 32 queries. It has none for 64 heads, which get half the queries. Without an entry it takes 128
pages, which takes minutes to compile, as do 32 queries of 64 heads."""
QUICK = (8, 128, 8, 128)
"""Blocks of the rival's kernel for prompts."""
COLUMNS = 4096
"""Tokens that a row's part of the page table has room for."""

CASES = (
    Step("64 rows x 1k", (1,) * 64, (1024,) * 64),
    Step("64 rows x 4k", (1,) * 64, (4096,) * 64),
    Step("256 rows x 1k", (1,) * 256, (1024,) * 256),
    Step("1 chunk of 2048", (2048,), (2048,)),
    Step("4 chunks of 512 on 2k", (512,) * 4, (2560,) * 4),
    Step("64 rows x 1k, a chunk of 1984", (1,) * 64 + (1984,), (1024,) * 64 + (1984,)),
)


@dataclass(frozen=True)
class Chip:
    """`clock` in cycles and `bandwidth` in bytes, both per microsecond."""

    clock: float
    bandwidth: float


def shipped(schedule: Loop, step: Step, heads: int, queries: int, pages: int, page_size: int) -> Cost:
    """Each block of queries goes through all keys of each sequence in it."""
    block_loop = max(loops_with_products(schedule), key=lambda loop: loop.products)
    keys = pages * page_size
    loop = len(block_loop.bundles) + issue(block_loop, pages)
    blocks = place = 0
    for count, kv_len in zip(step.query_lens, step.kv_lens, strict=True):
        touched = (place + count - 1) // queries - place // queries + 1
        blocks += touched * -(-kv_len // keys)
        place += count
    served = 1 if step.decode_rows == step.tokens else queries
    return Cost(loop, 1000 * loop / (keys * heads * served), block_loop.vector_spills, blocks * loop, 0)


@dataclass(frozen=True)
class Rival:
    """tpu-inference's kernel: `fetched` keys of a row's block, `computed` keys of one turn of its inner loop."""

    name: str
    fetched: int
    computed: int

    def cost(self, schedule: Loop, step: Step, heads: int) -> Cost:
        """Of decode rows: a loop over rows, in it one over blocks, in it one over what is computed at once. What a row
        takes beside its blocks is left out, as most of it is in branches of which few are taken."""
        (inner,) = loops_with_products(schedule)
        block_loop = next(loop for loop in schedule.walk() if inner in loop.loops)
        loop = len(block_loop.bundles) + self.fetched // self.computed * len(inner.bundles)
        cycles = sum(-(-length // self.fetched) * loop for length in step.kv_lens)
        per_key_head = 1000 * loop / (self.fetched * heads)
        return Cost(loop, per_key_head, inner.vector_spills, cycles, sum(step.kv_lens))


def load_rival(folder: Path, generation: int) -> Any:
    """The module of the rival's kernel, without the packages around it, which import what serves there. It asks which
    chip the machine has, and is told the one that is compiled for."""
    for name in ("tpu_inference", "tpu_inference.kernels"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = package
    module = importlib.import_module("tpu_inference.kernels.ragged_paged_attention.v3.kernel")
    module.get_tpu_version = lambda: generation
    return module


def compile_all(
    chip_name: str, model: str, page_size: int, folder: Path, rival_folder: Path | None
) -> list[dict[str, Any]]:
    """Rows of the table for one chip, model and page size, in a process of its own: libtpu reads its flags once."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention as shipped_attention
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from sglang_jax.kernels.ragged_paged_attention import AttentionOptions
    from sglang_jax.kernels.ragged_paged_attention.pallas import blocks, pallas_attention
    from sglang_jax.kernels.ragged_paged_attention.pallas.decode import depth_of
    from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import VMEM_LIMITS, Shape, current_chip
    from sglang_jax.layers.batch import ForwardBatch

    heads, kv_heads = HEADS[model]
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip_name])
    mesh = Mesh(np.array(topology.devices[:1]), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())

    def array(shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    def run(function: Any, *args: Any) -> str:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            jax.jit(function).lower(*args).compile()
        return take_text(folder / "hlo") or ""

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        info = pltpu.get_tpu_info()
        products_per_cycle = 524_288 if info.generation >= 6 else 131_072
        chip = Chip(info.bf16_ops_per_second / products_per_cycle / 1e6, info.mem_bw_bytes_per_second / 1e6)
        shape = Shape.of(current_chip(), heads, kv_heads, HEAD_DIM, page_size, "bfloat16")
        rival = None if rival_folder is None else load_rival(rival_folder, info.generation)
    columns = COLUMNS // page_size
    bytes_per_key = shape.bytes_per_key
    rows = []
    for case in CASES:
        sequences = max(case.decode_rows, 8)
        tokens = max(case.tokens, sequences)
        queries = array((tokens, heads, HEAD_DIM), jnp.bfloat16)
        starts, table = array((sequences + 1,)), array((sequences, columns))
        kv_lens, tokens_shape = array((sequences,)), array((tokens,))
        batch = ForwardBatch(tokens_shape, tokens_shape, tokens_shape, table, kv_lens, starts, array(()))
        kv_pages = array((1024, kv_heads, 2, page_size, HEAD_DIM), jnp.bfloat16)
        text = run(
            lambda q, p, b: pallas_attention(q, p, b, scale=HEAD_DIM**-0.5, options=AttentionOptions()),
            queries,
            kv_pages,
            batch,
        )
        parts, sizes = [], []
        waiting: dict[str, float] = {}
        if case.decode_rows:
            sized = blocks.decode_blocks(shape, sequences, columns)
            schedule = read_schedule(folder, DECODE_KERNEL)
            parts.append(decode_cost(schedule, case, heads, sized.pages, page_size))
            keys = sized.pages * page_size
            sizes.append(f"1x{keys}")
            transfer = bytes_per_key / chip.bandwidth * chip.clock
            latency = LATENCY * 1e6 * chip.clock
            depth = depth_of(keys * bytes_per_key)
            cycles = decode_with_copies(parts[0], transfer=transfer, latency=latency, depth=depth)
            waiting = {"copies_us": cycles / chip.clock}
        if case.tokens > case.decode_rows:
            wide = blocks.prefill_blocks(shape, tokens, columns)
            schedule = read_schedule(folder, PREFILL_KERNEL)
            parts.append(prefill_cost(schedule, case, heads, wide.queries, wide.pages, page_size))
            sizes.append(f"{wide.queries}x{wide.pages * page_size}")
        bytes_us = sum(part.keys_read for part in parts) * bytes_per_key / chip.bandwidth
        ours = _row(parts, sizes, text, chip)

        pages, width = SHIPPED_KEYS // page_size, min(SHIPPED_QUERY_HEADS // heads, 32)
        text = run(
            lambda q, p, lens, table, starts, count, pages=pages, width=width: shipped_attention(
                q,
                p,
                lens,
                table,
                starts,
                count,
                sm_scale=HEAD_DIM**-0.5,
                num_kv_pages_per_block=pages,
                num_queries_per_block=width,
                vmem_limit_bytes=VMEM_LIMITS[shape.chip],
            ),
            queries,
            array((1024, page_size, 2 * kv_heads, HEAD_DIM), jnp.bfloat16),
            kv_lens,
            table,
            starts,
            array((1,)),
        )
        part = shipped(read_schedule(folder, "ragged_paged_attention_kernel"), case, heads, width, pages, page_size)
        theirs = _row([part], [f"{width}x{pages * page_size}"], text, chip)
        place = {"chip": chip_name, "model": model, "page": page_size, "case": case.name}
        rows.append({**place, "kernel": "ours", **ours, "bytes_us": bytes_us, **waiting})
        rows.append({**place, "kernel": "shipped", **theirs, "bytes_us": bytes_us})
        if rival is None or case.tokens > case.decode_rows:
            continue
        sizes_of = (jnp.bfloat16, jnp.bfloat16, heads, kv_heads, HEAD_DIM, page_size, tokens, sequences, columns)
        chosen = rival.get_default_block_sizes(*sizes_of, case=rival.RpaCase.DECODE)
        kernel = Rival("RPAd", chosen["bkv_sz"], chosen["bkv_csz"])
        fresh = array((tokens, kv_heads, HEAD_DIM), jnp.bfloat16)
        text = run(
            # Its kernel for prompts, which finds nothing to do, in blocks that compile quickly.
            partial(rival.ragged_paged_attention, vmem_limit_bytes=VMEM_LIMITS[shape.chip], m_block_sizes=QUICK),
            queries,
            fresh,
            fresh,
            array(rival.get_kv_cache_shape(1024, page_size, kv_heads, HEAD_DIM, jnp.bfloat16), jnp.bfloat16),
            kv_lens,
            array((sequences * columns,)),
            starts,
            array((3,)),
        )
        part = kernel.cost(read_schedule(folder, kernel.name), case, heads)
        best = _row([part], [f"1x{kernel.fetched}"], text, chip)
        rows.append({**place, "kernel": "tpu-inference", **best, "bytes_us": bytes_us})
    return rows


def _row(parts: list[Cost], sizes: list[str], text: str, chip: Chip) -> dict[str, Any]:
    return {
        "blocks": " + ".join(sizes),
        "vmem_mib": max(_scoped_memory(text)) / (1 << 20),
        "loop": " + ".join(f"{part.loop:.0f}" for part in parts),
        "per_key_head": " + ".join(f"{part.per_key_head:.2f}" for part in parts),
        "spills": " + ".join(str(part.spills) for part in parts),
        "compute_us": sum(part.cycles for part in parts) / chip.clock,
    }


def _scoped_memory(text: str) -> list[int]:
    """Bytes of VMEM that each custom call of a compiled module says it uses."""
    mark = '"used_scoped_memory_configs":[{'
    found = []
    for piece in text.split(mark)[1:]:
        entry = json.loads("{" + piece.split("}")[0] + "}")
        found.append(int(entry["size"]))
    return found or [0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", choices=TOPOLOGIES, default=["v6e", "tpu7x"])
    parser.add_argument("--models", nargs="+", choices=HEADS, default=["llama-8b", "qwen3-32b"])
    parser.add_argument("--pages", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--rival", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--dumped-to", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dumped_to is not None:
        print(json.dumps(compile_all(args.chips[0], args.models[0], args.pages[0], args.dumped_to, args.rival)))
        return
    rows = []
    for chip in args.chips:
        for model in args.models:
            for page_size in args.pages:
                rows += _in_own_process(chip, model, page_size, args.rival)
                print(f"{chip}, {model}, pages of {page_size}: done", file=sys.stderr)
    report("Attention kernels by the TPU compiler's schedule", rows, args.json)


def _in_own_process(chip: str, model: str, page_size: int, rival: Path | None) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        quiet = {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
        own = ["--chips", chip, "--models", model, "--pages", str(page_size), "--dumped-to", folder]
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
