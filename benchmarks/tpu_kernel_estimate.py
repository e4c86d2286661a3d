"""What the TPU compiler says of the attention kernels: bundles, spills, memory, beside JAX's shipped kernel.

    python benchmarks/tpu_kernel_estimate.py [--chips v6e tpu7x] [--models llama-8b qwen3-32b] [--pages 64 128]
        [--json FILE]

Needs libtpu and no TPU: `pip install --no-deps --target FOLDER libtpu` and PYTHONPATH=FOLDER. Every kernel is compiled
for the chip and its final schedule is read (`tpu_schedule.py`). Columns:

- `loop`: bundles of the loop over blocks of keys, for one block: its own, those of a pass over all heads, and those
  that start the copies of one block's pages.
- `per_key_head`: `loop` by keys of a block, query heads and, for chunks, queries that the block serves, in thousandths.
- `spills`: stores of vector registers that ran out, in that loop.
- `compute_us`: bundles of the whole step, each once for every time that the step's lengths call for it, at one bundle a
  cycle and the clock that the chip's peak of products implies.
- `bytes_us`: keys and values that the step must read once (decode rows: all their keys; chunks: theirs, once per block
  of queries), by the bandwidth of the chip's memory.

What such an estimate covers is the work of the instructions in their order. It knows nothing of waits: for memory, for
results that take longer than the schedule assumes, for the first block of a call, for other cores on the chip. Where
`compute_us` is below `bytes_us`, copies run beside computing and the step is expected to take the latter and a little.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import report
from tpu_schedule import DUMP_FLAGS, Loop, read_schedule

TOPOLOGIES = {"v5e": "v5e:1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:2x2x1"}
HEADS = {"llama-8b": (32, 8), "qwen3-32b": (64, 8), "llama-8b tp8": (4, 1), "qwen3-32b tp8": (8, 1)}
HEAD_DIM = 128
SHIPPED_KEYS, SHIPPED_QUERIES = 1024, 32
"""The shipped kernel's blocks, as its own table has them for v5e and v6e, 32 heads, and contexts of 1024 tokens, the
longest that it holds. Without an entry it takes 128 pages, which takes minutes to compile."""
COLUMNS = 4096
"""Tokens that a row's part of the page table has room for."""


@dataclass(frozen=True)
class Case:
    """`query_lens` of `kv_lens`; decode rows first."""

    name: str
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]

    @property
    def decode_rows(self) -> int:
        return sum(count == 1 for count in self.query_lens)

    @property
    def tokens(self) -> int:
        return sum(self.query_lens)


CASES = (
    Case("64 rows x 1k", (1,) * 64, (1024,) * 64),
    Case("64 rows x 4k", (1,) * 64, (4096,) * 64),
    Case("256 rows x 1k", (1,) * 256, (1024,) * 256),
    Case("1 chunk of 2048", (2048,), (2048,)),
    Case("4 chunks of 512 on 2k", (512,) * 4, (2560,) * 4),
    Case("64 rows x 1k, a chunk of 1984", (1,) * 64 + (1984,), (1024,) * 64 + (1984,)),
)


@dataclass(frozen=True)
class Chip:
    """`clock` in cycles and `bandwidth` in bytes, both per microsecond."""

    clock: float
    bandwidth: float


@dataclass(frozen=True)
class Part:
    """A kernel's part in a step."""

    loop: float
    per_key_head: float
    spills: int
    cycles: float
    keys_read: int


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _issue(block_loop: Loop, pages: int) -> float:
    """Bundles that start the copies of a block, by the loop that starts most at a time."""
    loops = [loop for loop in block_loop.walk()[1:] if loop.count("= dma.hbm_to_vmem")]
    if not loops:
        return 0.0  # They are started one by one, in the loop's own bundles.
    most = max(loops, key=lambda loop: loop.count("= dma.hbm_to_vmem"))
    return pages * len(most.bundles) / most.count("= dma.hbm_to_vmem")


def _with_products(schedule: Loop) -> list[Loop]:
    return [loop for loop in schedule.walk() if loop.depth and loop.products]


def our_decode(schedule: Loop, case: Case, heads: int, pages: int, page_size: int) -> Part:
    (block_loop,) = _with_products(schedule)
    keys = pages * page_size
    loop = len(block_loop.bundles) + _issue(block_loop, pages)
    lengths = case.kv_lens[: case.decode_rows]
    row_loop = next(loop for loop in schedule.walk() if block_loop in loop.loops)
    cycles = sum(len(row_loop.bundles) + _ceil(length, keys) * loop for length in lengths)
    return Part(loop, 1000 * loop / (keys * heads), block_loop.vector_spills, cycles, sum(lengths))


def our_prefill(schedule: Loop, case: Case, heads: int, queries: int, pages: int, page_size: int) -> Part:
    keys = pages * page_size
    block_loop = next(loop for loop in schedule.walk() if any(inner.products for inner in loop.loops))
    ways = [loop for loop in block_loop.loops if loop.products]  # whole blocks, and kinds of masked ones
    pairs = max(ways, key=lambda loop: len(loop.bundles))  # of heads, of the slowest kind
    loop = len(block_loop.bundles) / len(ways) + heads / 2 * len(pairs.bundles) + _issue(block_loop, pages)
    program = next(loop for loop in schedule.walk() if loop.depth == 1)
    edges = sum(len(inner.bundles) for inner in program.loops if not inner.count("dma") and not inner.loops)
    blocks = keys_read = 0
    for last_key in _spans(case, queries):
        blocks += _ceil(last_key, keys)
        keys_read += last_key
    programs = _ceil(case.tokens, queries)
    cycles = blocks * loop + programs * (len(program.bundles) + heads * edges)
    return Part(loop, 1000 * loop / (keys * heads * queries), pairs.vector_spills, cycles, keys_read)


def _spans(case: Case, queries: int) -> list[int]:
    """For each chunk in each block of queries, the last position (exclusive) of its queries."""
    spans = []
    place = case.decode_rows
    for count, kv_len in list(zip(case.query_lens, case.kv_lens, strict=True))[case.decode_rows :]:
        first = place
        while first < place + count:
            last = min((first // queries + 1) * queries, place + count)
            spans.append(kv_len - place - count + last)
            first = last
        place += count
    return spans


def shipped(schedule: Loop, case: Case, heads: int, queries: int, pages: int, page_size: int) -> Part:
    """Each block of queries goes through all keys of each sequence in it."""
    block_loop = max(_with_products(schedule), key=lambda loop: loop.products)
    keys = pages * page_size
    loop = len(block_loop.bundles) + _issue(block_loop, pages)
    blocks = place = 0
    for count, kv_len in zip(case.query_lens, case.kv_lens, strict=True):
        touched = (place + count - 1) // queries - place // queries + 1
        blocks += touched * _ceil(kv_len, keys)
        place += count
    served = 1 if case.decode_rows == case.tokens else queries
    return Part(loop, 1000 * loop / (keys * heads * served), block_loop.vector_spills, blocks * loop, 0)


def compile_all(chip_name: str, model: str, page_size: int, folder: Path) -> list[dict[str, Any]]:
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
    from sglang_jax.layers.batch import ForwardBatch

    heads, kv_heads = HEADS[model]
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip_name])
    mesh = Mesh(np.array(topology.devices[:1]), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())

    def array(shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    def run(function: Any, *args: Any) -> str:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.jit(function).lower(*args).compile().as_text()

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        info = pltpu.get_tpu_info()
        products_per_cycle = 524_288 if info.generation >= 6 else 131_072
        chip = Chip(info.bf16_ops_per_second / products_per_cycle / 1e6, info.mem_bw_bytes_per_second / 1e6)
        shape = blocks.Shape(blocks.current_chip(), heads, kv_heads, 2, HEAD_DIM, page_size, "bfloat16")
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
        if case.decode_rows:
            sized = blocks.decode_blocks(shape, sequences, columns)
            schedule = read_schedule(folder, "paged_attention_decode")
            parts.append(our_decode(schedule, case, heads, sized.pages, page_size))
            sizes.append(f"1x{sized.pages * page_size}")
        if case.tokens > case.decode_rows:
            wide = blocks.prefill_blocks(shape, tokens, columns)
            schedule = read_schedule(folder, "paged_attention_prefill")
            parts.append(our_prefill(schedule, case, heads, wide.queries, wide.pages, page_size))
            sizes.append(f"{wide.queries}x{wide.pages * page_size}")
        bytes_us = sum(part.keys_read for part in parts) * bytes_per_key / chip.bandwidth
        ours = _row(parts, sizes, text, chip)

        pages, width = SHIPPED_KEYS // page_size, SHIPPED_QUERIES
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
                vmem_limit_bytes=blocks.VMEM_LIMITS[shape.chip],
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
        rows.append({**place, "kernel": "ours", **ours, "bytes_us": bytes_us})
        rows.append({**place, "kernel": "shipped", **theirs, "bytes_us": bytes_us})
    return rows


def _row(parts: list[Part], sizes: list[str], text: str, chip: Chip) -> dict[str, Any]:
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
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--dumped-to", type=Path, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dumped_to is not None:
        print(json.dumps(compile_all(args.chips[0], args.models[0], args.pages[0], args.dumped_to)))
        return
    rows = []
    for chip in args.chips:
        for model in args.models:
            for page_size in args.pages:
                rows += _in_own_process(chip, model, page_size)
                print(f"{chip}, {model}, pages of {page_size}: done", file=sys.stderr)
    report("Attention kernels by the TPU compiler's schedule", rows, args.json)


def _in_own_process(chip: str, model: str, page_size: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        quiet = {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
        own = ["--chips", chip, "--models", model, "--pages", str(page_size), "--dumped-to", folder]
        done = subprocess.run(
            [sys.executable, __file__, *own],
            env={**os.environ, **quiet, "LIBTPU_INIT_ARGS": DUMP_FLAGS.format(folder=folder)},
            stdout=subprocess.PIPE,
            check=True,
        )
        return json.loads(done.stdout.decode().splitlines()[-1])


if __name__ == "__main__":
    main()
