"""Recurrent layers whose state is a matrix per head: it decays at each token, then adds the token's key times value.

At a token with query q, key k, value v, log of the decay g and, for a delta rule, a rate b, a head's state S becomes

    S = exp(g) S;  v = b (v - k S) for a delta rule;  S = S + k v,  and the output is q S.

That is a gated delta net (Yang et al. 2024) with rates, and Mamba-2 (Dao and Gu 2024) without. `scan` computes it in
chunks; `reference_scan` goes token by token and is the oracle.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from sglang_jax.kernels.row_tiles import in_tiles
from sglang_jax.kernels.state_rows import StateRows

BLOCK = 64
"""Tokens per block: matrix products within a block, the state between blocks. The products' work per token grows with
the length of blocks, the number of state updates shrinks with it."""

_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScanInputs:
    """Float32 inputs: `queries`, `keys` `[T, groups, key_dim]`, for `heads / groups` consecutive heads each; `values`
    `[T, heads, value_dim]`; `decays` `[T, heads]`, logarithms; `rates` `[T, heads]` of a delta rule, or None."""

    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    decays: jax.Array
    rates: jax.Array | None

    def of_heads(self) -> ScanInputs:
        """The same with a query and a key per head."""
        times = self.values.shape[1] // self.keys.shape[1]
        if times == 1:
            return self
        queries, keys = (jnp.repeat(x, times, axis=1) for x in (self.queries, self.keys))
        return ScanInputs(queries, keys, self.values, self.decays, self.rates)


def scan(inputs: ScanInputs, states: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
    """Outputs float32 `[T, heads, value_dim]`, undefined for padding, and the states after the step. `states`: float32
    `[R, heads, key_dim, value_dim]`, before the step."""
    if rows.decode_only:
        return _one_token(inputs, states)
    outputs = jnp.zeros_like(inputs.values)
    outputs, states = lax.cond(
        rows.num_decode > 0, partial(_decode_rows, inputs, rows), lambda *same: same, outputs, states
    )
    return _chunks(inputs, outputs, states, rows)


def _one_token(inputs: ScanInputs, states: jax.Array) -> tuple[jax.Array, jax.Array]:
    inputs = inputs.of_heads()
    states = states * jnp.exp(inputs.decays)[..., None, None]
    values = inputs.values
    if inputs.rates is not None:
        values = inputs.rates[..., None] * (values - _einsum("rhk,rhkv->rhv", inputs.keys, states))
    states = states + inputs.keys[..., None] * values[..., None, :]
    return _einsum("rhk,rhkv->rhv", inputs.queries, states), states


def scan_tokens(inputs: ScanInputs, states: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
    """`scan` one token after the other, for all sequences at once: a token's result does not depend on the chunk that
    it is in. Takes time in proportion to the longest chunk."""
    count = len(states)
    starts, ends = rows.query_starts[:-1], rows.query_starts[1:]

    def tokens(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        outputs, states = carry
        places = jnp.minimum(starts + number, len(outputs) - 1)
        found, after = _row_by_row(jax.tree.map(lambda x: x[places], inputs), states)
        own = starts + number < ends
        # The places of other sequences are written past the end.
        outputs = outputs.at[jnp.where(own, places, len(outputs))].set(found, mode="drop")
        return outputs, jnp.where(own.reshape(count, 1, 1, 1), after, states)

    return lax.fori_loop(0, jnp.max(ends - starts), tokens, (jnp.zeros_like(inputs.values), states))


def _row_by_row(inputs: ScanInputs, states: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`_one_token` in a loop over rows, with the same sums for any number of them."""
    found: tuple[jax.Array, jax.Array] = in_tiles(lambda row: _one_token(*row), (inputs, states), 1)
    return found


def scan_drafts(
    inputs: ScanInputs,
    outputs: jax.Array,
    states: jax.Array,
    pool: jax.Array,
    rows: StateRows,
    *,
    fixed: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes the drafts of a decode step one by one, after its other sequences have produced `states`, float32 `[R,
    heads, key_dim, value_dim]`. Returns `outputs` `[R, heads, value_dim]` and the `pool` `[slots, heads, key_dim,
    value_dim]` with the drafts'.

    A loop over drafts costs one state's work per draft, and nothing in a step without drafts. It only writes the pool:
    XLA would copy a pool that the loop also reads, once per draft. `fixed`: as `scan_tokens`.
    """
    assert rows.drafts is not None
    drafts, slots, dtype = rows.drafts, rows.own, pool.dtype
    compute = _row_by_row if fixed else _one_token
    (places,) = jnp.nonzero(drafts > 0, size=len(drafts), fill_value=0)

    def one(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        outputs, pool, state = carry
        place = places[number]
        own = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, place, 1), inputs)
        first = lax.dynamic_slice_in_dim(states, place - 1, 1)
        found, state = compute(own, jnp.where(drafts[place] == 1, _round_to(first, dtype), state))
        outputs = lax.dynamic_update_slice_in_dim(outputs, found, place, 0)
        pool = lax.dynamic_update_slice_in_dim(pool, state.astype(dtype), slots[place], 0)
        return outputs, pool, _round_to(state, dtype)

    begin = (outputs, pool, jnp.zeros_like(states[:1]))
    outputs, pool, _ = lax.fori_loop(0, jnp.count_nonzero(drafts > 0), one, begin)
    return outputs, pool


def _round_to(state: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """A float32 state rounded as a slot would round it. XLA may remove a pair of conversions there and back."""
    kept = jnp.finfo(dtype)
    return lax.reduce_precision(state, exponent_bits=kept.nexp, mantissa_bits=kept.nmant)


def _decode_rows(
    inputs: ScanInputs, rows: StateRows, outputs: jax.Array, states: jax.Array
) -> tuple[jax.Array, jax.Array]:
    count = len(states)
    found, after = _one_token(jax.tree.map(lambda x: x[:count], inputs), states)
    decodes = jnp.arange(count) < rows.num_decode
    outputs = outputs.at[:count].set(jnp.where(decodes[:, None, None], found, 0.0))
    return outputs, jnp.where(decodes[:, None, None, None], after, states)


def _chunks(inputs: ScanInputs, outputs: jax.Array, states: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
    """Computes the sequences after the decode rows, block by block."""
    tokens = inputs.values.shape[0]
    block = min(BLOCK, tokens)
    starts = rows.query_starts
    lengths = jnp.where(jnp.arange(len(states)) < rows.num_decode, 0, jnp.diff(starts))
    counts = -(-lengths // block)
    ends = jnp.cumsum(counts)
    inputs, outputs = jax.tree.map(lambda x: jnp.pad(x, ((0, block), *[(0, 0)] * (x.ndim - 1))), (inputs, outputs))

    def next_block(number: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        outputs, states = carry
        sequence = jnp.searchsorted(ends, number, side="right", method="compare_all")
        first = starts[sequence] + (number - ends[sequence] + counts[sequence]) * block
        own = first + jnp.arange(block) < starts[sequence + 1]

        def part(x: jax.Array) -> jax.Array:
            """The block's tokens; zeros past the sequence's end, which neither decay the state nor add to it."""
            here = lax.dynamic_slice_in_dim(x, first, block)
            return jnp.where(own.reshape(-1, *[1] * (x.ndim - 1)), here, 0.0)

        found, state = _block(jax.tree.map(part, inputs).of_heads(), states[sequence])
        # Writes past the sequence's end are overwritten by the next sequence, or never read.
        return lax.dynamic_update_slice_in_dim(outputs, found, first, 0), states.at[sequence].set(state)

    outputs, states = lax.fori_loop(0, ends[-1], next_block, (outputs, states))
    return outputs[:tokens], states


def _block(inputs: ScanInputs, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Outputs of one block of one sequence, with a query and a key per head, and the state after it."""
    queries, keys, values = (x.swapaxes(0, 1) for x in (inputs.queries, inputs.keys, inputs.values))
    decays = jnp.cumsum(inputs.decays.T, axis=1)  # [heads, block], from the start of the block
    order = jnp.arange(decays.shape[1])
    before = order[:, None] >= order
    between = jnp.exp(jnp.where(before, decays[:, :, None] - decays[:, None, :], -jnp.inf))
    since = jnp.exp(decays)[..., None]
    if inputs.rates is not None:
        # Each token's value depends on those of earlier tokens in the block: a triangular system.
        rates = inputs.rates.T[..., None]
        system = rates * between * _einsum("hik,hjk->hij", keys, keys)
        wanted = rates * (values - since * _einsum("hik,hkv->hiv", keys, state))
        values = lax.linalg.triangular_solve(system, wanted, left_side=True, lower=True, unit_diagonal=True)
    outputs = since * _einsum("hik,hkv->hiv", queries, state)
    outputs = outputs + _einsum("hij,hjv->hiv", between * _einsum("hik,hjk->hij", queries, keys), values)
    left = jnp.exp(decays[:, -1:] - decays)[..., None]
    state = state * since[:, -1:] + _einsum("hik,hiv->hkv", keys * left, values)
    return outputs.swapaxes(0, 1), state


def reference_scan(inputs: ScanInputs, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Outputs of one sequence's T tokens, computed one by one from `state` `[heads, key_dim, value_dim]`, and the last
    state."""

    def token(state: jax.Array, one: ScanInputs) -> tuple[jax.Array, jax.Array]:
        outputs, states = _one_token(jax.tree.map(lambda x: x[None], one), state[None])
        return states[0], outputs[0]

    state, outputs = lax.scan(token, state, inputs)
    return outputs, state
