"""The products of experts on TPUs, with the gathering of their rows and the sum of their outputs.

Rows are sorted by expert, and each expert's fill whole tiles (as in MegaBlocks, Gale et al. 2022). A program multiplies
the tile of one expert by some columns of its matrices, so only experts that a step chose are read, once for tiles that
follow each other. The tokens' inputs, and the sums of outputs, stay in vector memory: one kernel gathers the rows of a
tile from the first, the other adds them to the second. So no array has a row for each choice of an expert but the
activations between the two kernels, and what other devices' experts would need is neither gathered nor written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from sglang_jax.kernels.expert_rows_pallas import (
    Ref,
    add,
    call_of_tiles,
    clear,
    gathered,
    in_groups,
    in_whole_tiles,
    is_first,
    last_used,
    pack,
    packed,
    summed,
    write,
)
from sglang_jax.kernels.expert_tiles import TOGETHER, SortedTiles
from sglang_jax.kernels.kv_storage import LANES

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
    x = in_whole_tiles(x)

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

        pl.when(is_first(tile))(lambda: pack(x, words, blocks, copied))

        @pl.when(tile < used[0])
        def _() -> None:
            each = gathered(words, own, tokens, begin[tile], filled[tile], rows)[:, :hidden]
            products, numbers = (_times_transposed(each, own) for own in given[: len(matrices)]), given[len(matrices) :]
            gates = None if gate is None else of_gate.apply(next(products), numbers)
            found[...] = activation(gates, of_up.apply(next(products), numbers)).astype(_BFLOAT16)

    def of_tile(column: jax.Array, tile: jax.Array, experts: Ref, used: Ref, *_: Ref) -> tuple[jax.Array, jax.Array]:
        return last_used(tile, used), column

    def of_expert(column: jax.Array, tile: jax.Array, experts: Ref, *_: Ref) -> tuple[jax.Array, jax.Array, int]:
        return experts[tile], column, 0

    def of_columns(column: jax.Array, tile: jax.Array, experts: Ref, *_: Ref) -> tuple[jax.Array, int, jax.Array]:
        return experts[tile], 0, column

    return call_of_tiles(
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
        scratch_shapes=packed(x, rows),
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

    def kernel(
        experts: Ref, used: Ref, filled: Ref, begin: Ref, token: Ref, scores: Ref, inner: Ref, down: Ref, *rest: Ref
    ) -> None:
        *numbers, found, sums, own = rest
        tile = pl.program_id(1)

        pl.when(tile == 0)(lambda: clear(sums, parts))

        @pl.when(tile < used[0])
        def _() -> None:
            product = jnp.dot(inner[...], down[...].astype(_BFLOAT16), preferred_element_type=_FLOAT32)
            product = of_down.apply(product, list(numbers))
            add(product, own, sums, token, scores, begin[tile], filled[tile])

        pl.when(tile == count - 1)(lambda: write(sums, found))

    def of_tile(column: jax.Array, tile: jax.Array, experts: Ref, used: Ref, *_: Ref) -> tuple[jax.Array, int]:
        return last_used(tile, used), 0

    def of_expert(column: jax.Array, tile: jax.Array, experts: Ref, *_: Ref) -> tuple[jax.Array, int, jax.Array]:
        return experts[tile], 0, column

    return call_of_tiles(
        kernel,
        tiles,
        grid=(pl.cdiv(hidden, columns), count),
        in_specs=[
            pl.BlockSpec((rows, size), of_tile),
            pl.BlockSpec((None, size, columns), of_expert),
            *[pl.BlockSpec((None, 1, columns), of_expert)] * len(further),
        ],
        out_specs=pl.BlockSpec((in_groups(tokens), columns), lambda column, *_: (0, column)),
        out_shape=jax.ShapeDtypeStruct((tokens, hidden), _FLOAT32),
        scratch_shapes=summed(tokens, rows, parts),
        cost=_cost(tiles, inner, down),
        name="expert_down_sum",
    )(inner, down, *further)


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
