"""Writes a step's keys and values into pages in place on TPU. Memory is written in tiles of 8 to 32 token slots of a
head: the kernel reads a tile, replaces a token's row and writes it back; a tile whose slots are all new is not read.

The kernel runs just before attention and is not fused with it. That would save one launch and the read of a decode
row's tile (8 of the 1000 or more slots that attention reads, under one per cent), but its walk over pages would have to
wait for its own writes, and prefill programs would write pages that other programs of the same call read.
"""

from __future__ import annotations

import functools
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sglang_jax.kernels.kv_storage import LANES, rows_of_pages

Ref = Any
"""A Pallas reference to memory; its type is not public."""

_TOKENS_PER_PROGRAM = 128
_LONGEST_TILE = 32
_PAGE, _TILE, _ROW, _OFFSET, _COUNT, _TOTALS = range(6)
_LINES = 6
"""Rows of the result of `find_runs`. They hold quotients, because a scalar division takes as long as a copy's start."""


def write_kv_on_tpu(
    kv_pages: jax.Array,
    keys: jax.Array,
    values: jax.Array | None,
    runs: jax.Array,
    kv_scales: jax.Array | None = None,
    *,
    checked: bool = False,
    vmem_limit: int | None = None,
) -> jax.Array:
    """`kv_storage.write_kv` into tiled pages; slots of page 0 are not written. `runs`: see `find_runs`; `checked`:
    compile address checks in; `vmem_limit`: bytes of vector memory, None for the compiler's default."""
    rows = rows_of_pages(kv_pages, keys, values, kv_scales)
    if kv_pages.dtype.itemsize == 1:
        rows = rows.astype(jnp.bfloat16)
    rows = rows.transpose(1, 2, 0, 3)
    return write_kv_tiles(kv_pages, rows, runs, tile=_tile_of(kv_pages), checked=checked, vmem_limit=vmem_limit)


def find_runs(
    kv_pages: jax.Array, write_slots: jax.Array, checked: bool = False, vmem_limit: int | None = None
) -> jax.Array:
    """Finds runs of tokens that share a tile of a page, once a step for all layers that share page ids. Tokens that
    write into one tile must follow each other, in the order of their slots, as those of a sequence do.

    `kv_pages`: the pages of one of the layers, for their shape and type; `write_slots` int32 `[T]`, `page * page_size +
    offset`; `checked`, `vmem_limit`: see `write_kv_on_tpu`. Returns int32 `[programs, 6, tokens per program]`. Rows 0
    to 4 describe each run: its page, the page slot at which its tile starts, the token index (perhaps of another run)
    that would lie in that slot, the run's offset in the tile, its number of tokens. Row 5 holds the number of runs and
    of those that do not fill their tile.
    """
    tokens = write_slots.shape[0]
    width = _tokens_of_a_program(kv_pages, tokens, vmem_limit)
    slots = jnp.pad(write_slots, (0, -tokens % width)).reshape(-1, 1, width)
    return pl.pallas_call(
        functools.partial(_find_runs, tile=_tile_of(kv_pages), page_size=kv_pages.shape[3]),
        grid=(slots.shape[0],),
        in_specs=[pl.BlockSpec((None, 1, width), lambda program: (program, 0, 0), memory_space=pltpu.SMEM)],
        out_specs=pl.BlockSpec((None, _LINES, width), lambda program: (program, 0, 0), memory_space=pltpu.SMEM),
        out_shape=jax.ShapeDtypeStruct((slots.shape[0], _LINES, width), jnp.int32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), disable_bounds_checks=not checked),
        name="kv_write_runs",
    )(slots)


def _tile_of(kv_pages: jax.Array) -> int:
    """Slots that are written together: the second last dimension of the memory's tiles."""
    return min(8 if kv_pages.dtype.itemsize > 1 else 32, kv_pages.shape[3])


def _tokens_of_a_program(kv_pages: jax.Array, tokens: int, vmem_limit: int | None) -> int:
    """As many whole tiles as fit: with 32 kv heads, 128 tokens take 26 MiB, in 8 bits 42 MiB."""
    width = min(_TOKENS_PER_PROGRAM, -(-tokens // _LONGEST_TILE) * _LONGEST_TILE)
    while vmem_limit is not None and width > _LONGEST_TILE and vmem_bytes(kv_pages, width) > vmem_limit * 3 // 4:
        width -= _LONGEST_TILE
    return width


def vmem_bytes(kv_pages: jax.Array, width: int) -> int:
    """Vector memory for programs of `width` tokens: rows of two programs in 16 bits or more, the same in 32 bits, and a
    tile for each token."""
    _, kv_heads, parts, _, lanes = kv_pages.shape
    size = kv_pages.dtype.itemsize
    of_a_token = 2 * max(size, 2) + 4 + _tile_of(kv_pages) * size
    return kv_heads * parts * lanes * (width * of_a_token + 2 * _LONGEST_TILE * 4)


def _find_runs(
    slots: Ref,  # SMEM [1, tokens]
    runs: Ref,  # SMEM [6, tokens]
    *,
    tile: int,
    page_size: int,
) -> None:
    width = slots.shape[1]

    def run_length(first: jax.Array) -> jax.Array:
        slot = slots[0, first]
        longest = jnp.minimum(tile - slot % tile, width - first)
        whole = slots[0, first + longest - 1] == slot + longest - 1
        return jax.lax.while_loop(
            lambda count: (count < longest) & (slots[0, jnp.minimum(first + count, width - 1)] == slot + count),
            lambda count: count + 1,
            jnp.where(whole, longest, 1),
        )

    def find_run(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        first, run, partial = state
        count = run_length(first)
        real = slots[0, first] >= page_size

        @pl.when(real)
        def _() -> None:
            slot = slots[0, first]
            offset = slot % tile
            runs[_PAGE, run] = slot // page_size
            runs[_TILE, run] = slot % page_size - offset
            runs[_ROW, run] = first - offset
            runs[_OFFSET, run] = offset
            runs[_COUNT, run] = count

        return first + count, run + real.astype(jnp.int32), partial + (real & (count < tile)).astype(jnp.int32)

    zero = jnp.int32(0)
    _, num_runs, partial = jax.lax.while_loop(lambda state: state[0] < width, find_run, (zero, zero, zero))
    runs[_TOTALS, 0] = num_runs
    runs[_TOTALS, 1] = partial


def write_kv_tiles(
    kv_pages: jax.Array,
    rows: jax.Array,
    runs: jax.Array,
    *,
    tile: int,
    checked: bool = False,
    vmem_limit: int | None = None,
) -> jax.Array:
    """Stores `rows` `[kv_heads, parts, T, lanes]`, one per token, head and part, with values that the pages' type
    represents exactly, as float32 or bfloat16, in place if `kv_pages` are donated. Slots of page 0 are not written.
    `runs`: see `find_runs`; `tile`: slots that are written together; `vmem_limit`: see `write_kv_on_tpu`."""
    kv_heads, parts, tokens, lanes = rows.shape
    programs, _, width = runs.shape
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, programs * width - tokens), (0, 0)))
    return pl.pallas_call(
        functools.partial(_kernel, tile=tile),
        grid=(programs,),
        in_specs=[
            pl.BlockSpec((None, _LINES, width), lambda program: (program, 0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec((kv_heads, parts, width, lanes), lambda program: (0, 0, program, 0)),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[
            pltpu.VMEM((kv_heads, parts, lanes // LANES, width + 2 * _LONGEST_TILE, LANES), jnp.float32),
            pltpu.VMEM((width, kv_heads, parts, tile, lanes), kv_pages.dtype),
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA,
        ],
        out_shape=jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        input_output_aliases={2: 0},
        # Sequential: a run that continues in the next program makes both write the same tile.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem_limit, disable_bounds_checks=not checked
        ),
        name="kv_write",
    )(runs, rows, kv_pages)


def _kernel(
    runs: Ref,  # SMEM [6, tokens]
    rows: Ref,  # VMEM [kv_heads, parts, tokens, lanes]
    _: Ref,
    kv_pages: Ref,  # HBM [num_pages, kv_heads, parts, page_size, lanes]
    wide_rows: Ref,  # VMEM float32 [kv_heads, parts, lanes / 128, tokens + 2 * _LONGEST_TILE, 128]
    tiles: Ref,  # VMEM [tokens, kv_heads, parts, tile, lanes]
    read: Ref,
    written: Ref,
    *,
    tile: int,
) -> None:
    kv_heads, parts, width, lanes = rows.shape
    columns = [slice(first, first + LANES) for first in range(0, lanes, LANES)]
    num_runs, partial = runs[_TOTALS, 0], runs[_TOTALS, 1]

    def tile_of(run: jax.Array) -> Any:
        return kv_pages.at[runs[_PAGE, run], :, :, pl.ds(pl.multiple_of(runs[_TILE, run], tile), tile)]

    @pl.loop(0, num_runs)
    def _(run: jax.Array) -> None:
        @pl.when(runs[_COUNT, run] < tile)
        def _() -> None:
            pltpu.make_async_copy(tile_of(run), tiles.at[run], read).start()

    for head, part in product(range(kv_heads), range(parts)):
        for column, mine in enumerate(columns):
            # Only rows of 128 lanes of 32 bits can be loaded from any start row.
            narrow = rows[head, part, :, mine]
            wide_rows[head, part, column, pl.ds(_LONGEST_TILE, width)] = narrow.astype(jnp.float32)

    @pl.loop(0, partial)
    def _(_: jax.Array) -> None:
        pltpu.make_async_copy(tiles.at[0], tiles.at[0], read).wait()

    @pl.loop(0, num_runs)
    def _(run: jax.Array) -> None:
        first, offset, count = runs[_ROW, run], runs[_OFFSET, run], runs[_COUNT, run]
        place = jax.lax.broadcasted_iota(jnp.int32, (tile, LANES), 0)
        new = (place >= offset) & (place < offset + count)
        for head, part in product(range(kv_heads), range(parts)):
            for column, mine in enumerate(columns):
                fresh = wide_rows[head, part, column, pl.ds(_LONGEST_TILE + first, tile)]
                old = tiles[run, head, part, :, mine]
                tiles[run, head, part, :, mine] = jnp.where(new, fresh.astype(tiles.dtype), old)
        pltpu.make_async_copy(tiles.at[run], tile_of(run), written).start()

    @pl.loop(0, num_runs)
    def _(_: jax.Array) -> None:
        pltpu.make_async_copy(tiles.at[0], tiles.at[0], written).wait()
