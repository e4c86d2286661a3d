"""The kernels of `extend_attention`: attention of one block of queries, and the merge of its splits."""

from __future__ import annotations

import triton
import triton.language as tl

from torch_backend.kernels.attention_tiles import LOG2_E, attend, merge_sums, scale_of_products, with_bias, with_sinks
from torch_backend.kernels.extend_plan import splits_of_row
from torch_backend.kernels.integers import queries_as_integers


@triton.jit
def place_of_block(row, block, query_starts, kv_lens, TOKENS: tl.constexpr):
    """The index of the block's first query among all tokens, its position, and the number of queries."""
    query_start = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - query_start
    start = block * TOKENS
    return query_start + start, tl.load(kv_lens + row) - count + start, tl.minimum(count - start, TOKENS)


@triton.jit
def first_key(first_position, window, KEYS: tl.constexpr):
    """The start of the first tile that a block sees whose first query is at `first_position`."""
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
    """The sums of one split, or without a `SPLIT` of all keys, for a block of `held` queries: see `attend`."""
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
def final_output(largest, total, weighted, heads, kv_head, sinks, value_scale):
    """The output from the sums of all splits; 0 for padding, whose queries see no key."""
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
    # The last blocks of a sequence see the most keys and come first, so that no long program is left at the end.
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
        # Padding sees no key, and gets zeros.
        splits = tl.maximum(tl.cdiv(first_position + held, SPLIT), first_split + 1)
    # LICM is off: loop invariants would be held through a split's tiles, and spill.
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
            # Sums of earlier splits are kept in memory, because registers hold only one softmax in progress. A block's
            # place there has its full size, so that one address suffices and padding needs no mask.
            block_place = (place.to(tl.int64) * KV_HEADS + kv_head) * ROWS
            kept, kept_weighted = sums + block_place, sums_weighted + block_place * WIDTH
            inside = lanes[:, None] * WIDTH + dims[None, :]
            if split > first_split:
                # Other threads may have written what this one reads. Before they write again, below, there are barriers
                # by the compiler, which moves these reads through shared memory to the layout of products.
                tl.debug_barrier()
                largest, total, weighted = merge_sums(
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
            result = final_output(largest, total, weighted, heads, kv_head, sinks, value_scale)
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
    """As `extend_blocks`, one split of a block after the other; blocks with only one split are completed here."""
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
        # A sequence's early blocks may end before its last split, and late ones may not see its first.
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
                result = final_output(largest, total, weighted, heads, kv_head, sinks, value_scale)
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
        largest, total, weighted = merge_sums(
            largest,
            total,
            weighted,
            tl.load(sums + entries, mask=here, other=0.0),
            tl.load(sums + sums_stride + entries, mask=here, other=0.0),
            tl.load(sums_weighted + entries[:, None] * WIDTH + dims[None, :], mask=wanted, other=0.0),
        )
    result = final_output(largest, total, weighted, heads, kv_head, sinks, value_scale)
    places = (first_query + tokens).to(tl.int64) * (KV_HEADS * GROUP) + heads
    at = output + places[:, None] * HEAD_DIM + dims[None, :]
    tl.store(at, result.to(output.dtype.element_ty), mask=wanted)
