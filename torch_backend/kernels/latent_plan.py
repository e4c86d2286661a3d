"""Partitions the work of attention over latent vectors: the heads of a token, or tokens of a chunk with their heads,
into blocks, and the keys of a block into splits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from torch_backend.kernels.chip import Chip
from torch_backend.kernels.decode_attention import (
    DecodePlan,
    DecodeTile,
    Partials,
    plan_decode,
    shared_memory_of,
    splits_bound,
)
from torch_backend.kernels.extend_kernels import place_of_block
from torch_backend.kernels.extend_plan import plan_blocks
from torch_backend.kernels.work_items import WorkItems

_SHARED_OF_64_KEYS = 160 * 1024
"""Bytes of shared memory of multiprocessors that have room for 64 keys at a time, of 32 heads."""

_MAX_PARTIAL_BYTES = 256 * 2**20

_ENOUGH_PROGRAMS = 264
"""Blocks of a chunk that keep any chip busy: two on each multiprocessor of an H100."""


@dataclass(frozen=True, slots=True)
class LatentTile:
    """How programs process a row: `blocks` of heads, each in separate programs, and the tile of one."""

    blocks: int
    tile: DecodeTile


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """The work of a step's decode rows, or of its chunks, for layers of one number of heads. All of these layers use it
    one after the other.

    - `form`: blocks of heads, and the tile of a program.
    - `tokens`: of a block, 1 for decode rows.
    - `places`: int32 `[4, n]`: of each block of tokens its sequence, its first query, the keys that its last query
      sees, and its number of queries, 0 for blocks that are not used. None for decode rows: row i has query i.
    - `splits`: of the blocks of tokens, which take the place of rows, with blocks of heads for kv heads.
    - `partials`: results of splits, `[bound, tokens * heads, latent]`. They have no room if no block has two splits.
    """

    form: LatentTile
    tokens: int
    places: torch.Tensor | None
    splits: DecodePlan
    partials: Partials


def latent_tile(heads: int, pages: torch.dtype, chip: Chip) -> LatentTile:
    """The tile for `heads` heads over pages of a dtype. Blocks are of equal size, and as few as there can be.

    The sums of values take 512 registers a head, of all threads. Only Hopper's matrix unit has room for 64 heads: with
    the Blackwells' larger form of it, the compiler spills registers, and on others it takes as many instructions as 32
    heads twice. Neither has it if vectors in 8 bits are widened in registers. With 64 heads, 32 keys at a time and two
    tiles in flight fill the shared memory; with fewer, 64 keys take a quarter fewer instructions each than 32.
    """
    most = _rows_of(pages, chip)
    if pages == torch.float32:
        return LatentTile(_blocks(heads, most), DecodeTile(keys=16, warps=8, stages=2, programs=1))
    if most == 64 and heads > 32:
        return LatentTile(_blocks(heads, most), DecodeTile(keys=32, warps=8, stages=3, programs=1))
    few = shared_memory_of(chip) < _SHARED_OF_64_KEYS
    tile = DecodeTile(32 if few else 64, warps=8, stages=2, programs=2 if heads <= 16 else 1)
    return LatentTile(_blocks(heads, 32), tile)


def chunk_tile(heads: int, pages: torch.dtype, chip: Chip) -> tuple[LatentTile, int]:
    """The tile for chunks, and the tokens of a block: with their heads, they are as many rows as there is room for."""
    most = _rows_of(pages, chip)
    blocks = _blocks(heads, most)
    return LatentTile(blocks, latent_tile(most, pages, chip).tile), most // (heads // blocks)


def _rows_of(pages: torch.dtype, chip: Chip) -> int:
    if pages == torch.float32:
        return 16
    return 64 if chip.capability == 90 and pages.itemsize > 1 else 32


def _blocks(heads: int, most: int) -> int:
    return next(blocks for blocks in range(-(-heads // most), heads + 1) if heads % blocks == 0)


def plan_latent_decode(
    kv_lens: torch.Tensor, num_decode: int, longest: int, heads: int, latent: int, pages: torch.dtype, chip: Chip
) -> LatentPlan:
    """Cuts the keys of the first `num_decode` rows into splits. `kv_lens` int32 `[R]`; `longest`: maximum length;
    `pages`: their dtype."""
    form = latent_tile(heads, pages, chip)
    bound = _split_bound(num_decode, form.blocks, heads, latent)
    splits = plan_decode(kv_lens, num_decode, longest, form.blocks, None, bound)
    return LatentPlan(form, 1, None, splits, _partials(splits, heads, latent))


def plan_latent_chunks(
    query_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    num_decode: int,
    num_tokens: int,
    longest: int,
    heads: int,
    latent: int,
    pages: torch.dtype,
    chip: Chip,
) -> LatentPlan:
    """Cuts the tokens of the sequences from `num_decode` on into blocks, and the keys of each into splits if there are
    few blocks. `query_starts` int32 `[R + 1]`; `num_tokens`: of all sequences; the rest as in `plan_latent_decode`."""
    form, tokens = chunk_tile(heads, pages, chip)
    rows = query_starts.shape[0] - 1 - num_decode
    # Every block is full except the last one of each sequence.
    count = max((num_tokens - num_decode) // tokens + rows, 1)
    blocks = WorkItems.allocate(rows, count, query_starts.device)
    plan_blocks[(rows,)](
        blocks.starts, blocks.owners, query_starts, rows, num_decode, TOKENS=tokens, BLOCK=128, num_warps=1
    )
    places = torch.empty(4, count, dtype=torch.int32, device=query_starts.device)
    place_blocks[(count,)](
        places, blocks.starts, blocks.owners, query_starts, kv_lens, rows, num_decode, count, TOKENS=tokens, num_warps=1
    )
    bound = 1 if count * form.blocks >= _ENOUGH_PROGRAMS else _split_bound(count, form.blocks, tokens * heads, latent)
    splits = plan_decode(places[2], count, longest, form.blocks, None, bound)
    return LatentPlan(form, tokens, places, splits, _partials(splits, tokens * heads, latent))


def _split_bound(blocks: int, head_blocks: int, rows: int, latent: int) -> int:
    """Maximum splits of each of `blocks`, of `rows` queries each: fewer if their results would take too much memory."""
    bound = splits_bound(head_blocks)
    while bound > 1 and 4 * blocks * bound * rows * latent > _MAX_PARTIAL_BYTES:
        bound = max(bound // 4, 1)
    return bound


def _partials(splits: DecodePlan, rows: int, latent: int) -> Partials:
    items = splits.items.owners
    bound = items.shape[0] if splits.row_bound > 1 else 0
    weighted = torch.empty(bound, rows, latent, dtype=torch.float32, device=items.device)
    return Partials(weighted, torch.empty(2, bound, rows, dtype=torch.float32, device=items.device))


@triton.jit(
    do_not_specialize=["rows", "num_decode", "count"], do_not_specialize_on_alignment=["query_starts", "kv_lens"]
)
def place_blocks(places, starts, owners, query_starts, kv_lens, rows, num_decode, count, TOKENS: tl.constexpr):
    """One program per block writes its entries of `LatentPlan.places`."""
    place = tl.program_id(0)
    row, first_query, seen, held = place * 0, place * 0, place * 0, place * 0
    if place < tl.load(starts + rows):
        item_row = tl.load(owners + place)
        row = item_row + num_decode
        block = place - tl.load(starts + item_row)
        first_query, first_position, held = place_of_block(row, block, query_starts, kv_lens, TOKENS)
        # Sequences of length 0 are padding: their queries see no key.
        seen = tl.maximum(first_position + held, 0)
    tl.store(places + place, row)
    tl.store(places + count + place, first_query)
    tl.store(places + 2 * count + place, seen)
    tl.store(places + 3 * count + place, held)
