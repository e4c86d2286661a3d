"""Products of rows with the matrices of experts, quantised in groups, on TPUs.

Rows are sorted by expert, and each expert's are filled up to whole tiles (as in MegaBlocks, Gale et al. 2022). A
program multiplies a tile by some columns of its expert's matrix, as `group_product_pallas` does; so only the experts
that a step chose are read, once for the tiles that follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sglang_jax.kernels.expert_tiles import SortedTiles
from sglang_jax.kernels.group_product_pallas import (
    ROWS,
    GroupedWeights,
    Ref,
    columns_of,
    multiply_columns,
    scales_last,
    stored_bits,
)
from sglang_jax.kernels.kv_storage import LANES
from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import VMEM_LIMITS, current_chip

LEAST_ROWS = 16
"""Rows of bfloat16 in a tile of vector memory."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExpertTiles:
    """Rows of experts in tiles. `experts`: of each tile, int32 `[tiles]`; `used`: how many tiles have rows, int32
    `[1]`, those in front; `places`: of each row that is sorted by expert, int32 `[M]`; out of range for padding."""

    experts: jax.Array
    used: jax.Array
    places: jax.Array

    @classmethod
    def of(cls, experts: jax.Array, sizes: jax.Array, rows: int) -> ExpertTiles:
        """`experts`: of each row, sorted, int32 `[M]`; padding has a number behind all of them. `sizes`: rows of each
        expert, int32 `[count]`. `rows`: of a tile."""
        count, total = len(sizes), len(experts)
        tiles = (sizes + rows - 1) // rows
        ends, starts = jnp.cumsum(tiles), jnp.cumsum(sizes) - sizes
        most = total // rows + min(count, total)
        # As a gather from `[count]`, which a TPU does number by number.
        before = jnp.where(experts[:, None] == jnp.arange(count), (ends - tiles) * rows - starts, 0).sum(1)
        places = before + jnp.arange(total)
        # Tiles without rows have the expert of the last one with rows, so that no other is copied.
        numbers = jnp.minimum(jnp.arange(most), jnp.maximum(ends[-1:] - 1, 0))
        of_tiles = jnp.minimum((numbers[:, None] >= ends).sum(1), count - 1)
        places = jnp.where(experts < count, places, most * rows)
        return cls(of_tiles.astype(jnp.int32), ends[-1:].astype(jnp.int32), places.astype(jnp.int32))

    def spread(self, x: jax.Array, rows: int) -> jax.Array:
        """Rows `[M, n]` in their places, `[tiles * rows, n]`."""
        total = len(self.experts) * rows
        sources = jnp.zeros(total, jnp.int32).at[self.places].set(jnp.arange(len(x)), mode="drop")
        return x[sources]


def rows_of_tile(rows: int, experts: int) -> int:
    """Rows of a tile: a power of two, for the average rows of an expert."""
    return min(ROWS, max(LEAST_ROWS, 1 << max(-(-rows // experts) - 1, 0).bit_length()))


def multiply_experts_in_groups(
    x: jax.Array, weights: GroupedWeights, tiles: ExpertTiles | SortedTiles, *, folds: int = 1, interpret: bool = False
) -> jax.Array:
    """`x` bfloat16 `[tiles * rows, inputs]` times the matrices of the tiles' experts → float32 `[tiles * rows,
    columns]`; results of rows without a source are undefined. `weights`, `folds`: see `folded` and `filled_up`.

    Raises `ValueError` for weights that do not fit into vector memory."""
    if folds == 1:
        return _multiply(x, weights, tiles, interpret)
    # The rows of a fold of the inputs have their product in the columns of the same fold.
    count, inputs = len(tiles.experts), x.shape[1]
    own = x.reshape(count, -1, folds, inputs // folds).swapaxes(1, 2).reshape(len(x) * folds, -1)
    found = _multiply(own, weights, tiles, interpret).reshape(count, folds, len(x) // count, -1)
    columns = found.shape[-1] // folds
    total = sum(found[:, fold, :, fold * columns : (fold + 1) * columns] for fold in range(1, folds))
    return (found[:, 0, :, :columns] + total).reshape(len(x), columns)


def _multiply(x: jax.Array, weights: GroupedWeights, tiles: ExpertTiles | SortedTiles, interpret: bool) -> jax.Array:
    count, inputs = len(tiles.experts), x.shape[1]
    rows, (_, groups, outputs) = len(x) // count, weights.scales.shape
    columns = columns_of(rows, jax.eval_shape(lambda: jax.tree.map(lambda each: each[0], weights)))
    if columns is None:
        raise ValueError(f"{inputs} inputs do not fit into the vector memory of {current_chip()}")
    of_rows = [x]
    if weights.zeros is not None:
        sums = x.astype(jnp.float32).reshape(len(x), -1, weights.group).sum(2)
        of_rows.append(jnp.pad(sums, ((0, 0), (0, groups - sums.shape[1]))))

    def of_tile(column: jax.Array, tile: jax.Array, experts: Ref, used: Ref) -> tuple[jax.Array, int]:
        return jnp.minimum(tile, jnp.maximum(used[0] - 1, 0)), 0

    def of_product(column: jax.Array, tile: jax.Array, experts: Ref, used: Ref) -> tuple[jax.Array, jax.Array]:
        return jnp.minimum(tile, jnp.maximum(used[0] - 1, 0)), column

    def of_weights(column: jax.Array, tile: jax.Array, experts: Ref, used: Ref) -> tuple[jax.Array, int, jax.Array]:
        return experts[tile], 0, column

    read = sum(each.size * stored_bits(each) // 8 for each in weights.arrays) // weights.scales.shape[0]
    return pl.pallas_call(
        partial(
            _kernel,
            with_zeros=weights.zeros is not None,
            float4=weights.float4,
            group=weights.group,
            scales_last=scales_last(rows, weights),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(pl.cdiv(outputs, columns), count),
            in_specs=[
                *(pl.BlockSpec((rows, each.shape[1]), of_tile) for each in of_rows),
                *(pl.BlockSpec((None, each.shape[1], columns), of_weights) for each in weights.arrays),
            ],
            out_specs=pl.BlockSpec((rows, columns), of_product),
        ),
        out_shape=jax.ShapeDtypeStruct((len(x), outputs), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMITS[current_chip()],
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * len(x) * inputs * outputs,
            bytes_accessed=min(count, weights.scales.shape[0]) * read + x.size * 2 + len(x) * outputs * 4,
            transcendentals=0,
        ),
        interpret=interpret,
        name="expert_group_product",
    )(tiles.experts, tiles.used, *of_rows, *weights.arrays)


def folds_of(groups: int, outputs: int) -> int:
    """Into how many folds the inputs of matrices with few outputs are divided: see `folded`."""
    folds = 1
    while 2 * folds * outputs <= LANES and not groups % (2 * folds):
        folds *= 2
    return folds


def folded(weights: GroupedWeights, folds: int) -> GroupedWeights:
    """Weights of experts, arrays `[experts, inputs, outputs]`, with the folds of their inputs side by side: `[experts,
    inputs / folds, folds * outputs]`, outputs filled up. Memory has whole tiles of 128 columns, most of which would be
    empty."""
    if folds == 1:
        return weights

    def side_by_side(array: jax.Array) -> jax.Array:
        array = jnp.pad(array, ((0, 0), (0, 0), (0, LANES // folds - array.shape[2])))
        experts, rows, outputs = array.shape
        parts = array.reshape(experts, folds, rows // folds, outputs)
        return parts.swapaxes(1, 2).reshape(experts, rows // folds, folds * outputs)

    zeros = None if weights.zeros is None else side_by_side(weights.zeros)
    return replace(weights, levels=side_by_side(weights.levels), scales=side_by_side(weights.scales), zeros=zeros)


def filled_up(weights: GroupedWeights) -> GroupedWeights:
    """Weights of experts, arrays with an axis of these in front, with whole tiles of vector memory: libtpu copies other
    arrays in every step (0.0.51, for tpu7x)."""
    columns = -weights.levels.shape[2] % LANES
    groups = -weights.scales.shape[1] % LEAST_ROWS

    def filled(array: jax.Array, rows: int) -> jax.Array:
        return jnp.pad(array, ((0, 0), (0, rows), (0, columns)))

    zeros = None if weights.zeros is None else filled(weights.zeros, groups)
    return GroupedWeights(
        filled(weights.levels, 0), filled(weights.scales, groups), zeros, weights.float4, weights.group
    )


def _kernel(experts: Ref, used: Ref, x: Ref, *rest: Ref, **options: Any) -> None:
    """`options`: of `multiply_columns`."""

    @pl.when(pl.program_id(1) < used[0])
    def _() -> None:
        multiply_columns(x, *rest, **options)
