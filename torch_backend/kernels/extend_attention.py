"""Attention of prefill chunks: each query over the cached prefix and its chunk, both read through the page table.

The tokens of a sequence are cut into blocks; one program attends with one block and all query heads of one kv head, as
many rows of a matrix product (tokens times heads). Beside one head at a time this reads nothing more or less, but a
block has fewer tokens: short chunks fill it, and less is computed above the diagonal only to be masked.

- `plan_blocks`, once a step: how many blocks each sequence has, and whose the i-th is. The launch is as large as the
  number of tokens allows; programs behind the last block end at once, and no length is read on the host.
- `extend_blocks`: keys that all queries of the block see without a mask, then the rest with one. Keys in front of the
  window are not looked at.

Tiles of keys lie at fixed positions of a sequence, and a tile of which a query sees nothing leaves its sums as they
are, bit for bit. A query's result is therefore the same however its sequence is cut into chunks, and whatever other
sequences are in the step.
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
    with_sinks,
)
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.work_items import WorkItems, write_items
from torch_backend.kv_pages import KVPages


@dataclass(frozen=True, slots=True)
class ExtendTile:
    """How one program goes through its keys.

    - `rows`: of its queries, tokens times heads of a kv head; a power of two.
    - `keys`: of a tile, a power of two.
    - `warps`, `stages`: as Triton means them.
    """

    rows: int
    keys: int
    warps: int
    stages: int

    def tokens(self, group: int) -> int:
        """Tokens of a block where `group` query heads share a kv head."""
        return self.rows // group


def extend_tile(head_dim: int, pages: torch.dtype, chip: Chip) -> ExtendTile:
    """The tile for a head size and a type of pages: the largest that the compiler fits into registers.

    128 rows and 8 warps are two warp groups of Hopper's matrix unit. What limits the rest are registers: at 128
    dimensions a thread holds 64 accumulators and 32 scores. Matrix units other than those of Hopper and the data-centre
    Blackwells want queries, keys and values in registers too, and float8 is widened there on all.
    """
    if pages == torch.float32:
        return ExtendTile(rows=16, keys=16, warps=4, stages=2)
    widens = pages.itemsize == 1
    if head_dim > 128:
        rows = 128 if chip.capability == 90 and not widens else 64
        return ExtendTile(rows=rows, keys=32, warps=8, stages=3 if widens else 2)
    reads_shared = chip.capability // 10 in (9, 10)
    return ExtendTile(rows=128, keys=64 if reads_shared or head_dim <= 64 else 32, warps=8, stages=3)


@dataclass(frozen=True, slots=True)
class ExtendPlan:
    """The blocks of a step's sequences behind the decode rows, for layers whose blocks have `tokens` tokens."""

    items: WorkItems
    tokens: int


def plan_extend(query_starts: torch.Tensor, num_decode: int, num_tokens: int, tokens: int) -> ExtendPlan:
    """Cuts the sequences from `num_decode` on into blocks of `tokens` tokens.

    **Arguments:** `query_starts` int32 `[R + 1]`; `num_tokens`: of all sequences.
    """
    rows = query_starts.shape[0] - 1 - num_decode
    # Every block is full but the last one of each sequence.
    bound = (num_tokens - num_decode) // tokens + rows
    items = WorkItems.allocate(rows, bound, query_starts.device)
    plan_blocks[(rows,)](
        items.starts, items.owners, query_starts, rows, num_decode, TOKENS=tokens, BLOCK=128, num_warps=1
    )
    return ExtendPlan(items, tokens)


def extend_attention(
    queries: torch.Tensor,
    kv: KVPages,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    query_starts: torch.Tensor,
    num_decode: int,
    options: AttentionOptions,
    plan: ExtendPlan,
    output: torch.Tensor,
    chip: Chip,
) -> None:
    """Attention of the tokens of all sequences from `num_decode` on; writes those tokens of `output`.

    **Arguments:** `queries`, `output` `[T, heads, head_dim]`, contiguous; `page_table` int32 `[R, P]`; `kv_lens` int32
    `[R]`; `query_starts` int32 `[R + 1]`: the tokens of a sequence are the last ones of its keys.

    **Raises:** `ValueError` for options or shapes that the kernels do not know.
    """
    check_options(queries, kv.keys, options)
    _, heads, head_dim = queries.shape
    _, kv_heads, page_size, _ = kv.keys.shape
    tile = extend_tile(head_dim, kv.keys.dtype, chip)
    compute = compute_type(queries.dtype, kv.keys.dtype)
    extend_blocks[(plan.items.owners.shape[0], kv_heads)](
        # Converted here and not in the kernel, where it would keep them in registers instead of shared memory.
        queries.to(compute),
        readable(kv.keys, chip),
        readable(kv.values, chip),
        kv.key_scale,
        kv.value_scale,
        page_table,
        kv_lens,
        query_starts,
        plan.items.starts,
        plan.items.owners,
        output,
        options.sinks,
        plan.items.starts.shape[0] - 1,
        num_decode,
        page_table.stride(0),
        options.scale,
        options.soft_cap,
        options.window,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        PAGE_SIZE=page_size,
        TOKENS=plan.tokens,
        ROWS=tile.rows,
        KEYS=tile.keys,
        COMPUTE=TRITON_TYPES[compute],
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@triton.jit(do_not_specialize=["rows", "num_decode"], do_not_specialize_on_alignment=["query_starts"])
def plan_blocks(starts, owners, query_starts, rows, num_decode, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """One program for each sequence counts the blocks of all before it: `[rows + 1]` starts and `[bound]` owners."""
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    ends = query_starts + num_decode + 1
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, row, BLOCK):
        others = start + lanes
        begin = tl.load(ends + others - 1, mask=others < row, other=0)
        end = tl.load(ends + others, mask=others < row, other=0)
        counts += tl.cdiv(end - begin, TOKENS)
    count = tl.cdiv(tl.load(ends + row) - tl.load(ends + row - 1), TOKENS)
    write_items(starts, owners, row, rows, tl.sum(counts, 0), count, BLOCK)


@triton.jit(
    do_not_specialize=["rows", "num_decode", "table_stride"],
    do_not_specialize_on_alignment=["page_table", "kv_lens", "query_starts"],
)
def extend_blocks(
    queries,
    keys,
    values,
    key_scale,
    value_scale,
    page_table,
    kv_lens,
    query_starts,
    starts,
    owners,
    output,
    sinks,
    rows,
    num_decode,
    table_stride,
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
    query_start = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - query_start
    kv_len = tl.load(kv_lens + row)
    block_start = block * TOKENS
    held = tl.minimum(count - block_start, TOKENS)

    lanes = tl.arange(0, ROWS)
    dims = tl.arange(0, WIDTH)
    tokens = lanes // GROUP
    heads = kv_head * GROUP + lanes % GROUP
    first_position = kv_len - count + block_start
    positions = first_position + tokens
    token_rows = (query_start + block_start + tokens).to(tl.int64) * (KV_HEADS * GROUP) + heads
    asked = token_rows[:, None] * HEAD_DIM + dims[None, :]
    wanted = (tokens < held)[:, None] & (dims < HEAD_DIM)[None, :]

    score_scale = scale_of_products(scale, key_scale, soft_cap, kv_head)
    block_queries = tl.load(queries + asked, mask=wanted, other=0.0)
    pages = page_table + row.to(tl.int64) * table_stride
    head_keys = keys + kv_head * (PAGE_SIZE * HEAD_DIM)
    head_values = values + kv_head * (PAGE_SIZE * HEAD_DIM)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, WIDTH], tl.float32)
    if window is None:
        masked_from = (first_position + 1) // KEYS * KEYS
        largest, total, weighted = attend(
            block_queries,
            positions,
            largest,
            total,
            weighted,
            0,
            masked_from,
            pages,
            head_keys,
            head_values,
            KV_HEADS * PAGE_SIZE * HEAD_DIM,
            score_scale,
            soft_cap,
            None,
            EDGES=False,
            HEAD_DIM=HEAD_DIM,
            WIDTH=WIDTH,
            PAGE_SIZE=PAGE_SIZE,
            KEYS=KEYS,
            COMPUTE=COMPUTE,
        )
    else:
        masked_from = tl.maximum(first_position - window + 1, 0) // KEYS * KEYS
    largest, total, weighted = attend(
        block_queries,
        positions,
        largest,
        total,
        weighted,
        masked_from,
        first_position + held,
        pages,
        head_keys,
        head_values,
        KV_HEADS * PAGE_SIZE * HEAD_DIM,
        score_scale,
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
        joining = tl.load(sinks + heads) * LOG2_E
        total, weighted = with_sinks(largest, total, weighted, joining)
    result = weighted / total[:, None]
    if value_scale is not None:
        result *= tl.load(value_scale + kv_head)
    tl.store(output + asked, result.to(output.dtype.element_ty), mask=wanted)
