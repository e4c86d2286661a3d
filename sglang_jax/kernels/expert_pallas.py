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

from sglang_jax.kernels.kv_storage import LANES
from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import MIB, VMEM_LIMITS, current_chip

Ref = Any
"""A Pallas reference to memory; its type is not public."""

Gate = Callable[[jax.Array, jax.Array], jax.Array]
"""`activation(gate) * up` in float32."""

LEAST_ROWS, _MOST_ROWS = 16, 128
"""Rows of a tile: at least those of bfloat16 in a tile of vector memory, at most those that a TPU multiplies while it
reads weights."""

_MORE = 1.25
"""Room in a tile for experts with more rows than the average: two tiles take the matrix units twice as long."""

_TOGETHER = 8
"""Rows that are copied or added together: their loads do not wait for their stores."""

_MOST_CHOICES = 1 << 16
"""Choices of a step, whose tokens and scores are in scalar memory."""

_BFLOAT16, _FLOAT32 = jnp.bfloat16, jnp.float32


@dataclass(frozen=True)
class SortedTiles:
    """Rows of experts in tiles of `rows`. `experts`: of each tile, int32 `[tiles]`; `used`: how many have rows, int32
    `[1]`, those in front; `filled`: rows of each tile, int32 `[tiles]`; `first`: the place of its first row, int32
    `[tiles]`, in `tokens` and `scores` of all rows, sorted by expert, int32 and float32 `[M + 8]`."""

    rows: int
    experts: jax.Array
    used: jax.Array
    filled: jax.Array
    first: jax.Array
    tokens: jax.Array
    scores: jax.Array

    @classmethod
    def of(cls, experts: jax.Array, scores: jax.Array, count: int, rows: int) -> SortedTiles:
        """Sorts the choices of tokens, int32 and float32 `[T, chosen]`, by expert; numbers from `count` on are
        padding."""
        flat, chosen = experts.reshape(-1), experts.shape[1]
        tokens = jnp.arange(len(flat), dtype=jnp.int32) // chosen
        _, tokens, scores = lax.sort((flat, tokens, scores.reshape(-1)), num_keys=1, is_stable=True)
        sizes = (flat[:, None] == jnp.arange(count)).sum(0, dtype=jnp.int32)
        tiles = (sizes + rows - 1) // rows
        ends = jnp.cumsum(tiles, dtype=jnp.int32)
        numbers = jnp.arange(len(flat) // rows + min(count, len(flat)), dtype=jnp.int32)
        # Tiles without rows have the expert of the last one with rows, so that no other is copied.
        existing = jnp.minimum(numbers, jnp.maximum(ends[-1] - 1, 0))
        of_tiles = jnp.minimum((existing[:, None] >= ends).sum(1, dtype=jnp.int32), count - 1)

        def of_expert(numbers: jax.Array) -> jax.Array:
            """As `numbers[of_tiles]`, which a TPU would leave to its SparseCores."""
            return jnp.where(of_tiles[:, None] == jnp.arange(count), numbers, 0).sum(1, dtype=jnp.int32)

        before = (existing - of_expert(ends - tiles)) * rows
        filled = jnp.where(numbers < ends[-1], jnp.clip(of_expert(sizes) - before, 0, rows), 0)
        first = of_expert(jnp.cumsum(sizes, dtype=jnp.int32) - sizes) + before
        # Rows are read in groups.
        tokens, scores = (jnp.pad(each, (0, _TOGETHER)) for each in (tokens, scores))
        return cls(rows, of_tiles, ends[-1:], filled.astype(jnp.int32), first, tokens, scores)


def rows_of_expert(average: float) -> int:
    """Rows of a tile: a power of two, for the average rows of an expert."""
    return min(_MOST_ROWS, max(LEAST_ROWS, 1 << max(math.ceil(_MORE * average) - 1, 0).bit_length()))


@dataclass(frozen=True, slots=True)
class Widths:
    """The columns of the programs of both kernels: of gate and up, and of outputs."""

    inner: int
    outputs: int

    @classmethod
    def of(cls, tokens: int, chosen: int, rows: int, matrices: tuple[jax.Array, jax.Array]) -> Widths | None:
        """The most columns that fit into the vector memory of the target; None if none do, or too many rows. `matrices`
        of gate and down: `[experts, columns, hidden]`."""
        gate, down = matrices
        _, columns, hidden = gate.shape
        if tokens * chosen > _MOST_CHOICES:
            return None
        room = VMEM_LIMITS[current_chip()] - 4 * MIB
        lanes = -(-hidden // LANES) * LANES
        kept = lanes * (8 * tokens + 4 * rows)
        inner = [
            each
            for each in _widths(columns)
            if kept + 2 * each * (2 * lanes * gate.dtype.itemsize + rows * 2) + rows * each * 12 <= room
        ]
        of_inner = 2 * rows * columns * 2
        outputs = [
            each
            for each in _widths(hidden)
            if of_inner + each * (2 * columns * down.dtype.itemsize + 4 * (3 * tokens + _TOGETHER + 2 * rows)) <= room
        ]
        return cls(inner[0], outputs[0]) if inner and outputs else None


def _widths(columns: int) -> list[int]:
    """All columns, or whole tiles of them in about equal parts, largest first."""
    tiles = -(-columns // LANES)
    parts = sorted({-(-tiles // count) for count in range(2, tiles + 1)}, reverse=True)
    return [columns, *(LANES * each for each in parts)]


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
    gate: jax.Array,
    up: jax.Array,
    tiles: SortedTiles,
    columns: int,
    activation: Gate,
    of_gate: OfColumns,
    of_up: OfColumns,
) -> jax.Array:
    """`activation(gate, up)` of each row, for the next product: bfloat16 `[tiles * rows, columns]`; rows that are not
    filled are undefined. `x`: bfloat16 `[T, hidden]`; `gate`, `up`: `[experts, columns, hidden]`. `columns`: of a
    program."""
    (_, inner, hidden), rows, count = gate.shape, tiles.rows, len(tiles.experts)
    further = [*of_gate.arrays, *of_up.arrays]

    def kernel(
        experts: Ref,
        used: Ref,
        filled: Ref,
        begin: Ref,
        tokens: Ref,
        scores: Ref,
        x: Ref,
        gate: Ref,
        up: Ref,
        *rest: Ref,
    ) -> None:
        *numbers, found, wide, own = rest
        tile = pl.program_id(1)

        @pl.when(tile == 0)
        def _() -> None:
            wide[...] = x[...].astype(_FLOAT32)  # two rows of bfloat16 share words

        @pl.when(tile < used[0])
        def _() -> None:
            def copy(group: jax.Array, _: None) -> None:
                first = group * _TOGETHER
                read = [wide[pl.ds(tokens[begin[tile] + first + place], 1), :] for place in range(_TOGETHER)]
                for place, row in enumerate(read):
                    own[pl.ds(first + place, 1), :] = row

            _in_groups(filled[tile], copy)
            each, taken = own[...].astype(_BFLOAT16), list(numbers)
            gates = of_gate.apply(_times_transposed(each, gate), taken)
            found[...] = activation(gates, of_up.apply(_times_transposed(each, up), taken)).astype(_BFLOAT16)

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
            pl.BlockSpec(x.shape, lambda *_: (0, 0)),
            *[pl.BlockSpec((None, columns, hidden), of_expert)] * 2,
            *[pl.BlockSpec((None, 1, columns), of_columns)] * len(further),
        ],
        out_specs=pl.BlockSpec((rows, columns), of_tile),
        out_shape=jax.ShapeDtypeStruct((count * rows, inner), _BFLOAT16),
        scratch_shapes=[pltpu.VMEM(x.shape, _FLOAT32), pltpu.VMEM((rows, hidden), _FLOAT32)],
        cost=_cost(tiles, x, gate, up),
        name="expert_gate_up",
    )(x, gate, up, *further)


def summed_rows(
    inner: jax.Array, down: jax.Array, tiles: SortedTiles, columns: int, tokens: int, of_down: OfColumns
) -> jax.Array:
    """The products of rows, times their scores, added up for each token in the order of experts: float32 `[tokens,
    hidden]`. `inner`: of `gated_rows`; `down`: `[experts, columns, hidden]`. `columns`: of outputs of a program."""
    (_, size, hidden), rows, count = down.shape, tiles.rows, len(tiles.experts)
    further = of_down.arrays

    def kernel(
        experts: Ref, used: Ref, filled: Ref, begin: Ref, token: Ref, scores: Ref, inner: Ref, down: Ref, *rest: Ref
    ) -> None:
        *numbers, found, sums, own = rest
        tile = pl.program_id(1)

        @pl.when(tile == 0)
        def _() -> None:
            sums[...] = jnp.zeros_like(sums)

        @pl.when(tile < used[0])
        def _() -> None:
            product = jnp.dot(inner[...], down[...].astype(_BFLOAT16), preferred_element_type=_FLOAT32)
            own[...] = of_down.apply(product, list(numbers))

            def add(group: jax.Array, _: None) -> None:
                # The tokens of an expert differ, so no row is added to one that another of the group is added to; those
                # that are not filled, or count for nothing, are added to a row that nobody reads.
                first = group * _TOGETHER
                places = [first + place for place in range(_TOGETHER)]
                factors = [scores[begin[tile] + place] for place in places]
                # An output with a score of 0 may be infinite.
                exist = [(place < filled[tile]) & (score != 0) for place, score in zip(places, factors, strict=True)]
                at = [
                    pl.ds(jnp.where(exists, token[begin[tile] + place], tokens), 1)
                    for place, exists in zip(places, exist, strict=True)
                ]
                added = [
                    sums[each, :] + score * own[pl.ds(place, 1), :]
                    for place, score, each in zip(places, factors, at, strict=True)
                ]
                for each, row in zip(at, added, strict=True):
                    sums[each, :] = row

            _in_groups(filled[tile], add)

        @pl.when(tile == count - 1)
        def _() -> None:
            found[...] = sums[pl.ds(0, tokens), :]

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
        out_specs=pl.BlockSpec((tokens, columns), lambda column, *_: (0, column)),
        out_shape=jax.ShapeDtypeStruct((tokens, hidden), _FLOAT32),
        scratch_shapes=[pltpu.VMEM((tokens + _TOGETHER, columns), _FLOAT32), pltpu.VMEM((rows, columns), _FLOAT32)],
        cost=_cost(tiles, inner, down),
        name="expert_down_sum",
    )(inner, down, *further)


def _last_used(tile: jax.Array, used: Ref) -> jax.Array:
    """A tile, or the last one with rows, which is not copied again."""
    return jnp.minimum(tile, jnp.maximum(used[0] - 1, 0))


def _in_groups(count: jax.Array, body: Callable[[jax.Array, None], None]) -> None:
    groups = lax.shift_right_logical(count + (_TOGETHER - 1), _TOGETHER.bit_length() - 1)
    lax.fori_loop(0, groups, body, None)


def _times_transposed(x: jax.Array, matrix: Ref) -> jax.Array:
    """`x [rows, hidden]` times `[columns, hidden]`: float32 `[rows, columns]`."""
    weights = matrix[...].astype(_BFLOAT16)
    return lax.dot_general(x, weights, (((1,), (1,)), ((), ())), preferred_element_type=_FLOAT32)


def _cost(tiles: SortedTiles, x: jax.Array, *matrices: jax.Array) -> pl.CostEstimate:
    """At most: of all rows, and of as many experts as there are tiles."""
    experts, columns, hidden = matrices[0].shape
    rows = len(tiles.tokens) - _TOGETHER
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
