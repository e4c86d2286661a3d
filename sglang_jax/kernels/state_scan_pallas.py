"""`state_scan` on TPUs: the kernels read states from their slots and write them back in place.

- **Decode rows.** A program takes some heads of one row; their states arrive while the program before computes. A
  state's element takes three products and three sums in the vector unit, less time than its arrival. The matrix unit
  would not help: with one token per state it would only load.
- **Chunks.** A program takes one head of one sequence, block by block, with the state in vector memory throughout. The
  head's queries, keys and values of the whole step are loaded once for all sequences. Blocks start at the sequence's
  first token, so that results do not depend on the rest of the step. The triangular system of a delta rule (Yang et al.
  2024) is inverted by products: see `_inverse`.
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

_MAX_HEADS = 16
"""Heads per program of decode rows. The loop over them is unrolled: more heads make a longer program."""

_LANES = 128
_FLOAT32 = jnp.float32


def scan_in_place(
    inputs: ScanInputs, pool: jax.Array, rows: StateRows, *, checked: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Outputs float32 `[T, heads, value_dim]`, zeros for padding, and the pool `[slots, heads, key_dim, value_dim]`
    after the step. `checked`: compile address checks in."""
    inputs = inputs.of_heads()
    # XLA's layout fills all lanes: it puts keys along the lanes if values have 64 numbers, and would copy the whole
    # pool for a kernel that expects values there.
    _, _, key_dim, value_dim = pool.shape
    transposed = value_dim % _LANES != 0 and key_dim % _LANES == 0
    pool = pool.swapaxes(2, 3) if transposed else pool
    found, pool = _decode_rows(inputs, pool, rows, transposed, checked)
    tokens = jnp.arange(inputs.values.shape[0])[:, None, None]
    if rows.decode_only:
        outputs = jnp.where(tokens < rows.num_decode, found, 0.0)
    else:
        found = jnp.pad(found, ((0, len(tokens) - len(found)), (0, 0), (0, 0)))
        of_chunks, pool = _chunks(inputs, pool, rows, transposed, checked)
        outputs = jnp.where(tokens < rows.query_starts[-1], of_chunks, 0.0)
        outputs = jnp.where(tokens < rows.num_decode, found, outputs)
    return outputs, pool.swapaxes(2, 3) if transposed else pool


def _compiler_params(checked: bool) -> pltpu.CompilerParams:
    """For a grid of heads by sequences. Heads are independent, so two cores may share them."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"),
        vmem_limit_bytes=VMEM_LIMITS[current_chip()],
        disable_bounds_checks=not checked,
    )


def heads_at_once(heads: int) -> int:
    return next(number for number in range(min(heads, _MAX_HEADS), 0, -1) if heads % number == 0)


# -- Decode rows -------------------------------------------------------------------------------------------------------


def _decode_rows(
    inputs: ScanInputs, pool: jax.Array, rows: StateRows, transposed: bool, checked: bool
) -> tuple[jax.Array, jax.Array]:
    """Computes the first `num_decode` tokens, one per sequence: outputs `[R, heads, value_dim]`, undefined for other
    rows, and the pool. `transposed`: states are `[value_dim, key_dim]`."""
    count = len(rows.own)
    _, heads, *matrix = pool.shape
    at_once = heads_at_once(heads)
    groups = heads // at_once

    def grouped(x: jax.Array) -> jax.Array:
        return x[:count].reshape(count, groups, at_once, *x.shape[2:])

    # Keys (values if transposed) are columns, heads side by side, so that they broadcast along lanes.
    keys = jnp.concatenate([grouped(inputs.keys), grouped(inputs.queries)], axis=2)
    values = grouped(inputs.values)
    keys, values = (keys, values.swapaxes(2, 3)) if transposed else (keys.swapaxes(2, 3), values)
    factors = [grouped(jnp.exp(inputs.decays))] + ([] if inputs.rates is None else [grouped(inputs.rates)])

    def of_row(*shape: int, space: pltpu.MemorySpace = pltpu.VMEM) -> pl.BlockSpec:
        index = lambda group, row, *_: (row, group, 0, 0)  # noqa: E731
        return pl.BlockSpec((1, 1, *shape), index, memory_space=space)

    decoding = jnp.arange(count) < rows.num_decode
    matrices = (1, at_once, *matrix)
    outputs, pool = pl.pallas_call(
        partial(_decode_kernel, transposed=transposed, delta=inputs.rates is not None),
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
    outputs = outputs.swapaxes(2, 3) if transposed else outputs
    return outputs.reshape(count, heads, -1), pool


def _decode_kernel(begin, fresh, own, keys, values, factors, pool, outputs, written, *, transposed: bool, delta: bool):  # type: ignore[no-untyped-def]
    is_new = fresh[pl.program_id(1)] != 0
    heads, of_keys = pool.shape[1], int(transposed)

    def at(place: int, along_lines: bool) -> tuple[int | slice, ...]:
        one = slice(place, place + 1)
        return (0, 0, slice(None), one) if along_lines else (0, 0, one, slice(None))

    for head in range(heads):
        state = jnp.where(is_new, 0.0, pool[0, head].astype(_FLOAT32)) * factors[0, 0, 0, head]
        key, query = (keys[at(place, not transposed)] for place in (head, heads + head))
        value = values[at(head, transposed)]
        if delta:
            value = factors[0, 0, 1, head] * (value - jnp.sum(key * state, axis=of_keys, keepdims=True))
        state = state + key * value
        outputs[at(head, transposed)] = jnp.sum(query * state, axis=of_keys, keepdims=True)
        written[0, head] = state.astype(written.dtype)


# -- Chunks ------------------------------------------------------------------------------------------------------------


def _chunks(
    inputs: ScanInputs, pool: jax.Array, rows: StateRows, transposed: bool, checked: bool
) -> tuple[jax.Array, jax.Array]:
    """Computes the sequences after the decode rows: outputs `[T, heads, value_dim]`, undefined for other tokens, and
    the pool. `transposed` as above."""
    tokens, heads, value_dim = inputs.values.shape
    key_dim = inputs.keys.shape[2]
    # A sequence's last block may extend past the step's tokens.
    padded = tokens + BLOCK

    def by_heads(x: jax.Array) -> jax.Array:
        """`[heads, parts, padded, lanes]`: a load from an arbitrary line must have the lanes of one tile."""
        x = jnp.pad(x, ((0, BLOCK), (0, 0), (0, 0)))
        return x.reshape(padded, heads, -1, _lanes(x.shape[2])).transpose(1, 2, 0, 3)

    factors = [inputs.decays] + ([] if inputs.rates is None else [inputs.rates])

    def of_head(size: int) -> pl.BlockSpec:
        lanes = _lanes(size)
        return pl.BlockSpec((1, size // lanes, padded, lanes), lambda head, *_: (head, 0, 0, 0))

    # One more sequence, without tokens and in slot 0, for steps without chunks.
    begin, fresh, own = (jnp.pad(x.astype(jnp.int32), (0, 1)) for x in (rows.begin, rows.fresh, rows.own))
    starts = jnp.pad(rows.query_starts, (0, 1), mode="edge")
    chunks = jnp.sum((jnp.diff(rows.query_starts) > 0) & (jnp.arange(len(rows.own)) >= rows.num_decode))
    matrix = (1, 1, *pool.shape[2:])
    outputs, pool = pl.pallas_call(
        partial(_chunk_kernel, transposed=transposed, delta=inputs.rates is not None),
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
    """Numbers of a token per line."""
    return size if size <= _LANES else math.gcd(size, _LANES)


def _chunk_kernel(  # type: ignore[no-untyped-def]
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
    transposed: bool,
    delta: bool,
):
    """Computes one head of one sequence. Writes past the sequence's end are overwritten by the next sequence, or never
    read."""
    row = first[0] + pl.program_id(1)
    start, end = starts[row], starts[row + 1]

    def block(number: jax.Array, state: jax.Array) -> jax.Array:
        here = pl.ds(start + number * BLOCK, BLOCK)
        inside = start + number * BLOCK + lax.broadcasted_iota(jnp.int32, (BLOCK, 1), 0) < end
        tokens = (
            jnp.concatenate([jnp.where(inside, ref[0, part, here, :], 0.0) for part in range(ref.shape[1])], axis=1)
            for ref in (queries, keys, values, factors)
        )
        found, state = _block(*tokens, state, transposed=transposed, delta=delta)
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
    transposed: bool,
    delta: bool,
) -> tuple[jax.Array, jax.Array]:
    """Outputs of a block of one head, whose inputs are `[BLOCK, dim]`, and the state after it; `factors` are decays and
    rates side by side. See `state_scan._block`."""
    line = lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), 0)
    column = lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), 1)

    def as_row(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(line == column, x, 0.0), axis=0, keepdims=True)

    decays = jnp.sum(jnp.where(line >= column, as_row(factors[:, 0:1]), 0.0), axis=1, keepdims=True)
    between = jnp.exp(jnp.where(line >= column, decays - as_row(decays), -jnp.inf))
    since, last = jnp.exp(decays), decays[BLOCK - 1 :]
    with_state = (1, int(transposed))
    if delta:
        rates = factors[:, 1:2]
        system = jnp.where(line > column, rates * between * _product(keys, keys, (1, 1)), 0.0)
        values = _product(_inverse(system, line, column), rates * (values - since * _product(keys, state, with_state)))
    outputs = since * _product(queries, state, with_state) + _product(between * _product(queries, keys, (1, 1)), values)
    left = keys * jnp.exp(last - decays)
    state = jnp.exp(last) * state + _product(*((values, left) if transposed else (left, values)), (0, 0))
    return outputs, state


def _inverse(system: jax.Array, line: jax.Array, column: jax.Array) -> jax.Array:
    """The inverse of the identity plus a strictly lower triangular matrix. One with diagonal blocks A and D and lower
    block B has an inverse with diagonal blocks X = inverse(A), Y = inverse(D) and lower block -Y B X. All pairs of
    blocks are done at once, from size 1 on. Unlike in a series of powers, intermediate numbers do not exceed those of
    forward substitution."""
    inverse = jnp.where(line == column, 1.0, jnp.where(line // 2 == column // 2, -system, 0.0))
    size = 2
    while size < BLOCK:
        of_pair = (line // (2 * size) == column // (2 * size)) & (line // size != column // size)
        inverse = inverse - _product(_product(inverse, jnp.where(of_pair, system, 0.0)), inverse)
        size *= 2
    return inverse


def _product(a: jax.Array, b: jax.Array, over: tuple[int, int] = (1, 0)) -> jax.Array:
    """A float32 product, summed over axis `over[0]` of `a` and `over[1]` of `b`."""
    axes = (((over[0],), (over[1],)), ((), ()))
    return lax.dot_general(a, b, axes, precision=lax.Precision.HIGHEST, preferred_element_type=_FLOAT32)
