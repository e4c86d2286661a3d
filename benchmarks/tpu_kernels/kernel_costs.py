"""The cost of a call of the attention kernels by the compiler's schedule: bundles of each loop, times its trips.

Such an estimate covers the instructions in order. It excludes waits: for memory, for results that take longer than the
schedule assumes, for the first block of a call, for other cores on the chip.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang_jax.kernels.ragged_paged_attention.pallas.decode_sizes import Sizes
from sglang_jax.kernels.ragged_paged_attention.pallas.prefill import (
    HEADS_TOGETHER,
    ROWS_TOGETHER,
    heads_of_a_product,
)
from tpu_kernels.schedule import Loop

DECODE_KERNEL = "paged_attention_decode"
PREFILL_KERNEL = "paged_attention_prefill"

_COPY = "= dma.hbm_to_vmem"

LATENCY = 0.6e-6
"""Seconds from the start of a copy from HBM to its first byte: 0.46 us measured on a v4, 0.59 in libtpu's model of
v6e."""


@dataclass(frozen=True)
class Step:
    """Rows with `query_lens` queries and `kv_lens` keys; decode rows first."""

    name: str
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]

    @property
    def decode_rows(self) -> int:
        return sum(count == 1 for count in self.query_lens)

    @property
    def tokens(self) -> int:
        return sum(self.query_lens)


@dataclass(frozen=True)
class Blocks:
    """`count` blocks of decode rows with `keys` keys and `bundles` bundles each."""

    count: int
    keys: int
    bundles: float


@dataclass(frozen=True)
class Cost:
    """A kernel's cost in a step.

    - `loop`: bundles for one block of keys: of the loop, of a pass over all heads, and to start the copies of its
      pages.
    - `per_key_head`: `loop` divided by the block's keys, query heads and, for chunks, queries, in thousandths.
    - `spills`: stores of spilled vector registers in that loop; for prefill, in a pass over `HEADS_TOGETHER`.
    - `cycles`: bundles of the whole step, at one bundle per cycle.
    - `keys_read`: keys that the step must read (decode rows: once; chunks: once for each block of queries).
    - `blocks`: of decode rows.
    """

    loop: float
    per_key_head: float
    spills: int
    cycles: float
    keys_read: int
    blocks: tuple[Blocks, ...] = ()


def decode_cost(schedule: Loop, step: Step, heads: int, sizes: Sizes, rows: int, page_size: int) -> Cost:
    """The cost of the decode kernel, whose programs have `rows` rows. A row's last block costs as much as its computed
    part, and rows of a short group share the cost of the group.

    All branches count as taken, except those that compute, and the one that starts the copies of a short group while a
    row with its own blocks is computed.
    """
    *group_loops, block_loop = loops_with_products(schedule)
    computing = _computing(block_loop)
    if len(computing) != len(sizes.computed):
        raise ValueError(f"the loop computes {len(computing)} sizes of blocks, it should {len(sizes.computed)}")
    if len(group_loops) != (sizes.groups.rows > 1):
        raise ValueError(f"{len(group_loops)} loops compute groups of {sizes.groups.rows} rows")
    others = len(block_loop.bundles) - sum(computing) - (_starting_group(block_loop) if group_loops else 0)
    clearing = max(
        (len(loop.bundles) for loop in block_loop.loops if not loop.count("dma") and not loop.loops), default=0
    )

    def block(keys: int) -> Blocks:
        needed = -(-keys // page_size)
        part = max(number for number, size in enumerate(sizes.computed) if size >= needed)
        cleared = clearing * (sizes.computed[part] - needed)
        return Blocks(1, keys, others + computing[part] + cleared + issue(block_loop, needed))

    whole = block(sizes.computed[0] * page_size)
    lengths = step.kv_lens[: step.decode_rows]
    row_loop = next(loop for loop in schedule.walk() if block_loop in loop.loops)
    of_group = len(group_loops[0].bundles) if group_loops else 0
    around = of_group - max((len(region) for loop in group_loops for region in loop.regions()), default=0)
    blocks: list[Blocks] = []
    cycles: float = -(-len(lengths) // rows) * len(next(loop for loop in schedule.walk() if loop.depth == 1).bundles)
    for first in range(0, len(lengths), sizes.groups.rows):
        group = lengths[first : first + sizes.groups.rows]
        if group_loops and all(-(-length // page_size) <= sizes.groups.pages for length in group):
            blocks.append(Blocks(1, sum(group), of_group))
            continue
        cycles += around + len(group) * len(row_loop.bundles)
        for length in group:
            full, rest = divmod(length, whole.keys)
            blocks += [replace(whole, count=full)] if full else []
            blocks += [block(rest)] if rest else []
    counted = Counter(replace(each, count=0) for each in blocks for _ in range(each.count))
    blocks = [replace(each, count=count) for each, count in counted.items()]
    cycles += sum(each.count * each.bundles for each in blocks)
    per_key_head = 1000 * whole.bundles / (whole.keys * heads)
    return Cost(whole.bundles, per_key_head, block_loop.vector_spills, cycles, sum(lengths), tuple(blocks))


def _starting_group(block_loop: Loop) -> int:
    """Bundles of the branch that starts a group's copies: it waits for the group's page numbers and starts those of a
    later one; the copies themselves start in a separate loop."""
    found = [region for region in block_loop.regions() if sum(bundle.count("= dma") for bundle in region) == 2]
    return len(found[0]) if len(found) == 1 else 0


def _computing(block_loop: Loop) -> list[int]:
    """Bundles of each size of block that the loop computes, largest first: of the branch that multiplies, and, except
    for the first size, of the one before it, which clears values if there are fewer keys."""
    regions = block_loop.regions()
    found: list[int] = []
    for before, region in zip([[], *regions], regions, strict=False):
        if any("= vmatmul" in bundle for bundle in region):
            found.append(len(region) + (len(before) if found else 0))
    return found


def decode_with_copies(cost: Cost, *, transfer: float, latency: float, depth: int) -> float:
    """Cycles of a step's decode rows if blocks wait for their copies.

    A buffer is filled, used, and then filled again: with `depth` buffers, a block takes (computing + latency +
    transfer) / depth cycles, and at least the time of either computing or memory.

    **Arguments:** `cost`: of `decode_cost`; `transfer`: cycles of memory for the bytes of a key; `latency`: from the
    start of a copy to its first byte; `depth`: see `depth_of`.
    """
    cycles = cost.cycles
    for each in cost.blocks:
        copying = each.keys * transfer
        period = max(each.bundles, copying, (each.bundles + latency + copying) / depth)
        cycles += each.count * (period - each.bundles)
    return cycles


def prefill_cost(
    schedule: Loop, step: Step, heads: int, kv_heads: int, queries: int, pages: int, page_size: int
) -> Cost:
    """The cost of the prefill kernel, with blocks of `queries` queries and `pages` pages."""
    keys = pages * page_size
    *_, block_loop = (loop for loop in schedule.walk() if _is_over_blocks(loop))
    forms = _prefill_forms(block_loop, heads // heads_of_a_product(heads, kv_heads, queries), queries)
    copies = issue(block_loop, pages)
    program = next(loop for loop in schedule.walk() if loop.depth == 1)
    edges = sum(len(inner.bundles) for inner in program.loops if not inner.count("dma") and not inner.loops)
    programs = -(-step.tokens // queries)
    cycles: float = programs * (len(program.bundles) + heads * edges)
    keys_read = 0
    for span in _spans(step, queries):
        form = forms.of_a_run if span.in_one_run else forms.of_all
        cycles += -(-span.last_key // keys) * (form + copies)
        keys_read += span.last_key
    loop = forms.of_all + copies
    return Cost(loop, 1000 * loop / (keys * heads * queries), forms.spills, cycles, keys_read)


def _is_over_blocks(loop: Loop) -> bool:
    """Whether it is the loop over blocks of keys: it starts copies, and multiplies, itself or in loops over heads."""
    starts_copies = any(inner.count(_COPY) for inner in loop.loops)
    return loop.depth > 0 and starts_copies and any(each.products for each in (loop, *loop.loops))


@dataclass(frozen=True)
class _Forms:
    """Bundles for a block of keys, of all queries of a block in the slowest form, or of one run; `spills`: of the
    former."""

    of_all: float
    of_a_run: float
    spills: int


def _prefill_forms(block_loop: Loop, groups: int, queries: int) -> _Forms:
    """The forms are branches of the loop: all queries unmasked, all masked, and one for each of several runs of
    queries."""
    passes = [loop for loop in block_loop.loops if loop.products]
    runs = queries // ROWS_TOGETHER
    if not passes:
        # With so few heads, no loop over them is left: a third of all forms' bundles are those of all runs.
        count = 3 if runs > 1 else 2
        all_queries = len(block_loop.bundles) / count
        return _Forms(all_queries, all_queries / max(runs, 1), block_loop.vector_spills // count)
    own = len(block_loop.bundles) / len(passes)
    turns = groups // HEADS_TOGETHER
    slowest = max(passes, key=lambda loop: len(loop.bundles))
    quickest = min(len(loop.bundles) for loop in passes)
    return _Forms(own + turns * len(slowest.bundles), own + turns * quickest, slowest.vector_spills)


@dataclass(frozen=True)
class _Span:
    """Queries of a chunk in one block of queries. `last_key`: the end of the keys that they see, exclusive."""

    last_key: int
    in_one_run: bool


def _spans(step: Step, queries: int) -> Iterator[_Span]:
    place = step.decode_rows
    for count, kv_len in list(zip(step.query_lens, step.kv_lens, strict=True))[step.decode_rows :]:
        first = place
        while first < place + count:
            last = min((first // queries + 1) * queries, place + count)
            yield _Span(kv_len - place - count + last, first // ROWS_TOGETHER == (last - 1) // ROWS_TOGETHER)
            first = last
        place += count


def loops_with_products(schedule: Loop) -> list[Loop]:
    """All loops that multiply matrices in their own bundles."""
    return [loop for loop in schedule.walk() if loop.depth and loop.products]


def issue(block_loop: Loop, pages: int) -> float:
    """Bundles that start the copies of a block: most at a time, and the remainder in the loop that starts fewest."""
    loops = [loop for loop in block_loop.walk()[1:] if loop.count(_COPY)]
    if not loops:
        return 0.0  # they are started one by one, in the loop's own bundles
    most, fewest = (choose(loops, key=lambda loop: loop.count(_COPY)) for choose in (max, min))
    together, single = most.count(_COPY), fewest.count(_COPY)
    return pages // together * len(most.bundles) + pages % together * len(fewest.bundles) / single
