"""`state_scan` on TPUs: matrices are read from their slots and written back in place, and stay on the chip in between.

What a token does, and why chunks are products of matrices, is said there. Two kernels:

- **Decode rows.** A program takes some heads of one row: their matrices arrive while those of the program before are
  computed. Per number of a matrix there are three products and three sums, in the vector unit: less time than it
  takes to arrive, as one token leaves the matrix unit nothing to do but load.
- **Chunks.** A program takes one head of one sequence, block by block, with the matrix on the chip from the first to
  the last; the head's queries, keys and values of the whole step are there for all of its sequences. A block begins
  where its sequence's tokens do, so that results do not depend on the rest of the step. The triangular system of a
  delta rule (Yang et al. 2024) is inverted by products: see `_inverse`.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from sglang_jax.kernels.ragged_paged_attention.pallas.shapes import VMEM_LIMITS, current_chip
from sglang_jax.kernels.state_rows import StateRows
from sglang_jax.kernels.state_scan import BLOCK, ScanInputs

_MOST_HEADS = 16
"""Of a program of decode rows. Each is written out: fewer make more programs, more a longer program."""

_LANES = 128
_FLOAT32 = jnp.float32


def scan_in_place(
    inputs: ScanInputs, pool: jax.Array, rows: StateRows, *, checked: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Outputs float32 `[T, heads, value_dim]`, zeros for padding, and the pool `[slots, heads, key_dim, value_dim]`
    after the step. `checked`: with checks of addresses."""
    inputs = inputs.of_heads()
    # XLA lays an array out so that no lane stays empty: values of 64 numbers would be below each other, and a kernel
    # that wants them side by side would be given a copy of the whole pool.
    _, _, key_dim, value_dim = pool.shape
    turned = value_dim % _LANES != 0 and key_dim % _LANES == 0
    pool = pool.swapaxes(2, 3) if turned else pool
    found, pool = _decode_rows(inputs, pool, rows, turned, checked)
    tokens = jnp.arange(inputs.values.shape[0])[:, None, None]
    if rows.decode_only:
        outputs = jnp.where(tokens < rows.num_decode, found, 0.0)
    else:
        found = jnp.pad(found, ((0, len(tokens) - len(found)), (0, 0), (0, 0)))
        of_chunks, pool = _chunks(inputs, pool, rows, turned, checked)
        outputs = jnp.where(tokens < rows.query_starts[-1], of_chunks, 0.0)
        outputs = jnp.where(tokens < rows.num_decode, found, outputs)
    return outputs, pool.swapaxes(2, 3) if turned else pool


def _compiler_params(checked: bool) -> pltpu.CompilerParams:
    """Of a grid of heads by sequences. Programs of different heads read and write different matrices, so that two cores
    may share them."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"),
        vmem_limit_bytes=VMEM_LIMITS[current_chip()],
        disable_bounds_checks=not checked,
    )


def heads_at_once(heads: int) -> int:
    """Of a program of decode rows."""
    return next(number for number in range(min(heads, _MOST_HEADS), 0, -1) if heads % number == 0)


# -- Decode rows -------------------------------------------------------------------------------------------------------


def _decode_rows(
    inputs: ScanInputs, pool: jax.Array, rows: StateRows, turned: bool, checked: bool
) -> tuple[jax.Array, jax.Array]:
    """The first `num_decode` tokens, each its sequence's only one: outputs `[R, heads, value_dim]`, of which those of
    other rows are anything, and the pool. `turned`: values go along the lines of its matrices, and not keys."""
    count = len(rows.own)
    _, heads, *matrix = pool.shape
    at_once = heads_at_once(heads)
    groups = heads // at_once

    def grouped(x: jax.Array) -> jax.Array:
        return x[:count].reshape(count, groups, at_once, *x.shape[2:])

    # What goes along the lines of a matrix is below each other, heads side by side.
    keys = jnp.concatenate([grouped(inputs.keys), grouped(inputs.queries)], axis=2)
    values = grouped(inputs.values)
    keys, values = (keys, values.swapaxes(2, 3)) if turned else (keys.swapaxes(2, 3), values)
    factors = [grouped(jnp.exp(inputs.decays))] + ([] if inputs.rates is None else [grouped(inputs.rates)])

    def of_row(*shape: int, space: pltpu.MemorySpace = pltpu.VMEM) -> pl.BlockSpec:
        index = lambda group, row, *_: (row, group, 0, 0)  # noqa: E731
        return pl.BlockSpec((1, 1, *shape), index, memory_space=space)

    decoding = jnp.arange(count) < rows.num_decode
    matrices = (1, at_once, *matrix)
    outputs, pool = pl.pallas_call(
        partial(_one_token, turned=turned, delta=inputs.rates is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            # Without decode rows one program computes padding.
            grid=(groups, jnp.maximum(rows.num_decode, 1)),
            in_specs=[
                of_row(*keys.shape[2:]),
                of_row(*values.shape[2:]),
                of_row(len(factors), at_once, space=pltpu.SMEM),
                pl.BlockSpec(matrices, lambda group, row, begin, *_: (begin[row], group, 0, 0)),
            ],
            out_specs=[
                of_row(*values.shape[2:]),
                pl.BlockSpec(matrices, lambda group, row, begin, fresh, own: (own[row], group, 0, 0)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(values.shape, _FLOAT32),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ],
        input_output_aliases={6: 1},
        compiler_params=_compiler_params(checked),
        name="state_rows",
    )(
        rows.begin,
        rows.fresh.astype(jnp.int32),
        jnp.where(decoding, rows.own, 0),
        keys,
        values,
        jnp.stack(factors, axis=2),
        pool,
    )
    outputs = outputs.swapaxes(2, 3) if turned else outputs
    return outputs.reshape(count, heads, -1), pool


def _one_token(begin, fresh, own, keys, values, factors, pool, outputs, written, *, turned: bool, delta: bool):  # type: ignore[no-untyped-def]
    """Some heads of one row."""
    is_new = fresh[pl.program_id(1)] != 0
    heads, of_keys = pool.shape[1], int(turned)

    def at(place: int, along_lines: bool) -> tuple[int | slice, ...]:
        one = slice(place, place + 1)
        return (0, 0, slice(None), one) if along_lines else (0, 0, one, slice(None))

    for head in range(heads):
        state = jnp.where(is_new, 0.0, pool[0, head].astype(_FLOAT32)) * factors[0, 0, 0, head]
        key, query = (keys[at(place, not turned)] for place in (head, heads + head))
        value = values[at(head, turned)]
        if delta:
            value = factors[0, 0, 1, head] * (value - jnp.sum(key * state, axis=of_keys, keepdims=True))
        state = state + key * value
        outputs[at(head, turned)] = jnp.sum(query * state, axis=of_keys, keepdims=True)
        written[0, head] = state.astype(written.dtype)


# -- Chunks ------------------------------------------------------------------------------------------------------------


def _chunks(
    inputs: ScanInputs, pool: jax.Array, rows: StateRows, turned: bool, checked: bool
) -> tuple[jax.Array, jax.Array]:
    """All sequences behind the decode rows: outputs `[T, heads, value_dim]`, of which those of other tokens are
    anything, and the pool. `turned` as above."""
    tokens, heads, value_dim = inputs.values.shape
    key_dim = inputs.keys.shape[2]
    # A sequence's last block may reach behind the step's end.
    padded = tokens + BLOCK

    def by_heads(x: jax.Array) -> jax.Array:
        """`[heads, parts, padded, lanes]`: a load that begins at any line has lanes of one tile."""
        x = jnp.pad(x, ((0, BLOCK), (0, 0), (0, 0)))
        return x.reshape(padded, heads, -1, _lanes(x.shape[2])).transpose(1, 2, 0, 3)

    factors = [inputs.decays] + ([] if inputs.rates is None else [inputs.rates])

    def of_head(size: int) -> pl.BlockSpec:
        lanes = _lanes(size)
        return pl.BlockSpec((1, size // lanes, padded, lanes), lambda head, *_: (head, 0, 0, 0))

    # One sequence more, without tokens and in slot 0: what there is to do where there are no chunks.
    begin, fresh, own = (jnp.pad(x.astype(jnp.int32), (0, 1)) for x in (rows.begin, rows.fresh, rows.own))
    starts = jnp.pad(rows.query_starts, (0, 1), mode="edge")
    chunks = jnp.sum((jnp.diff(rows.query_starts) > 0) & (jnp.arange(len(rows.own)) >= rows.num_decode))
    matrix = (1, 1, *pool.shape[2:])
    outputs, pool = pl.pallas_call(
        partial(_blocks, turned=turned, delta=inputs.rates is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(heads, jnp.maximum(chunks, 1)),
            in_specs=[
                of_head(key_dim),
                of_head(key_dim),
                of_head(value_dim),
                of_head(len(factors)),
                pl.BlockSpec(matrix, lambda head, turn, first, begin, *_: (begin[first[0] + turn], head, 0, 0)),
            ],
            out_specs=[
                of_head(value_dim),
                pl.BlockSpec(
                    matrix, lambda head, turn, first, begin, fresh, own, starts: (own[first[0] + turn], head, 0, 0)
                ),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((heads, value_dim // _lanes(value_dim), padded, _lanes(value_dim)), _FLOAT32),
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        ],
        input_output_aliases={9: 1},
        compiler_params=_compiler_params(checked),
        name="state_chunks",
    )(
        rows.num_decode[None],
        begin,
        fresh,
        own,
        starts,
        *(by_heads(x) for x in (inputs.queries, inputs.keys, inputs.values)),
        by_heads(jnp.stack(factors, axis=2)),
        pool,
    )
    return outputs.transpose(2, 0, 1, 3)[:tokens].reshape(tokens, heads, value_dim), pool


def _lanes(size: int) -> int:
    """So many numbers of a token side by side."""
    return size if size <= _LANES else math.gcd(size, _LANES)


def _blocks(  # type: ignore[no-untyped-def]
    first,
    begin,
    fresh,
    own,
    starts,
    queries,
    keys,
    values,
    factors,
    pool,
    outputs,
    written,
    *,
    turned: bool,
    delta: bool,
):
    """One head of one sequence. What a block writes behind its sequence's end those whose it is write later, or nobody
    reads it."""
    row = first[0] + pl.program_id(1)
    start, end = starts[row], starts[row + 1]

    def block(number: jax.Array, state: jax.Array) -> jax.Array:
        here = pl.ds(start + number * BLOCK, BLOCK)
        inside = start + number * BLOCK + lax.broadcasted_iota(jnp.int32, (BLOCK, 1), 0) < end
        tokens = (
            jnp.concatenate([jnp.where(inside, ref[0, part, here, :], 0.0) for part in range(ref.shape[1])], axis=1)
            for ref in (queries, keys, values, factors)
        )
        found, state = _block(*tokens, state, turned=turned, delta=delta)
        for part, some in enumerate(jnp.split(found, outputs.shape[1], axis=1)):
            outputs[0, part, here, :] = some
        return state

    state = jnp.where(fresh[row] != 0, 0.0, pool[0, 0].astype(_FLOAT32))
    state = lax.fori_loop(0, pl.cdiv(end - start, BLOCK), block, state)
    written[0, 0] = state.astype(written.dtype)


def _block(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    factors: jax.Array,
    state: jax.Array,
    *,
    turned: bool,
    delta: bool,
) -> tuple[jax.Array, jax.Array]:
    """Some tokens of one head, `[BLOCK, dim]`; `factors` are decays and rates side by side. See `state_scan._block`."""
    line = lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), 0)
    column = lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), 1)

    def across(x: jax.Array) -> jax.Array:
        """Of numbers below each other the same side by side."""
        return jnp.sum(jnp.where(line == column, x, 0.0), axis=0, keepdims=True)

    decays = jnp.sum(jnp.where(line >= column, across(factors[:, 0:1]), 0.0), axis=1, keepdims=True)
    between = jnp.exp(jnp.where(line >= column, decays - across(decays), -jnp.inf))
    since, last = jnp.exp(decays), decays[BLOCK - 1 :]
    with_state = (1, int(turned))
    if delta:
        rates = factors[:, 1:2]
        system = jnp.where(line > column, rates * between * _product(keys, keys, (1, 1)), 0.0)
        values = _product(_inverse(system, line, column), rates * (values - since * _product(keys, state, with_state)))
    outputs = since * _product(queries, state, with_state) + _product(between * _product(queries, keys, (1, 1)), values)
    left = keys * jnp.exp(last - decays)
    state = jnp.exp(last) * state + _product(*((values, left) if turned else (left, values)), (0, 0))
    return outputs, state


def _inverse(system: jax.Array, line: jax.Array, column: jax.Array) -> jax.Array:
    """Of the identity plus a matrix that is 0 but below the diagonal.

    The inverse of a triangular matrix from those of the two smaller ones on its diagonal, X and Y, and what is below,
    B: there it is -Y B X. Of all pairs at once, from size 1 on; no number in between is larger than in going line by
    line, unlike in a series of powers."""
    inverse = jnp.where(line == column, 1.0, jnp.where(line // 2 == column // 2, -system, 0.0))
    size = 2
    while size < BLOCK:
        of_pair = (line // (2 * size) == column // (2 * size)) & (line // size != column // size)
        inverse = inverse - _product(_product(inverse, jnp.where(of_pair, system, 0.0)), inverse)
        size *= 2
    return inverse


def _product(a: jax.Array, b: jax.Array, over: tuple[int, int] = (1, 0)) -> jax.Array:
    """Summed over these axes, in float32."""
    axes = (((over[0],), (over[1],)), ((), ()))
    return lax.dot_general(a, b, axes, precision=lax.Precision.HIGHEST, preferred_element_type=_FLOAT32)
