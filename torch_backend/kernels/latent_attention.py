"""Attention over latent vectors (MLA, absorbed form): all heads of a token attend to one cached vector of each token
before it, whose first numbers are the values too.

One program attends with a block of queries, heads of a decode row or of a few tokens of a chunk, and reads each cached
vector once for keys and values. Keys are cut into splits, as in `decode_attention`, whose plan, partial results and
merge this uses; with many blocks, each has one split. A key is two parts, the latent vector and the rotated key behind
it, with a product each, so that neither is padded to the size of both. Heads beyond one block are further programs,
which find the vectors in the chip's cache. Vectors in 8 bits are multiplied as they are: the scales of a token multiply
its scores, and the weights of its value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from torch_backend.attention.interface import AttentionOptions
from torch_backend.kernels.attention_tiles import LOG2_E, TRITON_TYPES, check_options, load_pages, readable, widen
from torch_backend.kernels.chip import Chip
from torch_backend.kernels.decode_attention import merge_splits, split_keys
from torch_backend.kernels.dependent_launch import after_previous
from torch_backend.kernels.latent_plan import LatentPlan
from torch_backend.kv_pages import KVPages

_HEADS_MERGED = 4
"""Heads whose splits a program merges at a time: their sums of values, 512 numbers each, must fit into registers."""

_SMALLEST_DOT = 16


def latent_attention(
    queries: torch.Tensor,
    kv: KVPages,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    options: AttentionOptions,
    plan: LatentPlan,
    output: torch.Tensor,
    chip: Chip,
) -> None:
    """Computes attention of the tokens of `plan`, and writes no others; 0 for tokens of sequences without keys. Raises
    `ValueError` for options or shapes that the kernel does not support.

    `queries` `[T, heads, latent + rotary]`, contiguous; `kv`: pages of `latent + rotary` numbers of a token, in 8 bits
    with `latent_scales`;
    `page_table` int32 `[R, P]`; `kv_lens` int32 `[R]`; `output` `[T, heads, latent]`, contiguous.
    """
    check_options(queries, kv.keys, options)
    _, heads, latent = output.shape
    rotary = queries.shape[2] - latent
    if options.window is not None or options.soft_cap is not None or options.sinks is not None:
        raise ValueError("attention over latent vectors has no window, no soft cap and no sinks")
    if rotary < 1 or kv.keys.shape[1] != 1 or kv.keys.shape[3] != queries.shape[2]:
        raise ValueError(
            f"queries of {queries.shape[2]} numbers and outputs of {latent} do not fit pages {tuple(kv.keys.shape)}"
        )
    blocks, tile, splits = plan.form.blocks, plan.form.tile, plan.splits
    group = heads // blocks
    merged = next(size for size in range(min(_HEADS_MERGED, group), 0, -1) if group % size == 0)
    programs = min(splits.items.owners.shape[0] * blocks, chip.processors * tile.programs)
    latent_splits[(programs,)](
        queries,
        readable(kv.keys, chip),
        None if kv.latent_scales is None else kv.latent_scales.values,
        page_table,
        kv_lens,
        plan.places,
        splits.items.starts,
        splits.items.owners,
        splits.finished,
        plan.partials.weighted,
        plan.partials.sums,
        output,
        splits.items.starts.shape[0] - 1,
        page_table.stride(0),
        plan.partials.sums.stride(0),
        options.scale,
        BLOCKS=blocks,
        GROUP=group,
        TOKENS=plan.tokens,
        WIDTH=max(triton.next_power_of_2(plan.tokens * group), _SMALLEST_DOT),
        LATENT=latent,
        LATENT_WIDTH=max(triton.next_power_of_2(latent), _SMALLEST_DOT),
        ROTARY=rotary,
        ROTARY_WIDTH=max(triton.next_power_of_2(rotary), _SMALLEST_DOT),
        PAGE_SIZE=kv.page_size,
        KEYS=tile.keys,
        ROW_BOUND=splits.row_bound,
        MERGED=merged,
        MERGED_WIDTH=triton.next_power_of_2(merged),
        COMPUTE=TRITON_TYPES[queries.dtype],
        DEPENDENT=chip.dependent_launches,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=chip.dependent_launches,
    )


@triton.jit(
    do_not_specialize=["blocks", "table_stride", "sums_stride"],
    do_not_specialize_on_alignment=["page_table", "kv_lens", "places"],
)
def latent_splits(
    queries,
    latents,
    scales,
    page_table,
    kv_lens,
    places,
    starts,
    owners,
    finished,
    partial_weighted,
    partial_sums,
    output,
    blocks,
    table_stride,
    sums_stride,
    scale,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
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
    """Attends with blocks of `TOKENS` tokens and `GROUP` heads, over one split after the other: row r of a product is
    head `r % GROUP` of token `r // GROUP`. Blocks of heads change fastest over programs: concurrent programs read the
    same vectors. The last blocks of a chunk see the most keys, and come first."""
    HEADS: tl.constexpr = BLOCKS * GROUP
    lanes = tl.arange(0, WIDTH)
    dims = tl.arange(0, LATENT_WIDTH)
    turned = tl.arange(0, ROTARY_WIDTH)
    after_previous(DEPENDENT)
    items = tl.load(starts + blocks) * BLOCKS
    # LICM is off: loop invariants would be held through a split's tiles, and spill.
    for index in tl.range(tl.program_id(0), items, tl.num_programs(0), disable_licm=True):
        item = items - 1 - index
        place = item // BLOCKS
        of_heads = item % BLOCKS
        block = tl.load(owners + place)
        split = place - tl.load(starts + block)
        row, first_query, kv_len, held = place_in_step(block, blocks, places, kv_lens)
        first, length, count = split_keys(kv_len, None, ROW_BOUND)
        first += split * length
        tokens = lanes // GROUP
        inside = tokens * HEADS + lanes % GROUP
        here = tokens < held
        wanted = here[:, None] & (dims < LATENT)[None, :]
        asked = queries + (first_query.to(tl.int64) * HEADS + of_heads * GROUP) * (LATENT + ROTARY)
        asked += (inside * (LATENT + ROTARY))[:, None]
        largest, total, weighted = attend_latents(
            tl.load(asked + dims[None, :], mask=wanted, other=0.0),
            tl.load(asked + LATENT + turned[None, :], mask=here[:, None] & (turned < ROTARY)[None, :], other=0.0),
            None if TOKENS == 1 else kv_len - held + tokens,
            first,
            tl.minimum(first + length, kv_len),
            page_table + row.to(tl.int64) * table_stride,
            latents,
            scales,
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
            at = output + (first_query.to(tl.int64) * HEADS + of_heads * GROUP) * LATENT
            tl.store(at + (inside * LATENT)[:, None] + dims[None, :], result.to(output.dtype.element_ty), mask=wanted)
        else:
            entries = place.to(tl.int64) * (TOKENS * HEADS) + of_heads * GROUP + inside
            tl.store(partial_weighted + entries[:, None] * LATENT + dims[None, :], weighted, mask=wanted)
            tl.store(partial_sums + entries, largest, mask=here)
            tl.store(partial_sums + sums_stride + entries, total, mask=here)
            # One thread counts for the program, after all of its threads have stored; the last program sees the others'
            # stores.
            tl.debug_barrier()
            done = finished + block * BLOCKS + of_heads
            if tl.atomic_add(done, 1, sem="acq_rel") == count - 1:
                tl.store(done, 0)  # for the next layer
                PARTS: tl.constexpr = GROUP // MERGED
                for part in tl.range(0, held * PARTS):
                    merge_splits(
                        partial_weighted,
                        partial_sums,
                        place - split,
                        count,
                        block * 0,
                        part // PARTS * (HEADS // MERGED) + of_heads * PARTS + part % PARTS,
                        None,
                        None,
                        output + first_query.to(tl.int64) * (HEADS * LATENT),
                        sums_stride,
                        KV_HEADS=TOKENS * HEADS // MERGED,
                        GROUP=MERGED,
                        HEAD_DIM=LATENT,
                        WIDTH=LATENT_WIDTH,
                        ROW_BOUND=ROW_BOUND,
                        HEADS_MERGED=MERGED_WIDTH,
                    )
    # Blocks without keys, starting with the last programs, which have the fewest splits.
    for block in tl.range(tl.num_programs(0) - 1 - tl.program_id(0), blocks, tl.num_programs(0)):
        if tl.load(starts + block + 1) == tl.load(starts + block):
            _, first_query, _, held = place_in_step(block, blocks, places, kv_lens)
            begin = output + first_query.to(tl.int64) * (HEADS * LATENT)
            for some in range(0, held * (HEADS * LATENT), LATENT_WIDTH):
                nothing = tl.zeros([LATENT_WIDTH], output.dtype.element_ty)
                tl.store(begin + some + dims, nothing, mask=some + dims < held * (HEADS * LATENT))


@triton.jit
def place_in_step(block, blocks, places, kv_lens):
    """A block's entries of `LatentPlan.places`; without these, it is a decode row."""
    if places is None:
        return block, block, tl.load(kv_lens + block), 1
    else:
        at = places + block
        return tl.load(at), tl.load(at + blocks), tl.load(at + 2 * blocks), tl.load(at + 3 * blocks)


@triton.jit
def attend_latents(
    queries,
    rotated,
    positions,
    first,
    last,
    pages,
    latents,
    scales,
    score_scale,
    LATENT: tl.constexpr,
    LATENT_WIDTH: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTARY_WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """A softmax over the vectors `first : last` of one sequence: `largest`, `total` and `weighted`, as of
    `attention_tiles.attend`.

    `queries` `[M, LATENT_WIDTH]` and `rotated` `[M, ROTARY_WIDTH]` of dtype `COMPUTE`, 0 from `LATENT` and `ROTARY` on;
    `positions` `[M]`: the last vector that each sees, None for all; `first`: a multiple of `KEYS`; `pages`: the
    sequence's row of the page table; `scales`: see `LatentScales`, None for vectors that are not in 8 bits;
    `score_scale`: in units of log2(e).
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
        if scales is not None:
            of_tokens = scales + page.to(tl.int64) * (2 * PAGE_SIZE) + places % PAGE_SIZE
            of_latents = tl.load(of_tokens, mask=places < last, other=0.0)
            of_rotated = tl.load(of_tokens + PAGE_SIZE, mask=places < last, other=0.0)
        # Page numbers are read one tile ahead: see `attention_tiles.attend`.
        page = load_pages(pages, start + KEYS, last, PAGE_SIZE, KEYS)
        held = (places < last)[:, None]
        at = latents + slots[:, None]
        # Slots after the last vector may be NaN, also as values of weight 0.
        tile = widen(tl.load(at + dims[None, :], mask=held & (dims < LATENT)[None, :], other=0.0), COMPUTE)
        behind = tl.load(at + LATENT + turned[None, :], mask=held & (turned < ROTARY)[None, :], other=0.0)
        behind = widen(behind, COMPUTE)
        scores = tl.dot(queries, tl.trans(tile), input_precision="ieee")
        if scales is not None:
            scores *= of_latents[None, :]
            scores += tl.dot(rotated, tl.trans(behind), input_precision="ieee") * of_rotated[None, :]
        else:
            scores = tl.dot(rotated, tl.trans(behind), scores, input_precision="ieee")
        seen = (places < last)[None, :]
        if positions is not None:
            seen = seen & (places[None, :] <= positions[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1) * score_scale)
        base = new_largest
        if positions is not None:
            # A query may see no key of a split: infinities must not be subtracted from each other.
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores * score_scale - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        if scales is not None:
            # Larger by a power of two, so that small weights times small scales are numbers of float16.
            weights *= of_latents[None, :] * 256.0
        weighted = tl.dot(weights.to(COMPUTE), tile, weighted * shrink[:, None], input_precision="ieee")
        largest = new_largest
    if scales is not None:
        weighted *= 1.0 / 256.0
    return largest, total, weighted
