"""Compares block sizes of the attention kernels by the compiler's schedule, or by time on a device.

Imports JAX; comparisons by schedule run in a separate process (`tpu.worker`).
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sglang_jax.errors import ConfigError
from sglang_jax.kernels.ragged_paged_attention.options import AttentionOptions
from sglang_jax.kernels.ragged_paged_attention.pallas.blocks import ROWS
from sglang_jax.kernels.ragged_paged_attention.pallas.decode import decode_attention
from sglang_jax.kernels.ragged_paged_attention.pallas.decode_sizes import DecodeBlocks, Sizes, sizes_of
from sglang_jax.kernels.ragged_paged_attention.pallas.prefill import PrefillBlocks, prefill_attention
from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import VMEM_LIMITS, Chip, Shape, chip_of
from sglang_jax.kernels.ragged_paged_attention.pallas.softmax import type_of_products
from sglang_jax.kernels.ragged_paged_attention.pallas.table import Entry, Phase, Source
from tpu.topologies import CHIPS, Generation, Topology
from tpu.topologies import Chip as ChipFigures
from tpu_kernels.kernel_costs import (
    DECODE_KERNEL,
    LATENCY,
    PREFILL_KERNEL,
    Cost,
    Step,
    decode_cost,
    decode_with_copies,
    prefill_cost,
)
from tpu_kernels.schedule import read_schedule

DECODE_STEP = Step("decode", (1,) * 64, (200, 1000, 1500, 4000) * 16)
PREFILL_STEPS = (
    Step("a whole prompt", (2048,), (2048,)),
    Step("chunks on prefixes", (512,) * 4, (2560,) * 4),
    Step("chunks of all lengths", (300, 20, 90, 500, 114), (300, 1020, 90, 1500, 3114)),
)
"""Steps by which sizes are compared: lengths of ordinary traffic, some of them just above a block of keys."""

_COLUMNS_OF_TOKENS = 4096
_KEYS = {Phase.DECODE: (256, 512, 1024, 2048, 4096), Phase.PREFILL: (256, 512, 1024)}
_QUERIES = {Phase.DECODE: (ROWS,), Phase.PREFILL: (64, 128, 256, 512)}
_RUNS, _CALLS = 5, 20


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of one device, without the chip."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    storage: str

    def on(self, chip: Chip) -> Shape:
        return Shape.of(chip, self.heads, self.kv_heads, self.head_dim, self.page_size, self.storage)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The cost of one choice of sizes: cycles of the schedule, or seconds on a device; None if it does not compile.

    `spills`: decode's loop spills registers, by the schedule. Decode waits for memory anyway, so saved cycles are not
    worth the additional traffic within the chip. `instructions`: cycles without waits for copies, by the schedule.
    """

    entry: Entry
    cost: float | None
    spills: bool = False
    instructions: float | None = None


def compare_by_schedule(generation: Generation, every: tuple[Heads, ...], dumps: Path) -> Iterator[Comparison]:
    """Compares the choices for each phase of each shape. `dumps`: the folder to which libtpu writes schedules."""
    chip = CHIPS[generation]
    topology = Topology(chip, chip.one_node[0])
    try:
        devices = topologies.get_topology_desc(str(topology), "tpu", **topology.configuration).devices
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise ConfigError(f"libtpu has no topology {topology}: {error}") from error
    mesh = Mesh(np.array(devices[:1]), ("x",))
    whole = NamedSharding(mesh, PartitionSpec())

    def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    for entry in choices(generation, every, Source.SCHEDULE):
        call = KernelCall(entry)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = jax.jit(call.run).lower(*call.arguments(array, array, array))
        try:
            lowered.compile()
        except jax.errors.JaxRuntimeError:
            yield Comparison(entry, None)
            continue
        costs = [call.cost(dumps, step) for step in call.steps]
        cycles = [call.cycles(cost, chip) for cost in costs]
        shutil.rmtree(dumps)
        dumps.mkdir()
        spills = entry.phase is Phase.DECODE and any(cost.spills for cost in costs)
        yield Comparison(entry, sum(cycles), spills, sum(cost.cycles for cost in costs))


def compare_on_device(every: tuple[Heads, ...]) -> Iterator[Comparison]:
    """As `compare_by_schedule`, by the median time of a call on the first device.

    **Raises:** `ConfigError` if it is not a TPU that the kernels support.
    """
    device = jax.devices()[0]
    if device.platform != "tpu":
        raise ConfigError(f"--by device needs a TPU, but JAX sees a {device.platform}: choose --by schedule")
    generation = Generation(chip_of(device.device_kind).value)
    for entry in choices(generation, every, Source.DEVICE):
        call = KernelCall(entry)
        try:
            yield Comparison(entry, sum(_seconds(call, step) for step in call.steps))
        except jax.errors.JaxRuntimeError:
            yield Comparison(entry, None)


def choices(generation: Generation, every: tuple[Heads, ...], source: Source) -> Iterator[Entry]:
    """Sizes to compare: powers of two, of at least a page and 128 keys."""
    for heads, phase in product(every, Phase):
        shape = heads.on(Chip(generation.value))
        for queries, keys in product(_QUERIES[phase], _KEYS[phase]):
            if keys >= shape.page_size:
                yield Entry(shape, phase, queries, keys // shape.page_size, source)


Make = Callable[[tuple[int, ...], Any], Any]


class KernelCall:
    """One kernel with one choice of sizes, for steps up to the largest one by which sizes are compared. `value_dim`:
    see `AttentionOptions`."""

    def __init__(self, entry: Entry, value_dim: int | None = None) -> None:
        self.entry = entry
        self._value_dim = value_dim
        self.steps = (DECODE_STEP,) if entry.phase is Phase.DECODE else PREFILL_STEPS
        self._rows = 64 if entry.phase is Phase.DECODE else 8
        self._tokens = max(step.tokens for step in self.steps)

    def run(self, queries: Any, kv_pages: Any, page_table: Any, kv_lens: Any, query_starts: Any, num: Any) -> Any:
        """Calls the kernel."""
        entry = self.entry
        static: dict[str, Any] = {
            "scale": entry.shape.head_dim**-0.5,
            "options": AttentionOptions(value_dim=self._value_dim),
            "vmem_limit": VMEM_LIMITS[entry.shape.chip],
        }
        if entry.phase is Phase.DECODE:
            blocks = DecodeBlocks(entry.queries, entry.pages)
            return decode_attention(queries, kv_pages, page_table, kv_lens, num, blocks=blocks, **static)
        wide = PrefillBlocks(entry.queries, entry.pages)
        return prefill_attention(
            queries, kv_pages, page_table[:, None], kv_lens, query_starts, num, blocks=wide, **static
        )

    def arguments(self, values: Make, pages: Make, integers: Make) -> tuple[Any, ...]:
        """Arguments of `run`, created by shape and dtype."""
        shape = self.entry.shape
        tokens, heads = self._tokens, shape.heads
        decode = self.entry.phase is Phase.DECODE
        storage = jnp.dtype(shape.storage)
        page_shape = (self.num_pages, shape.kv_heads, shape.parts, shape.page_size, shape.lanes)
        return (
            values((tokens, heads, shape.lanes) if decode else (heads, tokens, shape.lanes), type_of_products(storage)),
            pages(page_shape, storage),
            integers((self._rows, self._padded_columns), jnp.int32),
            integers((self._rows,), jnp.int32),
            integers((self._rows + 1,), jnp.int32),
            integers((1,), jnp.int32),
        )

    @property
    def columns(self) -> int:
        """Columns of the page table."""
        return _COLUMNS_OF_TOKENS // self.entry.shape.page_size

    @property
    def _padded_columns(self) -> int:
        return -(-self.columns // 128) * 128

    @property
    def num_pages(self) -> int:
        """Pages of the longest step without shared ones."""
        page_size = self.entry.shape.page_size
        return 1 + max(sum(-(-length // page_size) for length in step.kv_lens) for step in self.steps)

    def cost(self, dumps: Path, step: Step) -> Cost:
        """The cost of a step by the schedule dumped last."""
        entry = self.entry
        heads, page_size = entry.shape.heads, entry.shape.page_size
        if entry.phase is Phase.DECODE:
            return decode_cost(
                read_schedule(dumps, DECODE_KERNEL), step, heads, self.decode_sizes, entry.queries, page_size
            )
        schedule = read_schedule(dumps, PREFILL_KERNEL)
        return prefill_cost(schedule, step, heads, entry.shape.kv_heads, entry.queries, entry.pages, page_size)

    def cycles(self, cost: Cost, chip: ChipFigures) -> float:
        """Cycles of a step, for decode with waits for copies."""
        shape = self.entry.shape
        if self.entry.phase is Phase.PREFILL:
            return cost.cycles
        transfer = shape.bytes_per_key / (chip.hbm_bandwidth / chip.devices) * chip.clock
        depth = self.decode_sizes.depth
        return decode_with_copies(cost, transfer=transfer, latency=LATENCY * chip.clock, depth=depth)

    @property
    def decode_sizes(self) -> Sizes:
        """The kernel's sizes for this entry."""
        shape = self.entry.shape
        blocks = DecodeBlocks(self.entry.queries, self.entry.pages)
        page_bytes = shape.page_size * shape.bytes_per_key
        return sizes_of(blocks, shape.page_size, page_bytes, self._padded_columns, VMEM_LIMITS[shape.chip])

    def arrays(self, step: Step) -> tuple[jax.Array, ...]:
        """Arguments of `run`: random numbers in pages in random order."""
        rng = np.random.default_rng(0)
        shape = self.entry.shape

        def small(size: tuple[int, ...], dtype: Any) -> jax.Array:
            return jnp.asarray(rng.integers(-4, 5, size, np.int8)).astype(dtype)

        def zeros(size: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
            return np.zeros(size, dtype)

        queries, pages, table, kv_lens, query_starts, num_decode = self.arguments(small, small, zeros)
        unused = iter(1 + rng.permutation(self.num_pages - 1))
        for row, length in enumerate(step.kv_lens):
            for column in range(-(-length // shape.page_size)):
                table[row, column] = next(unused)
        kv_lens[: len(step.kv_lens)] = step.kv_lens
        query_starts[1:] = step.tokens
        query_starts[: len(step.query_lens) + 1] = [0, *np.cumsum(step.query_lens)]
        num_decode[0] = step.decode_rows
        return queries, pages, *map(jnp.asarray, (table, kv_lens, query_starts, num_decode))


def _seconds(call: KernelCall, step: Step) -> float:
    """The median time of a call over several runs."""
    run = jax.jit(call.run)
    arrays = call.arrays(step)
    jax.block_until_ready(run(*arrays))
    times = []
    for _ in range(_RUNS):
        start = time.perf_counter()
        for _ in range(_CALLS):
            result = run(*arrays)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / _CALLS)
    return statistics.median(times)
