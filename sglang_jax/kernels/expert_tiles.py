"""Tiles of the rows of experts, and what their kernels on TPUs keep in vector memory: see `expert_pallas`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from sglang_jax.kernels.expert_table_pallas import tile_table
from sglang_jax.kernels.kv_storage import LANES
from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import CORES, MIB, VMEM_LIMITS, current_chip

LEAST_ROWS, _MOST_ROWS = 16, 256
"""Rows of a tile: at least those of bfloat16 in a tile of vector memory, at most those of a matrix unit."""

_MORE = 1.25
"""Room in the tiles of an expert for more rows than the average: a further tile loads the weights again."""

TOGETHER = 8
"""Rows that are copied or added together: their loads do not wait for their stores."""

PACKED_TOGETHER = 128
"""Tokens that are copied from memory while as many others are packed."""

_MOST_CHOICES = 1 << 16
"""Choices of a step, whose tokens and scores are in scalar memory."""

_BANKS = 8
"""Rows at a distance that is a multiple of this share banks of vector memory: libtpu divides a load or store of eight
of them into up to eight."""


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
    def of(
        cls, experts: jax.Array, scores: jax.Array, count: int, rows: int, *, interpret: bool = False
    ) -> SortedTiles:
        """Sorts the choices of tokens, int32 and float32 `[T, chosen]`, by expert; numbers from `count` on are
        padding, and so are choices with a score of 0, whose outputs may be infinite."""
        own = jnp.where(scores == 0, count, experts)
        sizes = (own.reshape(-1, 1) == jnp.arange(count)).sum(0, dtype=jnp.int32)
        chosen, choices = experts.shape[1], experts.size
        # Rows are read in groups.
        padded = choices + TOGETHER
        keys = jnp.pad(own.reshape(-1), (0, TOGETHER), constant_values=count) * padded + jnp.arange(padded)
        keys, scores = lax.sort((keys, jnp.pad(scores.reshape(-1), (0, TOGETHER))), num_keys=1, is_stable=False)
        tokens = keys % padded // chosen
        table = tile_table(sizes, rows, choices // rows + min(count, choices), interpret=interpret)
        return cls(rows, *table, tokens, scores)


def rows_of_expert(average: float) -> int:
    """Rows of a tile, for the average rows of an expert: all of them in a tile, or in equal ones."""
    room = max(_MORE * average, 1)
    tiles = math.ceil(room / _MOST_ROWS)
    return math.ceil(room / tiles / LEAST_ROWS) * LEAST_ROWS


@dataclass(frozen=True, slots=True)
class Widths:
    """The columns of the programs of both kernels: of gate and up, and of outputs."""

    inner: int
    outputs: int

    @classmethod
    def of(
        cls, tokens: int, chosen: int, rows: int, matrices: tuple[jax.Array, jax.Array], gated: bool = True
    ) -> Widths | None:
        """The most columns that fit into the vector memory of the target; None if none do, or too many rows. `matrices`
        of up and down: `[experts, columns, hidden]`; `gated`: there is a third one."""
        up, down = matrices
        _, columns, hidden = up.shape
        read = 1 + gated
        if tokens * chosen > _MOST_CHOICES:
            return None
        room = VMEM_LIMITS[current_chip()] - 4 * MIB
        halves = halves_of(hidden)
        lanes = 2 * halves * LANES
        kept = 4 * lanes * min(padded(tokens), PACKED_TOGETHER) + 4 * LANES * (
            padded(tokens) * apart(halves) + halves * apart(rows)
        )

        def of_inputs(each: int) -> int:
            copied = each * (read * lanes * up.dtype.itemsize + rows * 2)
            return kept + 2 * copied + rows * (4 * each * (1 + read) + lanes * 2)

        inner = [each for each in _widths(columns) if of_inputs(each) <= room]
        of_inner = 2 * rows * columns * 2

        def of_outputs(each: int) -> int:
            sums = 4 * LANES * (tokens + 1) * apart(each // LANES)
            return of_inner + sums + each * (2 * columns * down.dtype.itemsize + 4 * (2 * tokens + 3 * rows))

        outputs = [each for each in _widths(hidden) if of_outputs(each) <= room]
        return cls(inner[0], outputs[0]) if inner and outputs else None


def columns_of_sums(tokens: int, chosen: int, rows: int, hidden: int) -> int | None:
    """The most columns of a program that adds outputs up, if the vector memory of the target has room for it and for
    all tokens; else None."""
    if tokens * chosen > _MOST_CHOICES:
        return None
    room, halves = VMEM_LIMITS[current_chip()] - 4 * MIB, halves_of(hidden)
    blocks = 8 * LANES * halves * (min(padded(tokens), PACKED_TOGETHER) + 2 * rows)
    if blocks + 4 * LANES * (padded(tokens) * apart(halves) + halves * apart(rows)) > room:
        return None
    fitting = (
        each
        for each in _widths(hidden)
        if 4 * (LANES * (tokens + 1) * apart(each // LANES) + each * (2 * tokens + 3 * rows)) <= room
    )
    return next(fitting, None)


def _widths(columns: int) -> list[int]:
    """Whole tiles of columns in about equal parts, largest first: one for each core of a device, at least."""
    tiles, cores = -(-columns // LANES), CORES.get(current_chip(), 1)
    counts = [count for count in range(1, tiles + 1) if count % cores == 0] or [1]
    return [LANES * each for each in sorted({-(-tiles // count) for count in counts}, reverse=True)]


def padded(tokens: int) -> int:
    """Tokens in whole tiles of bfloat16, or half of one, which memory has as a tile."""
    return LEAST_ROWS // 2 if tokens <= LEAST_ROWS // 2 else -(-tokens // LEAST_ROWS) * LEAST_ROWS


def halves_of(hidden: int) -> int:
    """Tiles of words of a token, each of which has two numbers."""
    return -(-hidden // (2 * LANES))


def apart(rows: int) -> int:
    """A distance of `rows` or one more, at which rows are not in the same bank: see `_BANKS`."""
    return rows if rows % _BANKS else rows + 1
