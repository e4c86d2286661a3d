"""`causal_convolution` on TPUs: the kernels read last inputs from their slots and write them back in place.

Each of a token's last inputs fills whole tiles, `[parts, 128]`, and so do a step's outputs: earlier inputs are in other
registers, and nothing is shifted within one. A step's inputs have eight tokens per tile, as products write them: one
token is loaded with a stride.

- **Decode rows.** A program takes some rows. Vector memory has three sets of their last inputs: one being computed, one
  arriving, one leaving.
- **Chunks.** A program takes `TOKENS` tokens of the step, sequence by sequence and 16 parts at a time, with the inputs
  before a token in registers. The last inputs of the next sequence arrive meanwhile.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sglang_jax.kernels.kv_storage import LANES
from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import MIB, VMEM_LIMITS, current_chip
from sglang_jax.kernels.state_rows import StateRows

Ref = Any
"""A Pallas reference to memory; its type is not public."""

TILE = 8
"""Tokens per tile."""
TOKENS = 32
"""Tokens per program of chunks."""

_IN_FLIGHT = MIB
"""Bytes to fetch at once, to keep memory busy for the latency of a copy: v6e reads 1.6 MB a microsecond."""

_SETS = 3
_COLUMN = 16
"""Parts that are computed together: a tile of bfloat16."""

_FLOAT32 = jnp.float32
_WHERE_IT_IS = pl.BlockSpec(memory_space=pl.ANY)


def convolve_in_place(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    pool: jax.Array,
    rows: StateRows,
    *,
    checked: bool = False,
    fixed: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`causal_convolution.convolve` with a tiled `pool` `[slots, width - 1, parts, 128]`. Returns float32 `[T,
    channels]`, zeros for padding, and the pool after the step. `checked`: compile address checks in. `fixed`: compute
    decode rows as chunks, so that all tokens are computed by the same instructions."""
    tokens, channels = x.shape
    parts = pool.shape[2]
    taps = [weight.T] if bias is None else [weight.T, bias[None]]
    taps = _in_parts(jnp.concatenate([part.astype(_FLOAT32) for part in taps]), parts)
    inputs = _by_tiles(x.astype(_FLOAT32), parts)
    used = rows.num_decode if rows.decode_only else rows.query_starts[-1]
    if fixed:
        rows = rows.as_chunks()
        found = jnp.zeros((inputs.shape[0] * TILE, parts, LANES), _FLOAT32)
    else:
        found, pool = _decode_rows(inputs, taps, pool, rows, checked)
    if not rows.decode_only:
        found, pool = _chunks(inputs, taps, found, pool, rows, checked)
    found = jnp.where(jnp.arange(tokens)[:, None, None] < used, found[:tokens], 0.0)
    return found.reshape(tokens, -1)[:, :channels], pool


def _in_parts(x: jax.Array, parts: int) -> jax.Array:
    """`[n, channels]` → `[n, parts, 128]`."""
    return jnp.pad(x, ((0, 0), (0, parts * LANES - x.shape[1]))).reshape(-1, parts, LANES)


def _by_tiles(x: jax.Array, parts: int) -> jax.Array:
    """`[T, channels]` → `[tiles, parts * 8, 128]`, eight tokens of a part in consecutive lines, which is their order in
    tiled memory: the reshape copies nothing."""
    x = _in_parts(jnp.pad(x, ((0, -x.shape[0] % TOKENS), (0, 0))), parts)
    return x.reshape(-1, TILE, parts, LANES).swapaxes(1, 2).reshape(-1, parts * TILE, LANES)


def rows_at_once(rows: int, bytes_of_row: int) -> int:
    """Rows per program of decode rows: whole tiles, in a number that divides all tiles."""
    tiles = pl.cdiv(rows, TILE)
    most = max(_IN_FLIGHT // (bytes_of_row * TILE), 1)
    return TILE * next(number for number in range(min(tiles, most), 0, -1) if tiles % number == 0)


def _compiler_params(checked: bool) -> pltpu.CompilerParams:
    """Programs run in order: each waits for copies that the one before it has started."""
    return pltpu.CompilerParams(
        dimension_semantics=("arbitrary",),
        vmem_limit_bytes=VMEM_LIMITS[current_chip()],
        disable_bounds_checks=not checked,
    )


def _whole(array: jax.Array) -> pl.BlockSpec:
    return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)


def _columns(parts: int) -> list[slice]:
    return [slice(first, min(first + _COLUMN, parts)) for first in range(0, parts, _COLUMN)]


def _of_token(token: jax.Array | int, column: slice) -> pl.Slice:
    return pl.ds(column.start * TILE + token, column.stop - column.start, TILE)


def _weighted(taps: Ref, column: slice, inputs: list[jax.Array]) -> jax.Array:
    """The inputs, oldest first, weighted by their taps and summed, plus the bias if `taps` has one more line."""
    total = taps[0, column] * inputs[0]
    for tap, one in enumerate(inputs[1:], 1):
        total = total + taps[tap, column] * one
    return total if taps.shape[0] == len(inputs) else total + taps[len(inputs), column]


# -- Decode rows -------------------------------------------------------------------------------------------------------


def _decode_rows(
    inputs: jax.Array, taps: jax.Array, pool: jax.Array, rows: StateRows, checked: bool
) -> tuple[jax.Array, jax.Array]:
    """Computes the first `num_decode` tokens, one per sequence: outputs `[T, parts, 128]`, undefined for other tokens,
    and the pool."""
    count, (_, kept, parts, lanes) = len(rows.own), pool.shape
    at_once = rows_at_once(count, kept * parts * lanes * pool.dtype.itemsize)
    decodes = jnp.arange(count) < rows.num_decode
    begin = jnp.where(decodes & ~rows.fresh, rows.begin, 0)
    own = jnp.where(decodes, rows.own, 0)
    begin, fresh, own = (jnp.pad(x.astype(jnp.int32), (0, -count % TILE)) for x in (begin, rows.fresh, own))
    tiles = pl.BlockSpec((at_once // TILE, parts * TILE, lanes), lambda program, *_: (program, 0, 0))
    return pl.pallas_call(
        partial(_decode_kernel, at_once=at_once),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            # Without decode rows one program computes padding.
            grid=(jnp.maximum(pl.cdiv(rows.num_decode, at_once), 1),),
            in_specs=[tiles, _whole(taps), _WHERE_IT_IS],
            out_specs=[
                pl.BlockSpec((at_once, parts, lanes), lambda program, *_: (program, 0, 0)),
                _WHERE_IT_IS,
            ],
            scratch_shapes=[
                pltpu.VMEM((_SETS, at_once, kept + 1, parts, lanes), pool.dtype),
                pltpu.SemaphoreType.DMA((_SETS,)),
                pltpu.SemaphoreType.DMA((_SETS,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((inputs.shape[0] * TILE, parts, lanes), _FLOAT32),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ],
        input_output_aliases={5: 1},
        compiler_params=_compiler_params(checked),
        name="convolution_rows",
    )(begin, fresh, own, inputs, taps, pool)


def _decode_kernel(  # type: ignore[no-untyped-def]
    begin, fresh, own, inputs, taps, _, outputs, pool, lines, arrived, left, *, at_once: int
):
    """`lines` `[3, at_once, kept + 1, parts, 128]`: rows' last inputs and the new one; `arrived`, `left`: a semaphore
    for each of the three sets."""
    program, last = pl.program_id(0), pl.num_programs(0) - 1
    kept, here = lines.shape[2] - 1, program % _SETS

    def fetch(program: jax.Array) -> None:
        @pl.loop(0, at_once)
        def _(row: jax.Array) -> None:
            target = lines.at[program % _SETS, row, pl.ds(0, kept)]
            pltpu.make_async_copy(pool.at[begin[program * at_once + row]], target, arrived.at[program % _SETS]).start()

    def leave(program: jax.Array, row: jax.Array, wait: bool) -> None:
        """Starts a row's copy to its slot, or waits for it. Padding (slot 0) is not copied."""
        slot = own[program * at_once + row]

        @pl.when(slot > 0)
        def _() -> None:
            line = lines.at[program % _SETS, row, pl.ds(1, kept)]
            copy = pltpu.make_async_copy(line, pool.at[slot], left.at[program % _SETS])
            copy.wait() if wait else copy.start()

    def await_leaving(program: jax.Array) -> None:
        pl.loop(0, at_once)(lambda row: leave(program, row, wait=True))

    pl.when(program == 0)(lambda: fetch(program))
    pl.when(program >= _SETS - 1)(lambda: await_leaving(program - (_SETS - 1)))
    pl.when(program < last)(lambda: fetch(program + 1))
    of_all = lines.at[here, :, pl.ds(0, kept)]
    pltpu.make_async_copy(of_all, of_all, arrived.at[here]).wait()

    @pl.loop(0, at_once)
    def _(row: jax.Array) -> None:
        @pl.when(fresh[program * at_once + row] != 0)
        def _() -> None:
            lines[here, row, pl.ds(0, kept)] = jnp.zeros((kept, *lines.shape[3:]), lines.dtype)

        for column in _columns(lines.shape[3]):
            token = row // TILE, _of_token(row % TILE, column)
            lines[here, row, kept, column] = inputs[token].astype(lines.dtype)
            window = [lines[here, row, place, column].astype(_FLOAT32) for place in range(kept + 1)]
            outputs[row, column] = _weighted(taps, column, window)
        leave(program, row, wait=False)

    @pl.when(program == last)
    def _() -> None:
        pl.when(program > 0)(lambda: await_leaving(program - 1))
        await_leaving(program)


# -- Chunks ------------------------------------------------------------------------------------------------------------


def _chunks(
    inputs: jax.Array, taps: jax.Array, outputs: jax.Array, pool: jax.Array, rows: StateRows, checked: bool
) -> tuple[jax.Array, jax.Array]:
    """Computes the sequences after the decode rows: `outputs`, updated in place, and the pool."""
    _, kept, parts, lanes = pool.shape
    place, sequences, windows = _windows(rows, inputs.shape[0] * TILE)
    begin = jnp.where(rows.fresh, 0, rows.begin)
    tiles = pl.BlockSpec(
        (TOKENS // TILE, parts * TILE, lanes), lambda program, place, *_: (place[_FIRST] + program, 0, 0)
    )
    return pl.pallas_call(
        _chunk_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(windows,),
            in_specs=[tiles, _whole(taps), _WHERE_IT_IS, _WHERE_IT_IS],
            out_specs=[
                pl.BlockSpec((TOKENS, parts, lanes), lambda program, place, *_: (place[_FIRST] + program, 0, 0)),
                _WHERE_IT_IS,
            ],
            scratch_shapes=[
                pltpu.VMEM((2, kept, parts, lanes), pool.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(outputs.shape, outputs.dtype),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ],
        input_output_aliases={8: 0, 9: 1},
        compiler_params=_compiler_params(checked),
        name="convolution_chunks",
    )(place, sequences, rows.query_starts, begin, rows.fresh.astype(jnp.int32), rows.own, inputs, taps, outputs, pool)


_FIRST, _CHUNK, _END = range(3)
"""The first window of `TOKENS` tokens that has tokens of a chunk; the first chunk's sequence; the end of sequences."""


def _windows(rows: StateRows, tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """int32 `[3]`, indexed by `_FIRST`, `_CHUNK` and `_END`; int32 `[2, programs]`, the first sequence with tokens in a
    program's window and the end of these sequences; the number of programs, at least one."""
    starts = rows.query_starts
    first, end = rows.num_decode // TOKENS, jnp.sum(jnp.diff(starts) > 0)
    begins = (first + jnp.arange(tokens // TOKENS)) * TOKENS
    # Sequences without tokens come last.
    lowest = jnp.sum(starts[1:, None] <= begins, axis=0)
    behind = jnp.sum(starts[:-1, None] < begins + TOKENS, axis=0)
    sequences = jnp.stack([jnp.maximum(lowest, rows.num_decode), jnp.minimum(behind, end)])
    windows = jnp.maximum(pl.cdiv(starts[-1], TOKENS) - first, 1)
    return jnp.stack([first, rows.num_decode, end]).astype(jnp.int32), sequences.astype(jnp.int32), windows


def _chunk_kernel(  # type: ignore[no-untyped-def]
    place, sequences, starts, begin, fresh, own, inputs, taps, old, _, outputs, pool, before, arrived, left
):
    """`before` `[2, kept, parts, 128]`: the last inputs of a sequence and of the next; `arrived`, `left`: a semaphore
    for each of the two."""
    program, last = pl.program_id(0), pl.num_programs(0) - 1
    window = place[_FIRST] + program
    chunk, end = place[_CHUNK], place[_END]

    def fetch(sequence: jax.Array) -> Any:
        here = sequence % 2
        return pltpu.make_async_copy(pool.at[begin[sequence]], before.at[here], arrived.at[here])

    def leave(sequence: jax.Array) -> Any:
        here = sequence % 2
        return pltpu.make_async_copy(before.at[here], pool.at[own[sequence]], left.at[here])

    @pl.when(program == 0)
    def _() -> None:
        # The window may start with decode rows, whose outputs are done.
        pltpu.sync_copy(old.at[pl.ds(window * TOKENS, TOKENS)], outputs)
        pl.when(chunk < end)(lambda: fetch(chunk).start())

    @pl.loop(sequences[0, program], sequences[1, program])
    def _(sequence: jax.Array) -> None:
        here, first = sequence % 2, window * TOKENS

        @pl.when(starts[sequence] >= first)
        def _() -> None:
            fetch(sequence).wait()

            @pl.when(fresh[sequence] != 0)
            def _() -> None:
                before[here] = jnp.zeros(before.shape[1:], before.dtype)

            @pl.when(sequence + 1 < end)
            def _() -> None:
                pl.when(sequence > chunk)(lambda: leave(sequence - 1).wait())
                fetch(sequence + 1).start()

        begins = jnp.maximum(starts[sequence] - first, 0)
        ends = jnp.minimum(starts[sequence + 1] - first, TOKENS)
        for column in _columns(before.shape[2]):
            _convolve(inputs, taps, before.at[here], outputs, column, begins, ends)
        pl.when(starts[sequence + 1] <= first + TOKENS)(lambda: leave(sequence).start())

    @pl.when((program == last) & (chunk < end))
    def _() -> None:
        pl.when(end - 1 > chunk)(lambda: leave(end - 2).wait())
        leave(end - 1).wait()


def _convolve(
    inputs: Ref, taps: Ref, before: Ref, outputs: Ref, column: slice, begins: jax.Array, ends: jax.Array
) -> None:
    """Convolves some channels of one sequence's tokens `begins` to `ends` of a window, and updates `before`."""
    kept = before.shape[0]

    def tile(number: jax.Array, window: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        for token in range(TILE):
            at = number, _of_token(token, column)
            own = number * TILE + token
            new = inputs[at].astype(before.dtype).astype(_FLOAT32)
            found = _weighted(taps, column, [*window, new])
            # Writes past the sequence's end are overwritten by the next sequence, or never read.
            outputs[own, column] = jnp.where(own >= begins, found, outputs[own, column])
            inside = (own >= begins) & (own < ends)
            window = tuple(
                jnp.where(inside, newer, older) for older, newer in zip(window, (*window[1:], new), strict=True)
            )
        return window

    window = tuple(before[place, column].astype(_FLOAT32) for place in range(kept))
    window = lax.fori_loop(begins // TILE, pl.cdiv(ends, TILE), tile, window)
    for place, one in enumerate(window):
        before[place, column] = one.astype(before.dtype)
