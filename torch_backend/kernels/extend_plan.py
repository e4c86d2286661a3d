"""Partitions the work of prefill chunks: tokens of a sequence into blocks, the keys of a block into splits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from torch_backend.kernels.chip import Chip
from torch_backend.kernels.work_items import WorkItems, write_items

SPLIT = 2048
"""Keys of a split, a multiple of every tile. Between two splits a program reads and writes its block's sums, which
takes about as long as one of the 32 tiles of a split (an estimate); shorter splits would keep more programs busy."""

_LARGEST_SPLIT_HEAD = 128
"""Larger heads are not split: a block's sums fill the registers, with no room for those of another split."""

_MAX_PARTIAL_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class ExtendTile:
    """How one program processes its keys: `rows` of queries, tokens times heads of a kv head, and `keys` of a tile,
    both powers of two; Triton's `warps` and `stages`."""

    rows: int
    keys: int
    warps: int
    stages: int

    def tokens(self, group: int) -> int:
        """Tokens of a block if `group` query heads share a kv head."""
        return self.rows // group


def extend_tile(head_dim: int, pages: torch.dtype, chip: Chip, values: torch.dtype | None = None) -> ExtendTile:
    """The largest tile that fits into registers, for a head size and a dtype of pages, or of keys and another of
    values.

    128 rows and 8 warps are two warp groups of Hopper's matrix unit. Registers limit the rest: at 128 dimensions a
    thread holds 64 accumulators and 32 scores. Matrix units other than those of Hopper and the data-centre Blackwells
    need queries, keys and values in registers too; float8 is widened in registers on all.
    """
    values = values or pages
    if values == torch.float32:
        return ExtendTile(rows=16, keys=16, warps=4, stages=2)
    widens = values.itemsize == 1
    reads_shared = chip.capability // 10 in (9, 10)
    if head_dim > 128:
        rows = 128 if chip.capability == 90 and pages.itemsize > 1 else 64
        if values == torch.int8 and not reads_shared:
            rows = 32
        return ExtendTile(rows=rows, keys=32, warps=8, stages=3 if widens else 2)
    wide = (reads_shared or head_dim <= 64) and values != torch.int8
    # Compiled for these chips, 128 rows of int8 queries spill, with any number of keys and stages.
    rows = 64 if pages == torch.int8 and chip.capability in (89, 120) else 128
    return ExtendTile(rows=rows, keys=64 if wide else 32, warps=8, stages=3)


@dataclass(frozen=True, slots=True)
class ExtendForm:
    """Properties of a layer on which the partition depends. `window`: as in `AttentionOptions`; `tile`: of its
    programs."""

    kv_heads: int
    group: int
    head_dim: int
    window: int | None
    tile: ExtendTile

    @property
    def tokens(self) -> int:
        return self.tile.tokens(self.group)


@dataclass(frozen=True, slots=True)
class ExtendPlan:
    """The work of a step's sequences after the decode rows, for layers of one form.

    - `blocks`: an item for each block of tokens.
    - `splits`: an item for each split of each block, block by block, if there are so few blocks that programs share
      their keys; else None: one program processes all splits of a block.
    - `split`: keys of a split; None if every sequence fits into one, or heads are too large to be split.
    """

    form: ExtendForm
    blocks: WorkItems
    splits: WorkItems | None
    split: int | None


def plan_extend(
    query_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    num_decode: int,
    num_tokens: int,
    longest: int,
    form: ExtendForm,
    chip: Chip,
) -> ExtendPlan:
    """Cuts the sequences from `num_decode` on into blocks, and their keys into splits. `query_starts` int32 `[R + 1]`,
    `kv_lens` int32 `[R]`; `num_tokens`: of all; `longest`: maximum length."""
    rows = query_starts.shape[0] - 1 - num_decode
    # Every block is full except the last one of each sequence.
    bound = (num_tokens - num_decode) // form.tokens + rows
    split = SPLIT if longest > SPLIT and form.head_dim <= _LARGEST_SPLIT_HEAD else None
    most = 1 if split is None else _most_splits(longest, num_tokens, form.window)
    blocks, splits = WorkItems.allocate(rows, bound, query_starts.device), None
    plan_blocks[(rows,)](
        blocks.starts, blocks.owners, query_starts, rows, num_decode, TOKENS=form.tokens, BLOCK=128, num_warps=1
    )
    if most > 1 and _splitting_pays(bound, most, form, chip):
        splits = WorkItems.allocate(rows, bound * most, query_starts.device)
        plan_block_splits[(rows,)](
            splits.starts,
            splits.owners,
            query_starts,
            kv_lens,
            rows,
            num_decode,
            form.window,
            TOKENS=form.tokens,
            SPLIT=split,
            BLOCK=128,
            num_warps=1,
        )
    return ExtendPlan(form, blocks, splits, split)


def _most_splits(longest: int, num_tokens: int, window: int | None) -> int:
    """Maximum number of splits that the tokens of one sequence see."""
    most = -(-longest // SPLIT)
    return most if window is None else min(most, -(-(num_tokens + window) // SPLIT) + 1)


def _splitting_pays(blocks: int, splits: int, form: ExtendForm, chip: Chip) -> bool:
    """Whether blocks use at most half of the chip, and the splits' sums fit. Results are the same bits either way."""
    programs = blocks * form.kv_heads
    sum_bytes = 4 * programs * splits * form.tile.rows * triton.next_power_of_2(form.head_dim)
    return 2 * programs <= chip.processors and sum_bytes <= _MAX_PARTIAL_BYTES


@triton.jit
def splits_of_row(kv_len, count, window, SPLIT: tl.constexpr):
    """The first split that any of the last `count` tokens of a sequence sees, and the number of splits from it on."""
    first = kv_len * 0
    if window is not None:
        first = tl.maximum(kv_len - count - window + 1, 0) // SPLIT
    return first, tl.cdiv(kv_len, SPLIT) - first


@triton.jit(do_not_specialize=["rows", "num_decode"], do_not_specialize_on_alignment=["query_starts"])
def plan_blocks(starts, owners, query_starts, rows, num_decode, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """One program per sequence counts the blocks before it: `[rows + 1]` starts and `[bound]` owners."""
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


@triton.jit(do_not_specialize=["rows", "num_decode"], do_not_specialize_on_alignment=["query_starts", "kv_lens"])
def plan_block_splits(
    starts,
    owners,
    query_starts,
    kv_lens,
    rows,
    num_decode,
    window,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As `plan_blocks` for splits: each block has as many as its sequence."""
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    ends = query_starts + num_decode + 1
    lens = kv_lens + num_decode
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, row, BLOCK):
        others = start + lanes
        begin = tl.load(ends + others - 1, mask=others < row, other=0)
        end = tl.load(ends + others, mask=others < row, other=0)
        _, splits = splits_of_row(tl.load(lens + others, mask=others < row, other=0), end - begin, window, SPLIT)
        counts += tl.cdiv(end - begin, TOKENS) * splits
    queries = tl.load(ends + row) - tl.load(ends + row - 1)
    _, splits = splits_of_row(tl.load(lens + row), queries, window, SPLIT)
    write_items(starts, owners, row, rows, tl.sum(counts, 0), tl.cdiv(queries, TOKENS) * splits, BLOCK)
