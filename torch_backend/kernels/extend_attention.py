"""Attention of prefill chunks: each query over the cached prefix and its chunk, both read through the page table.

The tokens of a sequence are cut into blocks; one program attends with one block and all query heads of one kv head, as
many rows of a matrix product (tokens times heads). Beside one head at a time this reads nothing more or less, but a
block has fewer tokens: short chunks fill it, and less is computed above the diagonal only to be masked.

The keys of a sequence are cut into splits at fixed positions. Each split is attended by itself, and the splits of a
query are merged in order. Who does so changes no bit:

- `extend_blocks`: one program for a block goes through its splits. Within a split it takes the keys that all queries
  of the block see without a mask, then the rest with one. Keys in front of the window are not looked at.
- `extend_splits` and `merge_extended`, where blocks are too few for the chip, as of a short chunk on a long prefix:
  every split of a block has a program of its own, and what they found is merged.

Launches are as large as the number of tokens allows, and no length is read on the host. Tiles and splits of keys lie at
fixed positions of a sequence, and a tile or split of which a query sees nothing leaves its sums as they are, bit for
bit. A query's result is therefore the same however its sequence is cut into chunks, and whatever other sequences are in
the step.
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
    merged,
    readable,
    scale_of_products,
    with_bias,
    with_sinks,
)
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.extend_plan import ExtendForm, ExtendPlan, extend_tile, splits_of_row
from torch_backend.kernels.integers import queries_as_integers
from torch_backend.kv_pages import KVPages

_MERGED_ROWS = 16


@dataclass(frozen=True, slots=True)
class Sums:
    """Softmaxes in progress, of which layers of a step use the same one after the other.

    - `weighted`: float32 `[n, width]`, the weighted sum of values; `width` is the head size as a power of two.
    - `others`: float32 `[2, n]`: the largest score in units of log2(e), and the sum of exponentials.

    n is the rows of all blocks, where a program keeps here what it has of its block between two splits. Where splits
    have programs of their own it is those of every split, at most 256 MiB.
    """

    weighted: torch.Tensor
    others: torch.Tensor

    @classmethod
    def allocate(cls, plan: ExtendPlan, device: torch.device) -> Sums:
        """Room for what `plan` makes; none where no sequence has a second split."""
        shape = cls._shape(plan)
        weighted = torch.empty(shape, dtype=torch.float32, device=device)
        return cls(weighted, torch.empty(2, shape[0], dtype=torch.float32, device=device))

    def fits(self, plan: ExtendPlan) -> bool:
        """Whether `allocate` would make the same."""
        return self.weighted.shape == self._shape(plan)

    @staticmethod
    def _shape(plan: ExtendPlan) -> tuple[int, int]:
        items = 0 if plan.split is None else (plan.splits or plan.blocks).owners.shape[0]
        return items * plan.form.kv_heads * plan.form.tile.rows, triton.next_power_of_2(plan.form.head_dim)


def form_of(queries: torch.Tensor, kv: KVPages, options: AttentionOptions, chip: Chip) -> ExtendForm:
    """Of a layer with `queries` `[T, heads, head_dim]`."""
    _, heads, head_dim = queries.shape
    kv_heads = kv.keys.shape[1]
    tile = extend_tile(head_dim, kv.keys.dtype, chip, kv.values.dtype)
    return ExtendForm(kv_heads, heads // kv_heads, head_dim, options.window, tile)


def extend_attention(
    queries: torch.Tensor,
    kv: KVPages,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    query_starts: torch.Tensor,
    num_decode: int,
    options: AttentionOptions,
    plan: ExtendPlan,
    sums: Sums,
    output: torch.Tensor,
    chip: Chip,
) -> None:
    """Attention of the tokens of all sequences from `num_decode` on; writes those tokens of `output`.

    **Arguments:** `queries`, `output` `[T, heads, head_dim]`, contiguous; `page_table` int32 `[R, P]`; `kv_lens` int32
    `[R]`; `query_starts` int32 `[R + 1]`: the tokens of a sequence are the last ones of its keys. Those of a sequence
    of length 0 are padding, whose output is 0.

    **Raises:** `ValueError` for options or shapes that the kernels do not know, or that `plan` was not made for.
    """
    check_options(queries, kv.keys, options)
    form, tile = form_of(queries, kv, options, chip), plan.form.tile
    if form != plan.form:
        raise ValueError(f"the plan is of layers of {plan.form}, not of {form}")
    page_size = kv.keys.shape[2]
    compute = compute_type(queries.dtype, kv.keys.dtype)
    rows = plan.blocks.starts.shape[0] - 1
    heads_of_layer = {
        "KV_HEADS": form.kv_heads,
        "GROUP": form.group,
        "HEAD_DIM": form.head_dim,
        "WIDTH": triton.next_power_of_2(form.head_dim),
        "TOKENS": form.tokens,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "SPLIT": plan.split,
    }
    items = plan.blocks if plan.splits is None else plan.splits
    by_token = kv.token_scales
    attended = (
        # Converted here and not in the kernel, where it would keep them in registers instead of shared memory.
        queries.to(compute),
        readable(kv.keys, chip),
        readable(kv.values, chip),
        kv.key_scale,
        kv.value_scale,
        None if by_token is None else by_token.keys,
        None if by_token is None else by_token.values,
        None if by_token is None else by_token.key_mean,
        page_table,
        kv_lens,
        query_starts,
        items.starts,
        items.owners,
        sums.weighted,
        sums.others,
        output,
        options.sinks,
        rows,
        num_decode,
        page_table.stride(0),
        sums.others.stride(0),
        options.scale,
        options.soft_cap,
        options.window,
    )
    compiled_for = {
        **heads_of_layer,
        "PAGE_SIZE": page_size,
        "COMPUTE": TRITON_TYPES[compute],
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    bound = items.owners.shape[0]
    if plan.splits is None:
        extend_blocks[(bound, form.kv_heads)](*attended, **compiled_for)
        return
    extend_splits[(min(bound * form.kv_heads, chip.processors),)](*attended, **compiled_for)
    merge_extended[(plan.blocks.owners.shape[0], form.kv_heads, max(tile.rows // _MERGED_ROWS, 1))](
        sums.weighted,
        sums.others,
        kv_lens,
        query_starts,
        plan.blocks.starts,
        plan.blocks.owners,
        plan.splits.starts,
        kv.value_scale,
        options.sinks,
        output,
        rows,
        num_decode,
        sums.others.stride(0),
        options.window,
        **heads_of_layer,
        MERGED=_MERGED_ROWS,
        num_warps=4,
    )


@triton.jit
def place_of_block(row, block, query_starts, kv_lens, TOKENS: tl.constexpr):
    """Of the block's first query the place among all tokens and the position, and how many queries there are."""
    query_start = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - query_start
    start = block * TOKENS
    return query_start + start, tl.load(kv_lens + row) - count + start, tl.minimum(count - start, TOKENS)


@triton.jit
def first_key(first_position, window, KEYS: tl.constexpr):
    """The start of the first tile that a block looks at whose first query stands at `first_position`."""
    if window is None:
        return first_position * 0
    else:
        return tl.maximum(first_position - window + 1, 0) // KEYS * KEYS


@triton.jit
def attend_split(
    queries,
    positions,
    first_position,
    held,
    split,
    pages,
    keys,
    values,
    key_scales,
    value_scales,
    scales_at,
    score_scale,
    bias,
    soft_cap,
    window,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """The sums of one split alone, or without a `SPLIT` of all keys, for a block of `held` queries: see `attend`."""
    start = first_key(first_position, window, KEYS)
    end = first_position + held
    if SPLIT is not None:
        start = tl.maximum(start, split * SPLIT)
        end = tl.minimum(end, split * SPLIT + SPLIT)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, WIDTH], tl.float32)
    if window is None:
        masked_from = (first_position + 1) // KEYS * KEYS
        largest, total, weighted = attend(
            queries,
            positions,
            largest,
            total,
            weighted,
            start,
            tl.minimum(masked_from, end),
            pages,
            keys,
            values,
            key_scales,
            value_scales,
            scales_at,
            KV_HEADS * PAGE_SIZE * HEAD_DIM,
            score_scale,
            bias,
            soft_cap,
            None,
            EDGES=False,
            HEAD_DIM=HEAD_DIM,
            WIDTH=WIDTH,
            PAGE_SIZE=PAGE_SIZE,
            KEYS=KEYS,
            COMPUTE=COMPUTE,
        )
        start = tl.maximum(start, masked_from)
    return attend(
        queries,
        positions,
        largest,
        total,
        weighted,
        start,
        end,
        pages,
        keys,
        values,
        key_scales,
        value_scales,
        scales_at,
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


@triton.jit
def finished(largest, total, weighted, heads, kv_head, sinks, value_scale):
    """The output, of the sums of all splits; 0 for queries that see no key, which are padding."""
    if sinks is not None:
        total, weighted = with_sinks(largest, total, weighted, tl.load(sinks + heads) * LOG2_E)
    result = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
    if value_scale is not None:
        result *= tl.load(value_scale + kv_head)
    return result


@triton.jit(
    do_not_specialize=["rows", "num_decode", "table_stride", "sums_stride"],
    do_not_specialize_on_alignment=["page_table", "kv_lens", "query_starts"],
)
def extend_blocks(
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
    query_starts,
    starts,
    owners,
    sums_weighted,
    sums,
    output,
    sinks,
    rows,
    num_decode,
    table_stride,
    sums_stride,
    scale,
    soft_cap,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Attends with `TOKENS` tokens of one sequence and the `GROUP` heads of one kv head: row r of the product is head
    `r % GROUP` of token `r // GROUP`."""
    place = tl.program_id(0)
    if place >= tl.load(starts + rows):
        return
    kv_head = tl.program_id(1)
    item_row = tl.load(owners + place)
    # The last blocks of a sequence have most keys: they come first, so that no long program is left over at the end.
    block = tl.load(starts + item_row + 1) - 1 - place
    row = item_row + num_decode
    first_query, first_position, held = place_of_block(row, block, query_starts, kv_lens, TOKENS)

    lanes = tl.arange(0, ROWS)
    dims = tl.arange(0, WIDTH)
    tokens = lanes // GROUP
    heads = kv_head * GROUP + lanes % GROUP
    places = (first_query + tokens).to(tl.int64) * (KV_HEADS * GROUP) + heads
    asked = places[:, None] * HEAD_DIM + dims[None, :]
    wanted = (tokens < held)[:, None] & (dims < HEAD_DIM)[None, :]
    block_queries = tl.load(queries + asked, mask=wanted, other=0.0)
    if key_scales is not None:
        mean = tl.load(key_mean + kv_head * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        block_queries, by_query, of_mean = queries_as_integers(block_queries, mean)
    first_split, splits = 0, 1
    if SPLIT is not None:
        first_split = first_key(first_position, window, KEYS) // SPLIT
        # Padding sees no key, and gets its zeros.
        splits = tl.maximum(tl.cdiv(first_position + held, SPLIT), first_split + 1)
    # Nothing that all turns share is computed ahead: held through a split's tiles, it would spill.
    for split in tl.range(first_split, splits, disable_licm=True):
        score_scale = scale_of_products(scale, key_scale, soft_cap, kv_head)
        bias = None
        if key_scales is not None:
            bias = of_mean * score_scale
            score_scale = by_query * score_scale
        largest, total, weighted = attend_split(
            block_queries,
            first_position + tokens,
            first_position,
            held,
            split,
            page_table + row.to(tl.int64) * table_stride,
            keys + kv_head * (PAGE_SIZE * HEAD_DIM),
            values + kv_head * (PAGE_SIZE * HEAD_DIM),
            key_scales,
            value_scales,
            kv_head * PAGE_SIZE,
            score_scale,
            bias,
            soft_cap,
            window,
            KV_HEADS=KV_HEADS,
            HEAD_DIM=HEAD_DIM,
            WIDTH=WIDTH,
            PAGE_SIZE=PAGE_SIZE,
            ROWS=ROWS,
            KEYS=KEYS,
            SPLIT=SPLIT,
            COMPUTE=COMPUTE,
        )
        if sinks is not None:
            largest = with_bias(largest, bias, soft_cap)
        if SPLIT is not None:
            # What earlier splits gave waits in memory: registers hold one softmax in progress, not two. A block's place
            # there is whole, so that it is found by one address and its padding needs no mask.
            block_place = (place.to(tl.int64) * KV_HEADS + kv_head) * ROWS
            kept, kept_weighted = sums + block_place, sums_weighted + block_place * WIDTH
            inside = lanes[:, None] * WIDTH + dims[None, :]
            if split > first_split:
                # Other threads may have written what this one reads. Before they write anew, below, there are barriers
                # of the compiler's: it brings what is read here through shared memory to the layout of products.
                tl.debug_barrier()
                largest, total, weighted = merged(
                    tl.load(kept + lanes),
                    tl.load(kept + sums_stride + lanes),
                    tl.load(kept_weighted + inside),
                    largest,
                    total,
                    weighted,
                )
            if split < splits - 1:
                tl.store(kept + lanes, largest)
                tl.store(kept + sums_stride + lanes, total)
                tl.store(kept_weighted + inside, weighted)
        if split == splits - 1:
            result = finished(largest, total, weighted, heads, kv_head, sinks, value_scale)
            tl.store(output + asked, result.to(output.dtype.element_ty), mask=wanted)


@triton.jit(
    do_not_specialize=["rows", "num_decode", "table_stride", "sums_stride"],
    do_not_specialize_on_alignment=["page_table", "kv_lens", "query_starts"],
)
def extend_splits(
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
    query_starts,
    starts,
    owners,
    sums_weighted,
    sums,
    output,
    sinks,
    rows,
    num_decode,
    table_stride,
    sums_stride,
    scale,
    soft_cap,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """As `extend_blocks`, one split of a block after the other; blocks that have one alone are finished here."""
    lanes = tl.arange(0, ROWS)
    dims = tl.arange(0, WIDTH)
    tokens = lanes // GROUP
    for item in tl.range(tl.program_id(0), tl.load(starts + rows) * KV_HEADS, tl.num_programs(0), disable_licm=True):
        place = item // KV_HEADS
        kv_head = item % KV_HEADS
        item_row = tl.load(owners + place)
        row = item_row + num_decode
        count = tl.load(query_starts + row + 1) - tl.load(query_starts + row)
        first_of_row, splits_of_one = splits_of_row(tl.load(kv_lens + row), count, window, SPLIT)
        index = place - tl.load(starts + item_row)
        block = index // splits_of_one
        split = first_of_row + index % splits_of_one
        first_query, first_position, held = place_of_block(row, block, query_starts, kv_lens, TOKENS)
        first_split = first_key(first_position, window, KEYS) // SPLIT
        splits = tl.cdiv(first_position + held, SPLIT)
        # A sequence's early blocks may end before its last split, and late ones see nothing of the first.
        if (split >= first_split) & (split < splits):
            heads = kv_head * GROUP + lanes % GROUP
            places = (first_query + tokens).to(tl.int64) * (KV_HEADS * GROUP) + heads
            asked = places[:, None] * HEAD_DIM + dims[None, :]
            wanted = (tokens < held)[:, None] & (dims < HEAD_DIM)[None, :]
            block_queries = tl.load(queries + asked, mask=wanted, other=0.0)
            score_scale = scale_of_products(scale, key_scale, soft_cap, kv_head)
            bias = None
            if key_scales is not None:
                mean = tl.load(key_mean + kv_head * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
                block_queries, by_query, of_mean = queries_as_integers(block_queries, mean)
                bias = of_mean * score_scale
                score_scale = by_query * score_scale
            largest, total, weighted = attend_split(
                block_queries,
                first_position + tokens,
                first_position,
                held,
                split,
                page_table + row.to(tl.int64) * table_stride,
                keys + kv_head * (PAGE_SIZE * HEAD_DIM),
                values + kv_head * (PAGE_SIZE * HEAD_DIM),
                key_scales,
                value_scales,
                kv_head * PAGE_SIZE,
                score_scale,
                bias,
                soft_cap,
                window,
                KV_HEADS=KV_HEADS,
                HEAD_DIM=HEAD_DIM,
                WIDTH=WIDTH,
                PAGE_SIZE=PAGE_SIZE,
                ROWS=ROWS,
                KEYS=KEYS,
                SPLIT=SPLIT,
                COMPUTE=COMPUTE,
            )
            if sinks is not None:
                largest = with_bias(largest, bias, soft_cap)
            if splits - first_split == 1:
                result = finished(largest, total, weighted, heads, kv_head, sinks, value_scale)
                tl.store(output + asked, result.to(output.dtype.element_ty), mask=wanted)
            else:
                block_place = item.to(tl.int64) * ROWS
                tl.store(sums_weighted + block_place * WIDTH + lanes[:, None] * WIDTH + dims[None, :], weighted)
                tl.store(sums + block_place + lanes, largest)
                tl.store(sums + sums_stride + block_place + lanes, total)


@triton.jit(
    do_not_specialize=["rows", "num_decode", "sums_stride"],
    do_not_specialize_on_alignment=["kv_lens", "query_starts"],
)
def merge_extended(
    sums_weighted,
    sums,
    kv_lens,
    query_starts,
    block_starts,
    block_owners,
    split_starts,
    value_scale,
    sinks,
    output,
    rows,
    num_decode,
    sums_stride,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Merges the splits of `MERGED` rows of a block in order, as `extend_blocks` does."""
    place = tl.program_id(0)
    if place >= tl.load(block_starts + rows):
        return
    kv_head = tl.program_id(1)
    item_row = tl.load(block_owners + place)
    block = place - tl.load(block_starts + item_row)
    row = item_row + num_decode
    first_query, first_position, held = place_of_block(row, block, query_starts, kv_lens, TOKENS)
    first_split = first_key(first_position, window, KEYS) // SPLIT
    splits = tl.cdiv(first_position + held, SPLIT)
    if splits - first_split == 1:
        return
    count = tl.load(query_starts + row + 1) - tl.load(query_starts + row)
    first_of_row, splits_of_one = splits_of_row(tl.load(kv_lens + row), count, window, SPLIT)
    before = tl.load(split_starts + item_row) + block * splits_of_one - first_of_row

    lanes = tl.program_id(2) * MERGED + tl.arange(0, MERGED)
    dims = tl.arange(0, WIDTH)
    tokens = lanes // GROUP
    heads = kv_head * GROUP + lanes % GROUP
    here = (tokens < held) & (lanes < ROWS)
    wanted = here[:, None] & (dims < HEAD_DIM)[None, :]
    largest = tl.full([MERGED], float("-inf"), tl.float32)
    total = tl.zeros([MERGED], tl.float32)
    weighted = tl.zeros([MERGED, WIDTH], tl.float32)
    for split in range(first_split, splits):
        entries = ((before + split).to(tl.int64) * KV_HEADS + kv_head) * ROWS + lanes
        largest, total, weighted = merged(
            largest,
            total,
            weighted,
            tl.load(sums + entries, mask=here, other=0.0),
            tl.load(sums + sums_stride + entries, mask=here, other=0.0),
            tl.load(sums_weighted + entries[:, None] * WIDTH + dims[None, :], mask=wanted, other=0.0),
        )
    result = finished(largest, total, weighted, heads, kv_head, sinks, value_scale)
    places = (first_query + tokens).to(tl.int64) * (KV_HEADS * GROUP) + heads
    at = output + places[:, None] * HEAD_DIM + dims[None, :]
    tl.store(at, result.to(output.dtype.element_ty), mask=wanted)
