"""Attention of decode rows over latent vectors (MLA, absorbed form): one query of each head, over one cached vector of
a token for all heads, whose first numbers are the values too.

A row's keys are cut into splits, as in `decode_attention`, whose plan, partial results and merge this uses. One program
attends with a block of heads, and reads each cached vector once for keys and values. A key is two parts, the latent
vector and the rotated key behind it, with a product each, so that neither is padded to the size of both. Heads beyond
one block are further programs, which find the vectors in the chip's cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from torch_backend.attention.interface import AttentionOptions
from torch_backend.kernels.attention_tiles import LOG2_E, TRITON_TYPES, check_options, load_pages
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.decode_attention import (
    DecodePlan,
    DecodeTile,
    Partials,
    merge_splits,
    plan_decode,
    shared_memory_of,
    split_keys,
    zero_padding,
)
from torch_backend.kernels.dependent_launch import after_previous
from torch_backend.kv_pages import KVPages

_HEADS_MERGED = 4
"""Heads whose splits a program merges at a time: their sums of values, 512 numbers each, must fit into registers."""

_SMALLEST_DOT = 16

_SHARED_OF_64_KEYS = 160 * 1024
"""Bytes of shared memory of multiprocessors that have room for 64 keys at a time, of 32 heads."""


@dataclass(frozen=True, slots=True)
class LatentTile:
    """How programs process a row: `blocks` of heads, each in separate programs, and the tile of one."""

    blocks: int
    tile: DecodeTile


def latent_tile(heads: int, pages: torch.dtype, chip: Chip) -> LatentTile:
    """The tile for `heads` heads over pages of a dtype. Blocks are of equal size, and as few as there can be.

    The sums of values take 512 registers a head, of all threads. Only Hopper's matrix unit has room for 64 heads: with
    the Blackwells' larger form of it, the compiler spills registers, and on others it takes as many instructions as 32
    heads twice. With 64 heads, 32 keys at a time and two tiles in flight fill the shared memory; with fewer, 64 keys
    take a quarter fewer instructions each than 32.
    """
    if pages == torch.float32:
        return LatentTile(_blocks(heads, 16), DecodeTile(keys=16, warps=8, stages=2, programs=1))
    if chip.capability == 90 and heads > 32:
        return LatentTile(_blocks(heads, 64), DecodeTile(keys=32, warps=8, stages=3, programs=1))
    blocks = _blocks(heads, 32)
    few = shared_memory_of(chip) < _SHARED_OF_64_KEYS
    return LatentTile(blocks, DecodeTile(32 if few else 64, warps=8, stages=2, programs=2 if heads <= 16 else 1))


def _blocks(heads: int, most: int) -> int:
    return next(blocks for blocks in range(-(-heads // most), heads + 1) if heads % blocks == 0)


def plan_latent_decode(
    kv_lens: torch.Tensor, num_decode: int, longest: int, heads: int, pages: torch.dtype, chip: Chip
) -> DecodePlan:
    """See `plan_decode`: blocks of heads take the place of kv heads."""
    return plan_decode(kv_lens, num_decode, longest, latent_tile(heads, pages, chip).blocks, None)


def decode_latents(
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
    """Computes attention of the rows of `plan`. Raises `ValueError` for options or shapes that the kernel does not
    support.

    `queries` `[R, heads, latent + rotary]`, contiguous; `kv`: pages of `latent + rotary` numbers of a token;
    `page_table` int32 `[R, P]`; `kv_lens` int32 `[R]`; `output` `[R, heads, latent]`, contiguous: 0 for a row without
    keys.
    """
    check_options(queries, kv.keys, options)
    rows, heads, latent = output.shape
    rotary = queries.shape[2] - latent
    if options.window is not None or options.soft_cap is not None or options.sinks is not None:
        raise ValueError("attention over latent vectors has no window, no soft cap and no sinks")
    if rotary < 1 or kv.keys.shape[1] != 1 or kv.keys.shape[3] != queries.shape[2]:
        raise ValueError(
            f"queries of {queries.shape[2]} numbers and outputs of {latent} do not fit pages {tuple(kv.keys.shape)}"
        )
    form = latent_tile(heads, kv.keys.dtype, chip)
    blocks, tile = form.blocks, form.tile
    group = heads // blocks
    width = max(triton.next_power_of_2(group), _SMALLEST_DOT)
    merged = next(size for size in range(min(_HEADS_MERGED, group), 0, -1) if group % size == 0)
    programs = min(plan.items.owners.shape[0] * blocks, chip.processors * tile.programs)
    decode_latent_splits[(programs,)](
        queries,
        kv.keys,
        page_table,
        kv_lens,
        plan.items.starts,
        plan.items.owners,
        plan.finished,
        partials.weighted,
        partials.sums,
        output,
        rows,
        page_table.stride(0),
        partials.sums.stride(0),
        options.scale,
        BLOCKS=blocks,
        GROUP=group,
        GROUP_WIDTH=width,
        LATENT=latent,
        LATENT_WIDTH=max(triton.next_power_of_2(latent), _SMALLEST_DOT),
        ROTARY=rotary,
        ROTARY_WIDTH=max(triton.next_power_of_2(rotary), _SMALLEST_DOT),
        PAGE_SIZE=kv.page_size,
        KEYS=tile.keys,
        ROW_BOUND=plan.row_bound,
        MERGED=merged,
        MERGED_WIDTH=triton.next_power_of_2(merged),
        COMPUTE=TRITON_TYPES[queries.dtype],
        DEPENDENT=chip.dependent_launches,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=chip.dependent_launches,
    )


@triton.jit(
    do_not_specialize=["rows", "table_stride", "sums_stride"], do_not_specialize_on_alignment=["page_table", "kv_lens"]
)
def decode_latent_splits(
    queries,
    latents,
    page_table,
    kv_lens,
    starts,
    owners,
    finished,
    partial_weighted,
    partial_sums,
    output,
    rows,
    table_stride,
    sums_stride,
    scale,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_WIDTH: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    ROW_BOUND: tl.constexpr,
    MERGED: tl.constexpr,
    MERGED_WIDTH: tl.constexpr,
    COMPUTE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Attends with the `GROUP` queries of one block of heads over one split after the other. Blocks change fastest over
    programs: concurrent programs read the same vectors."""
    HEADS: tl.constexpr = BLOCKS * GROUP
    lanes = tl.arange(0, GROUP_WIDTH)
    dims = tl.arange(0, LATENT_WIDTH)
    turned = tl.arange(0, ROTARY_WIDTH)
    real = (lanes < GROUP)[:, None]
    wanted = real & (dims < LATENT)[None, :]
    after_previous(DEPENDENT)
    # LICM is off: loop invariants would be held through a split's tiles, and spill.
    for item in tl.range(tl.program_id(0), tl.load(starts + rows) * BLOCKS, tl.num_programs(0), disable_licm=True):
        place = item // BLOCKS
        block = item % BLOCKS
        row = tl.load(owners + place)
        split = place - tl.load(starts + row)
        kv_len = tl.load(kv_lens + row)
        first, length, count = split_keys(kv_len, None, ROW_BOUND)
        first += split * length
        heads = block * GROUP + lanes
        asked = queries + ((row * HEADS + heads) * (LATENT + ROTARY))[:, None]
        largest, total, weighted = attend_latents(
            tl.load(asked + dims[None, :], mask=wanted, other=0.0),
            tl.load(asked + LATENT + turned[None, :], mask=real & (turned < ROTARY)[None, :], other=0.0),
            first,
            tl.minimum(first + length, kv_len),
            page_table + row.to(tl.int64) * table_stride,
            latents,
            scale * LOG2_E,
            LATENT=LATENT,
            LATENT_WIDTH=LATENT_WIDTH,
            ROTARY=ROTARY,
            ROTARY_WIDTH=ROTARY_WIDTH,
            PAGE_SIZE=PAGE_SIZE,
            KEYS=KEYS,
            COMPUTE=COMPUTE,
        )
        if count == 1:
            result = weighted / total[:, None]
            at = output + ((row * HEADS + heads) * LATENT)[:, None] + dims[None, :]
            tl.store(at, result.to(output.dtype.element_ty), mask=wanted)
        else:
            entries = place.to(tl.int64) * HEADS + heads
            tl.store(partial_weighted + entries[:, None] * LATENT + dims[None, :], weighted, mask=wanted)
            tl.store(partial_sums + entries, largest, mask=lanes < GROUP)
            tl.store(partial_sums + sums_stride + entries, total, mask=lanes < GROUP)
            # One thread counts for the program, after all of its threads have stored; the last program sees the others'
            # stores.
            tl.debug_barrier()
            done = finished + row * BLOCKS + block
            if tl.atomic_add(done, 1, sem="acq_rel") == count - 1:
                tl.store(done, 0)  # for the next layer
                for part in tl.range(0, GROUP // MERGED):
                    merge_splits(
                        partial_weighted,
                        partial_sums,
                        place - split,
                        count,
                        row,
                        block * (GROUP // MERGED) + part,
                        None,
                        None,
                        output,
                        sums_stride,
                        KV_HEADS=HEADS // MERGED,
                        GROUP=MERGED,
                        HEAD_DIM=LATENT,
                        WIDTH=LATENT_WIDTH,
                        ROW_BOUND=ROW_BOUND,
                        HEADS_MERGED=MERGED_WIDTH,
                    )
    zero_padding(starts, output, rows, HEADS=HEADS, HEAD_DIM=LATENT, WIDTH=LATENT_WIDTH)


@triton.jit
def attend_latents(
    queries,
    rotated,
    first,
    last,
    pages,
    latents,
    score_scale,
    LATENT: tl.constexpr,
    LATENT_WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """A softmax over the vectors `first : last` of one sequence, all of which the queries see: `largest`, `total` and
    `weighted`, as of `attention_tiles.attend`.

    `queries` `[M, LATENT_WIDTH]` and `rotated` `[M, ROTARY_WIDTH]` of dtype `COMPUTE`, 0 from `LATENT` and `ROTARY` on;
    `first`: a multiple of `KEYS`; `pages`: the sequence's row of the page table; `score_scale`: in units of log2(e).
    """
    lanes = tl.arange(0, KEYS)
    dims = tl.arange(0, LATENT_WIDTH)
    turned = tl.arange(0, ROTARY_WIDTH)
    largest = tl.full([queries.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([queries.shape[0]], tl.float32)
    weighted = tl.zeros([queries.shape[0], LATENT_WIDTH], tl.float32)
    page = load_pages(pages, first, last, PAGE_SIZE, KEYS)
    for start in range(first, last, KEYS):
        places = start + lanes
        slots = (page.to(tl.int64) * PAGE_SIZE + places % PAGE_SIZE) * (LATENT + ROTARY)
        # Page numbers are read one tile ahead: see `attention_tiles.attend`.
        page = load_pages(pages, start + KEYS, last, PAGE_SIZE, KEYS)
        held = (places < last)[:, None]
        at = latents + slots[:, None]
        # Slots after the last vector may be NaN, also as values of weight 0.
        tile = tl.load(at + dims[None, :], mask=held & (dims < LATENT)[None, :], other=0.0).to(COMPUTE)
        behind = tl.load(at + LATENT + turned[None, :], mask=held & (turned < ROTARY)[None, :], other=0.0).to(COMPUTE)
        scores = tl.dot(queries, tl.trans(tile), input_precision="ieee")
        scores = tl.dot(rotated, tl.trans(behind), scores, input_precision="ieee")
        scores = tl.where((places < last)[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1) * score_scale)
        weights = tl.exp2(scores * score_scale - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weights, 1)
        weighted = tl.dot(weights.to(COMPUTE), tile, weighted * shrink[:, None], input_precision="ieee")
        largest = new_largest
    return largest, total, weighted
