"""Attention of decode rows: one query each, over keys that are read once, at memory bandwidth.

A row's keys are cut into splits, attended independently and merged at the end (Flash-Decoding, Dao et al. 2023):

- `plan_splits`, once per step for all layers of one window, counts each row's splits, and finds each split's row.
- `decode_splits`: as many programs as the chip runs at a time process the splits of all kv heads in turn, so that short
  rows cause no idle programs and the launch does not depend on the lengths. One program attends with all query heads of
  a kv head, which reads keys and values once. The program that finishes the last split of a row and kv head, by an
  atomic counter, merges all of them.

A row's splits depend only on its own length, the window and the number of kv heads, and are merged in their own order,
no matter which is finished last. So a row's result is the same, bit for bit, for any batch and any chip. Lengths are
read on the device: the launches can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from torch_backend.attention.interface import AttentionOptions
from torch_backend.kernels.attention_tiles import (
    LOG2_E,
    TRITON_TYPES,
    attend,
    check_options,
    compute_type,
    readable,
    scale_of_products,
    with_bias,
    with_sinks,
)
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.dependent_launch import after_previous
from torch_backend.kernels.integers import queries_as_integers
from torch_backend.kernels.work_items import WorkItems, write_items
from torch_backend.kv_pages import KVPages

_SPLIT = tl.constexpr(256)
"""Keys of a split, or a multiple of this. At 128 dimensions in bfloat16 they are 128 KiB, which one multiprocessor of
an H100 reads in 5 us: enough to amortise a program's start of a split, and small enough to balance the load."""

_ALIGNMENT = tl.constexpr(64)
"""Splits start at multiples of this, which is a multiple of every tile."""

_SPLITS_OF_ALL_HEADS = 256
"""Approximate maximum of a single sequence's splits over all its kv heads: enough to fill a chip."""

_LARGEST_SPLITS = 128
_SMALLEST_DOT = 16

_MERGED_AT_ONCE = tl.constexpr(8)
"""Splits whose sums are read at a time when they are merged."""

_SHARED_OF_PROCESSOR = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024, 103: 228 * 1024}
"""Bytes that the programs of a multiprocessor share, by capability."""

_MIN_SHARED_OF_PROCESSOR = 100 * 1024


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """How one program processes a split: `keys` of a tile, a power of two that divides 64; Triton's `warps` and
    `stages`; and concurrent `programs` on a multiprocessor."""

    keys: int
    warps: int
    stages: int
    programs: int


def decode_tile(head_dim: int, pages: torch.dtype, chip: Chip, values: torch.dtype | None = None) -> DecodeTile:
    """The tile for a head size and a dtype of pages, or one of keys and another of values.

    To keep an H100's memory busy, some 40 KiB must be in flight on each multiprocessor at any time (its bandwidth times
    the latency). A program has `stages - 1` tiles in flight; `programs` is limited by registers and shared memory, by
    the compiler's figures: at 128 dimensions in bfloat16, 71,680 bytes of shared memory and 80 registers for each of
    256 threads. A float8 tile has half the bytes, and warps that split values by their dimensions share its widening:
    with four warps, a kilobyte takes a third fewer instructions than with eight.
    """
    values = values or pages
    if values == torch.float32:
        keys, warps, stages, most = 16, 4, 2, 2
    elif head_dim <= 64:
        keys, warps, stages, most = 64, 4, 3, 4
    elif head_dim > 128:
        keys, warps, stages, most = 32, 8, 3, 2
    else:
        keys, warps, stages, most = 64, 4 if values.itemsize == 1 else 8, 3, 3
    width = triton.next_power_of_2(head_dim)
    # Tiles in flight, and by the compiler's figures the memory for queries, sums and the driver.
    shared = (stages - 1) * keys * width * (pages.itemsize + values.itemsize) + 24 * width + 4096
    programs = shared_memory_of(chip) // shared
    return DecodeTile(keys, warps, stages, max(min(most, programs), 1))


def shared_memory_of(chip: Chip) -> int:
    """Bytes of shared memory of a multiprocessor."""
    return _SHARED_OF_PROCESSOR.get(chip.capability, _MIN_SHARED_OF_PROCESSOR)


def splits_bound(kv_heads: int) -> int:
    """Maximum splits of a row: a power of two, larger for fewer heads."""
    return min(_LARGEST_SPLITS, 1 << max(3, (_SPLITS_OF_ALL_HEADS // kv_heads - 1).bit_length()))


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The splits of a step's decode rows, for layers with one window and number of kv heads: an item per split; the
    splits attended so far in a layer, int32 `[R, kv_heads]`, 0 between layers; and maximum splits of one row.
    `items.owners` has room for this many of each row."""

    items: WorkItems
    finished: torch.Tensor
    window: int | None
    row_bound: int


def plan_decode(
    kv_lens: torch.Tensor,
    num_decode: int,
    longest: int,
    kv_heads: int,
    window: int | None,
    row_bound: int | None = None,
) -> DecodePlan:
    """Cuts the keys of the first `num_decode` rows into splits. `kv_lens` int32 `[R]`; `longest`: maximum length;
    `row_bound`: maximum splits of a row, a power of two, None for `splits_bound`."""
    row_bound = row_bound or splits_bound(kv_heads)
    splits = min(row_bound, triton.cdiv(min(longest, (window or longest) + _ALIGNMENT.value), _SPLIT.value))
    items = WorkItems.allocate(num_decode, num_decode * splits, kv_lens.device)
    finished = torch.empty(num_decode, kv_heads, dtype=torch.int32, device=kv_lens.device)
    plan_splits[(num_decode,)](
        items.starts,
        items.owners,
        finished,
        kv_lens,
        num_decode,
        window,
        KV_HEADS=kv_heads,
        ROW_BOUND=row_bound,
        BLOCK=128,
        num_warps=1,
    )
    return DecodePlan(items, finished, window, row_bound)


@dataclass(frozen=True, slots=True)
class Partials:
    """Results of splits before they are merged: about 1/64 of the bytes of the keys and values read. All layers of a
    step share them.

    - `weighted`: float32 `[bound, heads, head_dim]`, the weighted sum of values. The bound holds for any lengths of the
      captured rows: 512 bytes for each row, split and head of 128 dimensions, so 134 MB for 256 rows of 8k tokens or
      more and 32 heads.
    - `sums`: float32 `[2, bound, heads]`: the largest score in units of log2(e), and the sum of exponentials.
    """

    weighted: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def allocate(cls, plan: DecodePlan, queries: torch.Tensor) -> Partials:
        bound, heads = plan.items.owners.shape[0], queries.shape[1]
        weighted = torch.empty(bound, heads, queries.shape[2], dtype=torch.float32, device=queries.device)
        return cls(weighted, torch.empty(2, bound, heads, dtype=torch.float32, device=queries.device))

    def fits(self, plan: DecodePlan, queries: torch.Tensor) -> bool:
        """Whether `allocate` would return the same shape."""
        return self.weighted.shape == (plan.items.owners.shape[0], *queries.shape[1:])


def decode_attention(
    queries: torch.Tensor,
    kv: KVPages,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    options: AttentionOptions,
    plan: DecodePlan,
    partials: Partials,
    output: torch.Tensor,
    chip: Chip,
) -> None:
    """Computes attention of the rows of `plan`; writes the first tokens of `output`, one for each row. Raises
    `ValueError` for options or shapes that the kernels do not support.

    `queries`, `output` `[T, heads, head_dim]`, contiguous; `page_table` int32 `[R, P]`; `kv_lens` int32 `[R]`: row i
    has token i, the last of its keys; without keys its output is 0.
    """
    check_options(queries, kv.keys, options)
    if options.window != plan.window:
        raise ValueError(f"the splits are of a window of {plan.window} keys, not {options.window}")
    _, heads, head_dim = queries.shape
    _, kv_heads, page_size, _ = kv.keys.shape
    rows = plan.items.starts.shape[0] - 1
    tile = decode_tile(head_dim, kv.keys.dtype, chip, kv.values.dtype)
    group, width = heads // kv_heads, triton.next_power_of_2(head_dim)
    heads_merged = triton.next_power_of_2(group)
    by_token = kv.token_scales
    programs = min(plan.items.owners.shape[0] * kv_heads, chip.processors * tile.programs)
    decode_splits[(programs,)](
        queries,
        readable(kv.keys, chip),
        readable(kv.values, chip),
        kv.key_scale,
        kv.value_scale,
        None if by_token is None else by_token.keys,
        None if by_token is None else by_token.values,
        None if by_token is None else by_token.key_mean,
        page_table,
        kv_lens,
        plan.items.starts,
        plan.items.owners,
        plan.finished,
        partials.weighted,
        partials.sums,
        output,
        options.sinks,
        rows,
        page_table.stride(0),
        partials.sums.stride(0),
        options.scale,
        options.soft_cap,
        plan.window,
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_WIDTH=max(heads_merged, _SMALLEST_DOT),
        HEAD_DIM=head_dim,
        WIDTH=width,
        PAGE_SIZE=page_size,
        KEYS=tile.keys,
        ROW_BOUND=plan.row_bound,
        HEADS_MERGED=heads_merged,
        COMPUTE=TRITON_TYPES[compute_type(queries.dtype, kv.keys.dtype)],
        DEPENDENT=chip.dependent_launches,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=chip.dependent_launches,
    )


@triton.jit
def split_keys(kv_lens, window, ROW_BOUND: tl.constexpr):
    """The first visible key, the keys of a split, and the number of splits, for rows of given lengths."""
    first = kv_lens * 0
    if window is not None:
        first = tl.maximum(kv_lens - window, 0) // _ALIGNMENT * _ALIGNMENT
    visible = kv_lens - first
    length = tl.cdiv(visible, _SPLIT * ROW_BOUND) * _SPLIT
    return first, length, tl.cdiv(visible, tl.maximum(length, 1))


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["kv_lens"])
def plan_splits(
    starts,
    owners,
    finished,
    kv_lens,
    rows,
    window,
    KV_HEADS: tl.constexpr,
    ROW_BOUND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row counts the splits before it: `[R + 1]` starts, `[bound]` owners. Resets `finished`."""
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    for start in range(0, KV_HEADS, BLOCK):
        some = start + lanes
        tl.store(finished + row * KV_HEADS + some, tl.zeros([BLOCK], tl.int32), mask=some < KV_HEADS)
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, row, BLOCK):
        lens = tl.load(kv_lens + start + lanes, mask=start + lanes < row, other=0)
        _, _, more = split_keys(lens, window, ROW_BOUND)
        counts += more
    _, _, count = split_keys(tl.load(kv_lens + row), window, ROW_BOUND)
    write_items(starts, owners, row, rows, tl.sum(counts, 0), count, BLOCK)


@triton.jit(
    do_not_specialize=["rows", "table_stride", "sums_stride"], do_not_specialize_on_alignment=["page_table", "kv_lens"]
)
def decode_splits(
    queries,
    keys,
    values,
    key_scale,
    value_scale,
    key_scales,
    value_scales,
    key_mean,
    page_table,
    kv_lens,
    starts,
    owners,
    finished,
    partial_weighted,
    partial_sums,
    output,
    sinks,
    rows,
    table_stride,
    sums_stride,
    scale,
    soft_cap,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    ROW_BOUND: tl.constexpr,
    HEADS_MERGED: tl.constexpr,
    COMPUTE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Attends with the `GROUP` queries of one kv head over one split after the other. Heads change fastest over
    programs: concurrent programs read adjacent keys."""
    lanes = tl.arange(0, GROUP_WIDTH)
    dims = tl.arange(0, WIDTH)
    wanted = (lanes < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    after_previous(DEPENDENT)
    # LICM is off: loop invariants would be held through a split's tiles, and spill.
    for item in tl.range(tl.program_id(0), tl.load(starts + rows) * KV_HEADS, tl.num_programs(0), disable_licm=True):
        place = item // KV_HEADS
        kv_head = item % KV_HEADS
        row = tl.load(owners + place)
        split = place - tl.load(starts + row)
        kv_len = tl.load(kv_lens + row)
        first, length, count = split_keys(kv_len, window, ROW_BOUND)
        first += split * length

        heads = kv_head * GROUP + lanes
        asked = (row * (KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + dims[None, :]
        score_scale = scale_of_products(scale, key_scale, soft_cap, kv_head)
        block_queries = tl.load(queries + asked, mask=wanted, other=0.0)
        if key_scales is not None:
            mean = tl.load(key_mean + kv_head * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
            block_queries, by_query, of_mean = queries_as_integers(block_queries, mean)
            bias = of_mean * score_scale
            score_scale = by_query * score_scale
        else:
            block_queries = block_queries.to(COMPUTE)
            bias = None
        largest, total, weighted = attend(
            block_queries,
            tl.zeros([GROUP_WIDTH], tl.int32) + kv_len - 1,
            tl.full([GROUP_WIDTH], float("-inf"), tl.float32),
            tl.zeros([GROUP_WIDTH], tl.float32),
            tl.zeros([GROUP_WIDTH, WIDTH], tl.float32),
            first,
            tl.minimum(first + length, kv_len),
            page_table + row.to(tl.int64) * table_stride,
            keys + kv_head * (PAGE_SIZE * HEAD_DIM),
            values + kv_head * (PAGE_SIZE * HEAD_DIM),
            key_scales,
            value_scales,
            kv_head * PAGE_SIZE,
            KV_HEADS * PAGE_SIZE * HEAD_DIM,
            score_scale,
            bias,
            soft_cap,
            window,
            EDGES=True,
            HEAD_DIM=HEAD_DIM,
            WIDTH=WIDTH,
            PAGE_SIZE=PAGE_SIZE,
            KEYS=KEYS,
            COMPUTE=COMPUTE,
        )
        if sinks is not None:
            largest = with_bias(largest, bias, soft_cap)
        if count == 1:
            if sinks is not None:
                joining = tl.load(sinks + heads, mask=lanes < GROUP, other=0.0) * LOG2_E
                total, weighted = with_sinks(largest, total, weighted, joining)
            result = weighted / total[:, None]
            if value_scale is not None:
                result *= tl.load(value_scale + kv_head)
            tl.store(output + asked, result.to(output.dtype.element_ty), mask=wanted)
        else:
            entries = place.to(tl.int64) * (KV_HEADS * GROUP) + heads
            tl.store(partial_weighted + entries[:, None] * HEAD_DIM + dims[None, :], weighted, mask=wanted)
            tl.store(partial_sums + entries, largest, mask=lanes < GROUP)
            tl.store(partial_sums + sums_stride + entries, total, mask=lanes < GROUP)
            # One thread counts for the program, after all of its threads have stored; the last program sees the others'
            # stores.
            tl.debug_barrier()
            done = finished + row * KV_HEADS + kv_head
            if tl.atomic_add(done, 1, sem="acq_rel") == count - 1:
                tl.store(done, 0)  # for the next layer
                merge_splits(
                    partial_weighted,
                    partial_sums,
                    place - split,
                    count,
                    row,
                    kv_head,
                    value_scale,
                    sinks,
                    output,
                    sums_stride,
                    KV_HEADS=KV_HEADS,
                    GROUP=GROUP,
                    HEAD_DIM=HEAD_DIM,
                    WIDTH=WIDTH,
                    ROW_BOUND=ROW_BOUND,
                    HEADS_MERGED=HEADS_MERGED,
                )
    zero_padding(starts, output, rows, HEADS=KV_HEADS * GROUP, HEAD_DIM=HEAD_DIM, WIDTH=WIDTH)


@triton.jit
def merge_splits(
    partial_weighted,
    partial_sums,
    first,
    count,
    row,
    kv_head,
    value_scale,
    sinks,
    output,
    sums_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROW_BOUND: tl.constexpr,
    HEADS_MERGED: tl.constexpr,
):
    """Merges the splits `first : first + count` of the heads of `kv_head`, in order. They are read past the L1 cache,
    which may hold the previous layer's."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    # Zero, unknown to the compiler, which would otherwise compute all offsets ahead and hold them through a split's
    # tiles.
    zero = first >> 31
    splits = tl.arange(0, ROW_BOUND) + zero
    group = tl.arange(0, HEADS_MERGED) + zero
    dims = tl.arange(0, WIDTH) + zero
    heads = kv_head * GROUP + group
    before = first.to(tl.int64) * HEADS
    sums = partial_sums + before + heads
    here = (splits < count)[:, None] & (group < GROUP)[None, :]
    at = splits[:, None] * HEADS
    largest = tl.load(sums[None, :] + at, mask=here, other=float("-inf"), cache_modifier=".cg")
    totals = tl.load(sums[None, :] + sums_stride + at, mask=here, other=0.0, cache_modifier=".cg")
    base = tl.max(largest, 0)
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=group < GROUP, other=0.0) * LOG2_E
        base = tl.maximum(base, sink)
    else:
        # For lanes without a head: infinities must not be subtracted from each other.
        base = tl.where(group < GROUP, base, 0.0)
    total = tl.sum(totals * tl.exp2(largest - base[None, :]), 0)
    if sinks is not None:
        total += tl.exp2(sink - base)
    total = tl.where(group < GROUP, total, 1.0)
    weighted = tl.zeros([HEADS_MERGED, WIDTH], tl.float32)
    inside = heads[:, None] * HEAD_DIM + dims[None, :]
    wanted = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    values = partial_weighted + before * HEAD_DIM + inside
    for start in tl.range(0, count, _MERGED_AT_ONCE):
        # Unrolled, so that all of these are read before the first is needed.
        for split in tl.static_range(_MERGED_AT_ONCE):
            there = start + split < count
            behind = (start + split) * HEADS
            each = tl.load(sums + behind, mask=there & (group < GROUP), other=float("-inf"), cache_modifier=".cg")
            tile = tl.load(values + behind * HEAD_DIM, mask=there & wanted, other=0.0, cache_modifier=".cg")
            weighted = tl.fma(tile, tl.exp2(each - base)[:, None] + tl.zeros_like(tile), weighted)
    result = weighted / total[:, None]
    if value_scale is not None:
        result *= tl.load(value_scale + kv_head)
    asked = output + row.to(tl.int64) * (HEADS * HEAD_DIM) + inside
    tl.store(asked, result.to(output.dtype.element_ty), mask=wanted)


@triton.jit
def zero_padding(starts, output, rows, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Writes zeros for rows without a split, starting with the last programs, which have the fewest splits."""
    lanes = tl.arange(0, WIDTH)
    for row in tl.range(tl.num_programs(0) - 1 - tl.program_id(0), rows, tl.num_programs(0)):
        if tl.load(starts + row + 1) == tl.load(starts + row):
            begin = output + row.to(tl.int64) * (HEADS * HEAD_DIM)
            for some in range(0, HEADS * HEAD_DIM, WIDTH):
                nothing = tl.zeros([WIDTH], output.dtype.element_ty)
                tl.store(begin + some + lanes, nothing, mask=some + lanes < HEADS * HEAD_DIM)
