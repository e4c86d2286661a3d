"""Gathering the rows of experts' tiles in vector memory on TPUs, and adding their outputs up for each token: parts of
kernels whose tokens, or sums, stay there from tile to tile, and kernels that only gather or add.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sglang_jax.kernels.expert_tiles import LEAST_ROWS, PACKED_TOGETHER, TOGETHER, SortedTiles, apart, halves_of, padded
from sglang_jax.kernels.kv_storage import LANES
from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import CORES, VMEM_LIMITS, current_chip

Ref = Any
"""A Pallas reference to memory; its type is not public."""

_BFLOAT16, _FLOAT32 = jnp.bfloat16, jnp.float32


def gather_rows(x: jax.Array, tiles: SortedTiles, *, interpret: bool = False) -> jax.Array:
    """The tokens of all rows, bfloat16 `[tiles * rows, hidden]`; rows that are not filled are undefined. `x`: bfloat16
    `[T, hidden]`."""
    hidden, rows, count = x.shape[1], tiles.rows, len(tiles.experts)
    x = in_whole_tiles(x)

    def kernel(
        experts: Ref, used: Ref, filled: Ref, begin: Ref, tokens: Ref, scores: Ref, x: Ref, found: Ref, *kept: Ref
    ) -> None:
        words, blocks, copied, own = kept
        tile = pl.program_id(0)
        pl.when(tile == 0)(lambda: pack(x, words, blocks, copied))

        @pl.when(tile < used[0])
        def _() -> None:
            found[...] = gathered(words, own, tokens, begin[tile], filled[tile], rows)[:, :hidden]

    return call_of_tiles(
        kernel,
        tiles,
        grid=(count,),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec((rows, hidden), lambda tile, experts, used, *_: (last_used(tile, used), 0)),
        out_shape=jax.ShapeDtypeStruct((count * rows, hidden), _BFLOAT16),
        scratch_shapes=packed(x, rows),
        cost=pl.CostEstimate(flops=0, bytes_accessed=x.nbytes + 2 * count * rows * hidden, transcendentals=0),
        name="expert_rows",
        interpret=interpret,
    )(x)


def sum_rows(
    outputs: jax.Array, tiles: SortedTiles, columns: int, tokens: int, *, interpret: bool = False
) -> jax.Array:
    """Rows times their scores, added up for each token in the order of experts: float32 `[tokens, hidden]`. `outputs`:
    float32 `[tiles * rows, hidden]`. `columns`: of a program."""
    hidden, rows, count, parts = outputs.shape[1], tiles.rows, len(tiles.experts), columns // LANES

    def kernel(
        experts: Ref, used: Ref, filled: Ref, begin: Ref, token: Ref, scores: Ref, outputs: Ref, found: Ref, *kept: Ref
    ) -> None:
        sums, own = kept
        tile = pl.program_id(1)
        pl.when(tile == 0)(lambda: clear(sums, parts))
        pl.when(tile < used[0])(lambda: add(outputs[...], own, sums, token, scores, begin[tile], filled[tile]))
        pl.when(tile == count - 1)(lambda: write(sums, found))

    return call_of_tiles(
        kernel,
        tiles,
        grid=(pl.cdiv(hidden, columns), count),
        in_specs=[
            pl.BlockSpec((rows, columns), lambda column, tile, experts, used, *_: (last_used(tile, used), column))
        ],
        out_specs=pl.BlockSpec((in_groups(tokens), columns), lambda column, *_: (0, column)),
        out_shape=jax.ShapeDtypeStruct((tokens, hidden), _FLOAT32),
        scratch_shapes=summed(tokens, rows, parts),
        cost=pl.CostEstimate(flops=0, bytes_accessed=outputs.nbytes + 4 * tokens * hidden, transcendentals=0),
        name="expert_sum",
        interpret=interpret,
    )(outputs)


def in_whole_tiles(x: jax.Array) -> jax.Array:
    """Tokens filled up to as many as `pack` takes."""
    return jnp.pad(x, ((0, padded(len(x)) - len(x)), (0, 0)))


def packed(x: jax.Array, rows: int) -> list[Any]:
    """What `pack` and `gathered` keep: words, blocks and their semaphores, and the words of a tile."""
    halves = halves_of(x.shape[1])
    return [
        pltpu.VMEM((max(len(x), LEAST_ROWS) * apart(halves), LANES), jnp.uint32),
        pltpu.VMEM((2, max(math.gcd(len(x), PACKED_TOGETHER), LEAST_ROWS), x.shape[1]), _BFLOAT16),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.VMEM((halves * apart(rows), LANES), jnp.uint32),
    ]


def is_first(tile: jax.Array) -> jax.Array:
    """Whether a program is the first on its core, or may be."""
    several = current_chip() in CORES
    return (tile == 0) if several else (tile == 0) & (pl.program_id(0) == 0)


def pack(x: Ref, words: Ref, blocks: Ref, copied: Ref) -> None:
    """Copies tokens from memory to two `blocks`, and packs them into words of two bfloat16 numbers, one of either half
    of a token's. The words of a token are tiles that follow each other: eight of them are one load."""
    (_, room, hidden), halves = blocks.shape, halves_of(blocks.shape[2])
    tokens, token = min(x.shape[0], room), apart(halves)
    count = x.shape[0] // tokens

    def copy(block: jax.Array | int) -> pltpu.AsyncCopyDescriptor:
        place = block & 1
        to = blocks.at[place, pl.ds(0, tokens)]
        return pltpu.make_async_copy(x.at[pl.ds(block * tokens, tokens)], to, copied.at[place])

    def bits(place: jax.Array, own: pl.Slice, tile: int) -> jax.Array:
        """Of a tile of numbers, with zeros behind the last."""
        width = max(min(LANES, hidden - tile * LANES), 0)
        if not width:
            return jnp.zeros((LEAST_ROWS, LANES), jnp.uint32)
        numbers = blocks[place, own, pl.ds(tile * LANES, width)].astype(_FLOAT32)
        return lax.bitcast_convert_type(jnp.pad(numbers, ((0, 0), (0, LANES - width))), jnp.uint32)

    def pack_block(block: jax.Array, _: None) -> None:
        pl.when(block + 1 < count)(lambda: copy(block + 1).start())
        copy(block).wait()

        def pack_group(group: jax.Array, _: None) -> None:
            own = pl.ds(pl.multiple_of(group * LEAST_ROWS, LEAST_ROWS), LEAST_ROWS)
            for half in range(halves):
                low, high = bits(block & 1, own, half), bits(block & 1, own, halves + half)
                first = (block * tokens + group * LEAST_ROWS) * token + half
                words[pl.ds(first, LEAST_ROWS, stride=token)] = lax.shift_right_logical(low, jnp.uint32(16)) | high

        lax.fori_loop(0, room // LEAST_ROWS, pack_group, None)

    copy(0).start()
    lax.fori_loop(0, count, pack_block, None)


def gathered(words: Ref, own: Ref, tokens: Ref, begin: jax.Array, filled: jax.Array, rows: int) -> jax.Array:
    """A tile's rows, bfloat16 `[rows, 2 * halves * 128]`: `filled` of them, from `tokens[begin]` on. `own` has their
    words as tiles `[halves, rows, 128]` that are `apart`."""
    halves = own.shape[0] // apart(rows)
    token = apart(halves)

    def copy(group: jax.Array, _: None) -> None:
        first = group * TOGETHER
        sources = [tokens[begin + first + place] for place in range(TOGETHER)]
        read = [words[pl.ds(number * token, halves)] for number in sources]
        for place, row in enumerate(read):
            own[pl.ds(first + place, halves, stride=apart(rows))] = row

    lax.fori_loop(0, _groups(filled + (TOGETHER - 1)), copy, None)
    each = [own[pl.ds(half * apart(rows), rows)] for half in range(halves)]
    low = [lax.shift_left(word, jnp.uint32(16)) for word in each]
    high = [word & jnp.uint32(0xFFFF0000) for word in each]
    numbers = [lax.bitcast_convert_type(word, _FLOAT32).astype(_BFLOAT16) for word in (*low, *high)]
    return jnp.concatenate(numbers, axis=1)


def summed(tokens: int, rows: int, parts: int) -> list[Any]:
    """What `add` keeps: sums of `parts` tiles of columns, with a row that nobody reads, and the outputs of a tile."""
    return [
        pltpu.VMEM(((in_groups(tokens) + 1) * apart(parts), LANES), _FLOAT32),
        pltpu.VMEM((parts * apart(rows), LANES), _FLOAT32),
    ]


def clear(sums: Ref, parts: int) -> None:
    size = TOGETHER * apart(parts)
    nothing = jnp.zeros((size, LANES), _FLOAT32)

    def clear_group(group: jax.Array, _: None) -> None:
        sums[pl.ds(group * size, size)] = nothing

    lax.fori_loop(0, sums.shape[0] // size, clear_group, None)


def add(outputs: jax.Array, own: Ref, sums: Ref, token: Ref, scores: Ref, begin: jax.Array, filled: jax.Array) -> None:
    """Adds a tile's outputs, float32 `[rows, columns]`, times their scores, to the sums of their tokens."""
    rows, parts = outputs.shape[0], outputs.shape[1] // LANES
    distance = apart(parts)
    nobody = sums.shape[0] // distance - 1
    for part in range(parts):
        own[pl.ds(part * apart(rows), rows)] = outputs[:, part * LANES : (part + 1) * LANES]

    def add_group(group: jax.Array, _: None, full: bool = True) -> None:
        # The tokens of an expert differ, so no row is added to one that another of the group is added to. Those that
        # are not filled are added to a row that nobody reads.
        added = []
        for place in [group * TOGETHER + place for place in range(TOGETHER)]:
            number = token[begin + place]
            number = number if full else jnp.where(place < filled, number, nobody)
            row = own[pl.ds(place, parts, stride=apart(rows))]
            at = pl.ds(number * distance, parts)
            added.append((at, sums[at] + scores[begin + place] * row))
        for at, row in added:
            sums[at] = row

    groups = _groups(filled)
    lax.fori_loop(0, groups, add_group, None)
    pl.when(groups * TOGETHER < filled)(partial(add_group, groups, None, full=False))


def write(sums: Ref, found: Ref) -> None:
    parts = found.shape[1] // LANES
    distance = apart(parts)

    def write_group(group: jax.Array, _: None) -> None:
        first = pl.multiple_of(group * TOGETHER, TOGETHER)
        for part in range(parts):
            own = sums[pl.ds(first * distance + part, TOGETHER, stride=distance)]
            found[pl.ds(first, TOGETHER), pl.ds(part * LANES, LANES)] = own

    lax.fori_loop(0, found.shape[0] // TOGETHER, write_group, None)


def in_groups(tokens: int) -> int:
    """As many tokens in whole groups."""
    return -(-tokens // TOGETHER) * TOGETHER


def last_used(tile: jax.Array, used: Ref) -> jax.Array:
    """A tile, or the last one with rows, which is not copied again."""
    return jnp.minimum(tile, jnp.maximum(used[0] - 1, 0))


def _groups(rows: jax.Array | int) -> Any:
    """Full groups of rows."""
    return rows >> (TOGETHER.bit_length() - 1)


def call_of_tiles(
    kernel: Callable[..., None], tiles: SortedTiles, *, scratch_shapes: list[Any], name: str, **options: Any
) -> Callable[..., jax.Array]:
    shape, cost, interpret = options.pop("out_shape"), options.pop("cost"), options.pop("interpret", False)
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=6, scratch_shapes=scratch_shapes, **options),
        out_shape=shape,
        cost_estimate=cost,
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(
            # Sums stay in vector memory from tile to tile.
            dimension_semantics=("parallel", "arbitrary")[-len(options["grid"]) :],
            vmem_limit_bytes=VMEM_LIMITS[current_chip()],
            disable_bounds_checks=True,
        ),
        name=name,
    )
    return partial(call, tiles.experts, tiles.used, tiles.filled, tiles.first, tiles.tokens, tiles.scores)
