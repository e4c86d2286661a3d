"""Compiles the attention kernels for a TPU without one, and estimates each step of decode rows and chunks.

See `tpu_kernel_estimate`. Imported in a process whose environment tells libtpu where to write schedules.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention as shipped_attention
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sglang_jax.kernels.ragged_paged_attention import AttentionOptions
from sglang_jax.kernels.ragged_paged_attention.pallas import blocks, pallas_attention
from sglang_jax.kernels.ragged_paged_attention.pallas.decode_sizes import sizes_of
from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import VMEM_LIMITS, Shape, current_chip
from sglang_jax.layers.batch import ForwardBatch
from tpu.hlo import take_text
from tpu_kernels.kernel_costs import (
    DECODE_KERNEL,
    PREFILL_KERNEL,
    Cost,
    Step,
    decode_cost,
    decode_with_copies,
    issue,
    loops_with_products,
    prefill_cost,
)
from tpu_kernels.schedule import Loop, read_schedule

HEAD_DIM = 128
PAGES = 1024
SHIPPED_KEYS, SHIPPED_QUERY_HEADS = 1024, 32 * 32
"""The shipped kernel's blocks, from its table for v5e and v6e, 32 heads, and contexts of 1024 tokens, the longest in
it: 32 queries. It has none for 64 heads, which get half the queries. Without an entry it takes 128 pages, which
takes minutes to compile, as do 32 queries of 64 heads."""
COLUMNS = 4096
"""Tokens that a row's part of the page table can hold."""

CASES = (
    Step("64 rows x 1k", (1,) * 64, (1024,) * 64),
    Step("64 rows x 4k", (1,) * 64, (4096,) * 64),
    Step("64 rows x 1.5k", (1,) * 64, (1536,) * 64),
    Step("256 rows x 1k", (1,) * 256, (1024,) * 256),
    Step("256 rows x 300", (1,) * 256, (300,) * 256),
    Step("1 chunk of 2048", (2048,), (2048,)),
    Step("4 chunks of 512 on 2k", (512,) * 4, (2560,) * 4),
    Step("64 rows x 1k, a chunk of 1984", (1,) * 64 + (1984,), (1024,) * 64 + (1984,)),
)


@dataclass(frozen=True)
class Chip:
    """`clock` in cycles and `bandwidth` in bytes, both per microsecond."""

    clock: float
    bandwidth: float


@dataclass(frozen=True)
class Arrays:
    """Shapes of a step's arguments. `queries` `[tokens, heads, HEAD_DIM]`, `starts` int32 `[sequences + 1]`, `table`
    int32 `[sequences, columns]`, `kv_lens` int32 `[sequences]`."""

    tokens: int
    sequences: int
    columns: int
    queries: Any
    starts: Any
    table: Any
    kv_lens: Any


@dataclass(frozen=True)
class Compiled:
    """The text of a module, and the schedules of its kernels by their names."""

    text: str
    schedules: dict[str, Loop]


@dataclass(frozen=True)
class Kernels:
    """The kernels for some heads of one device. `folder`: where libtpu writes schedules, and XLA its text. `rival`:
    the module of `load_rival`."""

    mesh: Mesh
    chip: Chip
    shape: Shape
    folder: Path
    rival: Any
    latencies: list[float]
    known: dict[tuple[str, ...], Compiled] = field(default_factory=dict)

    @staticmethod
    def on(
        topology: str,
        heads: int,
        kv_heads: int,
        page_size: int,
        folder: Path,
        rival_folder: Path | None,
        latencies: list[float],
    ) -> Kernels:
        """The kernels for a chip of a topology."""
        devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
        mesh = Mesh(np.array(devices[:1]), ("x",))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            info = pltpu.get_tpu_info()
            products_per_cycle = 524_288 if info.generation >= 6 else 131_072
            clock = info.bf16_ops_per_second / products_per_cycle / 1e6
            shape = Shape.of(current_chip(), heads, kv_heads, HEAD_DIM, page_size, "bfloat16")
            rival = None if rival_folder is None else load_rival(rival_folder, info.generation)
        return Kernels(mesh, Chip(clock, info.mem_bw_bytes_per_second / 1e6), shape, folder, rival, latencies)

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row of the table for each step and kernel."""
        for step in CASES:
            arrays = self.arrays(step)
            ours = self.ours(step, arrays)
            found = {"ours": ours, "shipped": self.shipped(step, arrays)}
            if self.rival is not None:
                found["tpu-inference"] = self.rivals(step, arrays)
            for kernel, row in found.items():
                yield {"case": step.name, "kernel": kernel, **row, "bytes_us": ours["bytes_us"]}

    def array(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        """An array on the one device."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, PartitionSpec()))

    def arrays(self, step: Step) -> Arrays:
        """The arrays of a step."""
        sequences = max(step.decode_rows, 8)
        tokens, columns = max(step.tokens, sequences), COLUMNS // self.shape.page_size
        return Arrays(
            tokens,
            sequences,
            columns,
            self.array((tokens, self.shape.heads, HEAD_DIM), jnp.bfloat16),
            self.array((sequences + 1,)),
            self.array((sequences, columns)),
            self.array((sequences,)),
        )

    def compiled(self, kernels: tuple[str, ...], function: Any, *args: Any) -> Compiled:
        """The text of the compiled module and its schedules; compiled once for steps of the same shapes."""
        key = (*kernels, *(str(leaf) for leaf in jax.tree.leaves(args)))
        if key not in self.known:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                jax.jit(function).lower(*args).compile()
            schedules = {kernel: read_schedule(self.folder, kernel) for kernel in kernels}
            self.known[key] = Compiled(take_text(self.folder / "hlo") or "", schedules)
        return self.known[key]

    def ours(self, step: Step, arrays: Arrays) -> dict[str, Any]:
        """This project's kernels."""
        shape, chip = self.shape, self.chip
        unused = self.array((arrays.tokens,))
        batch = ForwardBatch(unused, unused, unused, arrays.table, arrays.kv_lens, arrays.starts, self.array(()))
        kv_pages = self.array((PAGES, shape.kv_heads, 2, shape.page_size, HEAD_DIM), jnp.bfloat16)
        attention = partial(pallas_attention, scale=HEAD_DIM**-0.5, options=AttentionOptions())
        decodes, chunks = step.decode_rows > 0, step.tokens > step.decode_rows
        kernels = (DECODE_KERNEL,) * decodes + (PREFILL_KERNEL,) * chunks
        compiled = self.compiled(kernels, attention, arrays.queries, kv_pages, batch)
        parts, sizes = [], []
        waiting: dict[str, float] = {}
        if decodes:
            chosen = blocks.decode_blocks(shape, arrays.sequences, arrays.columns)
            page_bytes = shape.page_size * shape.bytes_per_key
            columns = -(-arrays.columns // 128) * 128
            decoding = sizes_of(chosen, shape.page_size, page_bytes, columns, VMEM_LIMITS[shape.chip])
            cost = decode_cost(
                compiled.schedules[DECODE_KERNEL], step, shape.heads, decoding, chosen.rows, shape.page_size
            )
            transfer = shape.bytes_per_key / chip.bandwidth * chip.clock
            for latency in self.latencies:
                cycles = decode_with_copies(cost, transfer=transfer, latency=latency * chip.clock, depth=decoding.depth)
                waiting[f"of_memory_{latency}"] = round(cost.keys_read * transfer / cycles, 2)
            parts.append(cost)
            sizes.append(f"{decoding.groups.rows}x{chosen.pages * shape.page_size}")
        if chunks:
            wide = blocks.prefill_blocks(shape, arrays.tokens, arrays.columns)
            schedule = compiled.schedules[PREFILL_KERNEL]
            parts.append(
                prefill_cost(schedule, step, shape.heads, shape.kv_heads, wide.queries, wide.pages, shape.page_size)
            )
            sizes.append(f"{wide.queries}x{wide.pages * shape.page_size}")
        bytes_us = sum(part.keys_read for part in parts) * shape.bytes_per_key / chip.bandwidth
        return {**self._row(parts, sizes, compiled.text), "bytes_us": bytes_us, **waiting}

    def shipped(self, step: Step, arrays: Arrays) -> dict[str, Any]:
        """The kernel that comes with JAX."""
        shape = self.shape
        pages, width = SHIPPED_KEYS // shape.page_size, min(SHIPPED_QUERY_HEADS // shape.heads, 32)
        attention = partial(
            shipped_attention,
            sm_scale=HEAD_DIM**-0.5,
            num_kv_pages_per_block=pages,
            num_queries_per_block=width,
            vmem_limit_bytes=VMEM_LIMITS[shape.chip],
        )
        kv_pages = self.array((PAGES, shape.page_size, 2 * shape.kv_heads, HEAD_DIM), jnp.bfloat16)
        kernel = "ragged_paged_attention_kernel"
        compiled = self.compiled(
            (kernel,),
            attention,
            arrays.queries,
            kv_pages,
            arrays.kv_lens,
            arrays.table,
            arrays.starts,
            self.array((1,)),
        )
        part = cost_of_shipped(compiled.schedules[kernel], step, shape.heads, width, pages, shape.page_size)
        return self._row([part], [f"{width}x{pages * shape.page_size}"], compiled.text)

    def rivals(self, step: Step, arrays: Arrays) -> dict[str, Any]:
        """tpu-inference's kernels: one for decode rows, one for chunks."""
        rival, shape = self.rival, self.shape
        heads = (shape.heads, shape.kv_heads, HEAD_DIM, shape.page_size)
        fresh = self.array((arrays.tokens, shape.kv_heads, HEAD_DIM), jnp.bfloat16)
        kv_pages = rival.get_kv_cache_shape(PAGES, shape.page_size, shape.kv_heads, HEAD_DIM, jnp.bfloat16)
        # the kernel for chunks is in every program; small blocks compile quickly where it has no work
        chunks = step.tokens > step.decode_rows
        cases = [rival.RpaCase.DECODE] * (step.decode_rows > 0) + [rival.RpaCase.MIXED] * chunks
        compiled = self.compiled(
            tuple(f"RPA{case.symbol}" for case in cases),
            partial(
                rival.ragged_paged_attention,
                vmem_limit_bytes=VMEM_LIMITS[shape.chip],
                m_block_sizes=None if chunks else (8, 128, 8, 128),
            ),
            *(arrays.queries, fresh, fresh, self.array(kv_pages, jnp.bfloat16), arrays.kv_lens),
            *(self.array((arrays.sequences * arrays.columns,)), arrays.starts, self.array((3,))),
        )
        parts, sizes = [], []
        for case in cases:
            limits = (arrays.tokens, arrays.sequences, arrays.columns)
            chosen = rival.get_default_block_sizes(jnp.bfloat16, jnp.bfloat16, *heads, *limits, case=case)
            kernel = Rival(chosen["bq_sz"], chosen["bkv_sz"], chosen["bkv_csz"])
            parts.append(kernel.cost(compiled.schedules[f"RPA{case.symbol}"], step, shape.heads))
            sizes.append(f"{kernel.queries}x{kernel.fetched}")
        return self._row(parts, sizes, compiled.text)

    def _row(self, parts: list[Cost], sizes: list[str], text: str) -> dict[str, Any]:
        return {
            "blocks": " + ".join(sizes),
            "vmem_mib": max(_scoped_memory(text)) / (1 << 20),
            "loop": " + ".join(f"{part.loop:.0f}" for part in parts),
            "per_key_head": " + ".join(f"{part.per_key_head:.2f}" for part in parts),
            "spills": " + ".join(str(part.spills) for part in parts),
            "compute_us": sum(part.cycles for part in parts) / self.chip.clock,
        }


def cost_of_shipped(schedule: Loop, step: Step, heads: int, queries: int, pages: int, page_size: int) -> Cost:
    """Each block of queries reads all keys of each sequence in it."""
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
    """A kernel of tpu-inference: `queries` of a sequence at a time, 1 for decode rows; `fetched` keys of a block,
    `computed` keys of one turn of its inner loop, which takes all heads and queries."""

    queries: int
    fetched: int
    computed: int

    def cost(self, schedule: Loop, step: Step, heads: int) -> Cost:
        """Nested loops over sequences, blocks of queries, blocks of keys, and the part computed at once. Work of a
        row or block of queries other than its keys is left out, as most of it is in branches that are rarely taken."""
        (inner,) = loops_with_products(schedule)
        block_loop = next(loop for loop in schedule.walk() if inner in loop.loops)
        own, turn = len(block_loop.bundles), len(inner.bundles)
        seen = list(self._keys_seen(step))
        cycles = sum(-(-keys // self.fetched) * own + -(-keys // self.computed) * turn for keys in seen)
        loop = own + self.fetched // self.computed * turn
        per_key_head = 1000 * loop / (self.fetched * heads * self.queries)
        return Cost(loop, per_key_head, inner.vector_spills, cycles, sum(seen))

    def _keys_seen(self, step: Step) -> Iterator[int]:
        """Keys that each block of queries reads."""
        lengths = list(zip(step.query_lens, step.kv_lens, strict=True))
        for count, kv_len in lengths[: step.decode_rows] if self.queries == 1 else lengths[step.decode_rows :]:
            for first in range(0, count, self.queries):
                yield kv_len - count + min(first + self.queries, count)


def load_rival(folder: Path, generation: int) -> Any:
    """The module of the rival's kernel. Its query for the machine's chip is answered with the one compiled for."""
    _without_serving_code(folder)
    module = importlib.import_module("tpu_inference.kernels.ragged_paged_attention.v3.kernel")
    module.get_tpu_version = lambda: generation
    return module


def load_latent_rival(folder: Path) -> Any:
    """The module of the rival's kernel for latent vectors. It transposes queries and outputs by a kernel that is only
    compiled for other shapes, and falls back to XLA."""
    _without_serving_code(folder)
    settings = types.ModuleType("tpu_inference.envs")
    settings.__getattr__ = lambda name: False
    messages = types.ModuleType("tpu_inference.logger")
    messages.init_logger = logging.getLogger
    for module in (settings, messages):
        sys.modules[module.__name__] = module
    sys.modules["tpu_inference"].envs = settings
    if not hasattr(pltpu, "reciprocal"):  # where it was before jax 0.10
        pltpu.reciprocal = pl.reciprocal
    module = importlib.import_module("tpu_inference.kernels.mla.v2.kernel")
    module.xpose_pipeline = _refuse
    return module


def _refuse(*_: Any, **__: Any) -> Any:
    raise ValueError("left to XLA")


def _without_serving_code(folder: Path) -> None:
    """Replaces the packages around kernels, which import the server."""
    for name in ("tpu_inference", "tpu_inference.kernels"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = package


def _scoped_memory(text: str) -> list[int]:
    """Bytes of VMEM that each custom call of a compiled module says it uses."""
    mark = '"used_scoped_memory_configs":[{'
    found = []
    for piece in text.split(mark)[1:]:
        entry = json.loads("{" + piece.split("}")[0] + "}")
        found.append(int(entry["size"]))
    return found or [0]
