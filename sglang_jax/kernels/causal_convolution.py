"""Causal depthwise convolutions, whose last inputs are kept from step to step.

A slot with the last inputs of a sequence is `[width - 1, channels]`, or **tiled** for TPUs, `[width - 1, parts, 128]`:
channels in lines of 128, padded with zeros to whole tiles of 8 lines. So a token's input is contiguous and one copy
fetches it. Given `[slots, 3, channels]`, XLA would put 8 slots into a tile and fetch the whole pool to change one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sglang_jax.kernels.kv_storage import LANES
from sglang_jax.kernels.row_tiles import in_tiles
from sglang_jax.kernels.state_rows import StateRows

_PARTS_OF_A_TILE = 8


def tail_shape(kept: int, channels: int, *, tiled: bool, shards: int = 1) -> tuple[int, ...]:
    """The shape of a slot with the last `kept` inputs of channels that are sharded over `shards` devices."""
    if not tiled:
        return kept, channels
    tiles = -(-channels // (shards * _PARTS_OF_A_TILE * LANES))
    return kept, shards * tiles * _PARTS_OF_A_TILE, LANES


def convolve_with_pool(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    pool: jax.Array,
    rows: StateRows,
    tile_rows: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`convolve` with last inputs in the slots of a `pool` `[slots, width - 1, ...]`, plain or tiled."""
    slots, kept, *slot = pool.shape
    plain = pool.reshape(slots, kept, -1)
    found, tails = convolve(x, weight, bias, rows.read(plain)[..., : x.shape[1]], rows, tile_rows)
    tails = jnp.pad(tails, ((0, 0), (0, 0), (0, plain.shape[2] - x.shape[1])))
    return found, rows.write(pool, tails.reshape(-1, kept, *slot))


def convolve(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    tails: jax.Array,
    rows: StateRows,
    tile_rows: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Each token's output from its own input and those of the `width - 1` tokens before it, float32 `[T, channels]`,
    and the tails after the step. Inputs are first rounded to the type of `tails`, so that chunk boundaries do not
    matter.

    `x` `[T, channels]`; `weight` `[channels, width]`, the tap of the token itself last; `bias` `[channels]`; `tails`
    `[R, width - 1, channels]`, the last inputs of each sequence before the step, oldest first; `tile_rows`: see
    `in_tiles`.
    """
    width = weight.shape[1]
    x = x.astype(tails.dtype)
    taps = weight.astype(jnp.float32).T
    seen = [x, *(_inputs_before(x, tails, rows, back) for back in range(1, width))]

    def outputs(seen: list[jax.Array]) -> jax.Array:
        total = seen[0].astype(jnp.float32) * taps[-1]
        for back in range(1, width):
            total = total + seen[back].astype(jnp.float32) * taps[-1 - back]
        return total if bias is None else total + bias.astype(jnp.float32)

    return in_tiles(outputs, seen, tile_rows), _tails_after(x, tails, rows)


def _inputs_before(x: jax.Array, tails: jax.Array, rows: StateRows, back: int) -> jax.Array:
    kept = tails.shape[1]
    if rows.drafts is not None:
        of_tail = tails[jnp.arange(len(tails)), jnp.clip(kept + rows.drafts - back, 0, kept - 1)]
        return jnp.where((rows.drafts >= back)[:, None], jnp.roll(x, back, axis=0), of_tail)
    if rows.decode_only:
        return tails[:, kept - back]
    of_tail = tails[rows.sequences, jnp.clip(kept + rows.offsets - back, 0, kept - 1)]
    return jnp.where((rows.offsets >= back)[:, None], jnp.roll(x, back, axis=0), of_tail)


def _tails_after(x: jax.Array, tails: jax.Array, rows: StateRows) -> jax.Array:
    kept = tails.shape[1]
    if rows.drafts is not None:
        return jnp.stack([*(_inputs_before(x, tails, rows, back) for back in range(kept - 1, 0, -1)), x], axis=1)
    if rows.decode_only:
        return jnp.concatenate((tails[:, 1:], x[:, None]), axis=1)
    places = jnp.arange(kept)
    ends, lengths = rows.query_starts[1:, None], jnp.diff(rows.query_starts)[:, None]
    computed = x[jnp.maximum(ends - kept + places, 0)]
    older = jnp.take_along_axis(tails, jnp.minimum(lengths + places, kept - 1)[..., None], axis=1)
    return jnp.where((lengths - kept + places >= 0)[..., None], computed, older)
