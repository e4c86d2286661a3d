"""The products of experts on TPUs, with the gathering of their rows and the sum of their outputs.

Rows are sorted by expert, and each expert's fill whole tiles (as in MegaBlocks, Gale et al. 2022). A program multiplies
the tile of one expert by some columns of its matrices, so only experts that a step chose are read, once for tiles that
follow each other. The tokens' inputs, and the sums of outputs, stay in vector memory: one kernel gathers the rows of a
tile from the first, the other adds them to the second. So no array has a row for each choice of an expert but the
activations between the two kernels, and what other devices' experts would need is neither gathered nor written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
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

Gate = Callable[[jax.Array | None, jax.Array], jax.Array]
"""Inner activations from the products of gate, None for experts without, and up; in float32."""

_BFLOAT16, _FLOAT32 = jnp.bfloat16, jnp.float32


@dataclass(frozen=True)
class OfColumns:
    """Numbers of each column of a matrix, float32 `[experts, columns]`: its scale, and its bias, or None."""

    scales: jax.Array | None = None
    biases: jax.Array | None = None

    @property
    def arrays(self) -> list[jax.Array]:
        return [each[:, None] for each in (self.scales, self.biases) if each is not None]

    def apply(self, product: jax.Array, found: list[Ref]) -> jax.Array:
        """Takes its arrays' parts from the front of `found`."""
        if self.scales is not None:
            product = product * found.pop(0)[...]
        if self.biases is not None:
            product = product + found.pop(0)[...]
        return product


def gated_rows(
    x: jax.Array,
    gate: jax.Array | None,
    up: jax.Array,
    tiles: SortedTiles,
    columns: int,
    activation: Gate,
    of_gate: OfColumns,
    of_up: OfColumns,
) -> jax.Array:
    """`activation(gate, up)` of each row, for the next product: bfloat16 `[tiles * rows, columns]`; rows that are not
    filled are undefined. `x`: bfloat16 `[T, hidden]`; `gate`, `up`: `[experts, columns, hidden]`, `gate` None for
    experts without. `columns`: of a program."""
    (_, inner, hidden), rows, count = up.shape, tiles.rows, len(tiles.experts)
    matrices = [up] if gate is None else [gate, up]
    further = [*of_gate.arrays, *of_up.arrays]
    halves = halves_of(hidden)
    token = apart(halves)
    x = jnp.pad(x, ((0, padded(len(x)) - len(x)), (0, 2 * halves * LANES - hidden)))

    def kernel(
        experts: Ref,
        used: Ref,
        filled: Ref,
        begin: Ref,
        tokens: Ref,
        scores: Ref,
        x: Ref,
        *rest: Ref,
    ) -> None:
        *given, found, words, blocks, copied, own = rest
        tile = pl.program_id(1)

        @pl.when(_is_first(tile))
        def _() -> None:
            _pack(x, words, blocks, copied)

        @pl.when(tile < used[0])
        def _() -> None:
            def copy(group: jax.Array, _: None) -> None:
                first = group * TOGETHER
                sources = [tokens[begin[tile] + first + place] for place in range(TOGETHER)]
                read = [words[pl.ds(number * token, halves)] for number in sources]
                for place, row in enumerate(read):
                    own[pl.ds(first + place, halves, stride=apart(rows))] = row

            lax.fori_loop(0, _groups(filled[tile] + (TOGETHER - 1)), copy, None)
            each = _unpacked(own, halves, rows)[:, :hidden]
            products, numbers = (_times_transposed(each, own) for own in given[: len(matrices)]), given[len(matrices) :]
            gates = None if gate is None else of_gate.apply(next(products), numbers)
            found[...] = activation(gates, of_up.apply(next(products), numbers)).astype(_BFLOAT16)

    def of_tile(column: jax.Array, tile: jax.Array, experts: Ref, used: Ref, *_: Ref) -> tuple[jax.Array, jax.Array]:
        return _last_used(tile, used), column

    def of_expert(column: jax.Array, tile: jax.Array, experts: Ref, *_: Ref) -> tuple[jax.Array, jax.Array, int]:
        return experts[tile], column, 0

    def of_columns(column: jax.Array, tile: jax.Array, experts: Ref, *_: Ref) -> tuple[jax.Array, int, jax.Array]:
        return experts[tile], 0, column

    return _call(
        kernel,
        tiles,
        grid=(pl.cdiv(inner, columns), count),
        in_specs=[
            pl.BlockSpec(memory_space=pl.ANY),
            *[pl.BlockSpec((None, columns, hidden), of_expert)] * len(matrices),
            *[pl.BlockSpec((None, 1, columns), of_columns)] * len(further),
        ],
        out_specs=pl.BlockSpec((rows, columns), of_tile),
        out_shape=jax.ShapeDtypeStruct((count * rows, inner), _BFLOAT16),
        scratch_shapes=[
            pltpu.VMEM((max(len(x), LEAST_ROWS) * token, LANES), jnp.uint32),
            pltpu.VMEM((2, max(math.gcd(len(x), PACKED_TOGETHER), LEAST_ROWS), x.shape[1]), _BFLOAT16),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.VMEM((halves * apart(rows), LANES), jnp.uint32),
        ],
        cost=_cost(tiles, x, *matrices),
        name="expert_gate_up",
    )(x, *matrices, *further)


def summed_rows(
    inner: jax.Array, down: jax.Array, tiles: SortedTiles, columns: int, tokens: int, of_down: OfColumns
) -> jax.Array:
    """The products of rows, times their scores, added up for each token in the order of experts: float32 `[tokens,
    hidden]`. `inner`: of `gated_rows`; `down`: `[experts, columns, hidden]`. `columns`: of outputs of a program."""
    (_, size, hidden), rows, count = down.shape, tiles.rows, len(tiles.experts)
    further = of_down.arrays
    parts = columns // LANES
    distance, kept = apart(parts), -(-tokens // TOGETHER) * TOGETHER

    def kernel(
        experts: Ref, used: Ref, filled: Ref, begin: Ref, token: Ref, scores: Ref, inner: Ref, down: Ref, *rest: Ref
    ) -> None:
        *numbers, found, sums, own = rest
        tile = pl.program_id(1)

        @pl.when(tile == 0)
        def _() -> None:
            def clear(group: jax.Array, _: None) -> None:
                sums[pl.ds(group * (TOGETHER * distance), TOGETHER * distance)] = nothing

            nothing = jnp.zeros((TOGETHER * distance, LANES), _FLOAT32)
            lax.fori_loop(0, _groups(kept), clear, None)

        @pl.when(tile < used[0])
        def _() -> None:
            product = jnp.dot(inner[...], down[...].astype(_BFLOAT16), preferred_element_type=_FLOAT32)
            product = of_down.apply(product, list(numbers))
            for part in range(parts):
                own[pl.ds(part * apart(rows), rows)] = product[:, part * LANES : (part + 1) * LANES]

            def add(group: jax.Array, _: None, full: bool = True) -> None:
                # The tokens of an expert differ, so no row is added to one that another of the group is added to. Those
                # that are not filled are added to a row that nobody reads.
                first = group * TOGETHER
                added = []
                for place in [first + place for place in range(TOGETHER)]:
                    number = token[begin[tile] + place]
                    number = number if full else jnp.where(place < filled[tile], number, kept)
                    score, row = scores[begin[tile] + place], own[pl.ds(place, parts, stride=apart(rows))]
                    at = pl.ds(number * distance, parts)
                    added.append((at, sums[at] + score * row))
                for at, row in added:
                    sums[at] = row

            groups = _groups(filled[tile])
            lax.fori_loop(0, groups, add, None)
            pl.when(groups * TOGETHER < filled[tile])(partial(add, groups, None, full=False))

        @pl.when(tile == count - 1)
        def _() -> None:
            def write(group: jax.Array, _: None) -> None:
                first = pl.multiple_of(group * TOGETHER, TOGETHER)
                for part in range(parts):
                    of_part = sums[pl.ds(first * distance + part, TOGETHER, stride=distance)]
                    found[pl.ds(first, TOGETHER), pl.ds(part * LANES, LANES)] = of_part

            lax.fori_loop(0, _groups(kept), write, None)

    def of_tile(column: jax.Array, tile: jax.Array, experts: Ref, used: Ref, *_: Ref) -> tuple[jax.Array, int]:
        return _last_used(tile, used), 0

    def of_expert(column: jax.Array, tile: jax.Array, experts: Ref, *_: Ref) -> tuple[jax.Array, int, jax.Array]:
        return experts[tile], 0, column

    return _call(
        kernel,
        tiles,
        grid=(pl.cdiv(hidden, columns), count),
        in_specs=[
            pl.BlockSpec((rows, size), of_tile),
            pl.BlockSpec((None, size, columns), of_expert),
            *[pl.BlockSpec((None, 1, columns), of_expert)] * len(further),
        ],
        out_specs=pl.BlockSpec((kept, columns), lambda column, *_: (0, column)),
        out_shape=jax.ShapeDtypeStruct((tokens, hidden), _FLOAT32),
        scratch_shapes=[
            pltpu.VMEM(((kept + 1) * distance, LANES), _FLOAT32),
            pltpu.VMEM((parts * apart(rows), LANES), _FLOAT32),
        ],
        cost=_cost(tiles, inner, down),
        name="expert_down_sum",
    )(inner, down, *further)


def _is_first(tile: jax.Array) -> jax.Array:
    """Whether a program is the first on its core, or may be."""
    several = current_chip() in CORES
    return (tile == 0) if several else (tile == 0) & (pl.program_id(0) == 0)


def _pack(x: Ref, words: Ref, blocks: Ref, copied: Ref) -> None:
    """Copies tokens from memory to two `blocks`, and packs them into words of two bfloat16 numbers, one of either half
    of a token's. The words of a token are tiles that follow each other: eight of them are one load."""
    (_, room, lanes), halves = blocks.shape, blocks.shape[2] // (2 * LANES)
    tokens, token = min(x.shape[0], room), apart(halves)
    count = x.shape[0] // tokens

    def copy(block: jax.Array | int) -> pltpu.AsyncCopyDescriptor:
        place = block & 1
        to = blocks.at[place, pl.ds(0, tokens)]
        return pltpu.make_async_copy(x.at[pl.ds(block * tokens, tokens)], to, copied.at[place])

    def pack_block(block: jax.Array, _: None) -> None:
        pl.when(block + 1 < count)(lambda: copy(block + 1).start())
        copy(block).wait()

        def pack(group: jax.Array, _: None) -> None:
            own = pl.ds(pl.multiple_of(group * LEAST_ROWS, LEAST_ROWS), LEAST_ROWS)
            for half in range(halves):
                low, high = (
                    lax.bitcast_convert_type(blocks[block & 1, own, pl.ds(first, LANES)].astype(_FLOAT32), jnp.uint32)
                    for first in (half * LANES, lanes // 2 + half * LANES)
                )
                first = (block * tokens + group * LEAST_ROWS) * token + half
                words[pl.ds(first, LEAST_ROWS, stride=token)] = lax.shift_right_logical(low, jnp.uint32(16)) | high

        lax.fori_loop(0, room // LEAST_ROWS, pack, None)

    copy(0).start()
    lax.fori_loop(0, count, pack_block, None)


def _unpacked(own: Ref, halves: int, rows: int) -> jax.Array:
    """bfloat16 `[rows, 2 * halves * 128]`, of words in tiles `[halves, rows, 128]` that are `_apart`."""
    words = [own[pl.ds(half * apart(rows), rows)] for half in range(halves)]
    low = [lax.shift_left(each, jnp.uint32(16)) for each in words]
    high = [each & jnp.uint32(0xFFFF0000) for each in words]
    numbers = [lax.bitcast_convert_type(each, _FLOAT32).astype(_BFLOAT16) for each in (*low, *high)]
    return jnp.concatenate(numbers, axis=1)


def _last_used(tile: jax.Array, used: Ref) -> jax.Array:
    """A tile, or the last one with rows, which is not copied again."""
    return jnp.minimum(tile, jnp.maximum(used[0] - 1, 0))


def _groups(rows: jax.Array | int) -> Any:
    """Full groups of rows."""
    return rows >> (TOGETHER.bit_length() - 1)


def _times_transposed(x: jax.Array, matrix: Ref) -> jax.Array:
    """`x [rows, hidden]` times `[columns, hidden]`: float32 `[rows, columns]`."""
    weights = matrix[...].astype(_BFLOAT16)
    return lax.dot_general(x, weights, (((1,), (1,)), ((), ())), preferred_element_type=_FLOAT32)


def _cost(tiles: SortedTiles, x: jax.Array, *matrices: jax.Array) -> pl.CostEstimate:
    """At most: of all rows, and of as many experts as there are tiles."""
    experts, columns, hidden = matrices[0].shape
    rows = len(tiles.tokens) - TOGETHER
    return pl.CostEstimate(
        flops=len(matrices) * 2 * rows * columns * hidden,
        bytes_accessed=sum(min(len(tiles.experts), experts) * each.nbytes // experts for each in matrices) + x.nbytes,
        transcendentals=0,
    )


def _call(
    kernel: Callable[..., None], tiles: SortedTiles, *, scratch_shapes: list[Any], name: str, **options: Any
) -> Callable[..., jax.Array]:
    shape, cost = options.pop("out_shape"), options.pop("cost")
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=6, scratch_shapes=scratch_shapes, **options),
        out_shape=shape,
        cost_estimate=cost,
        compiler_params=pltpu.CompilerParams(
            # Sums stay in vector memory from tile to tile.
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMITS[current_chip()],
            disable_bounds_checks=True,
        ),
        name=name,
    )
    return partial(call, tiles.experts, tiles.used, tiles.filled, tiles.first, tiles.tokens, tiles.scores)
