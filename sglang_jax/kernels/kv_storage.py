"""The layout of cached keys and values: pages, one array per layer.

A layer's pages are `[num_pages, kv_heads, parts, page_size, lanes]`. A page with all its heads is contiguous, so that
one copy fetches it; a head's keys in it are a matrix `[page_size, lanes]`, ready for a product; a tensor-parallel shard
has whole kv heads. int8 and float8 pages hold keys and values divided by a scale per kv head.

- Plain, for CPU and GPU: keys at index 0 of the third axis, values at 1; `lanes` is `head_dim`.
- Tiled, for TPU, where memory has tiles of 128 lanes by 8, 16 or 32 rows (4-, 2- and 1-byte types). `lanes` is
  `head_dim` rounded up to a multiple of 128: no padding for 128 and 256, a third more memory for 96, 60 % more for 80.
  Heads of up to 64 have one part, keys in the lower half of the lanes and values in the upper half: no padding for 64.
  Pages of 16 tokens or more are whole tiles, except 8-bit pages of 16, which are half a tile; the kernels join these.
- Latent attention, whose values are the keys, has one part in both layouts, with keys in all lanes. Tiled latents of up
  to 64 numbers are stored in both halves of the lanes.
- Latents in 8 bits, plain only: behind a token's numbers are the bytes of two float32 scales, of its latent vector and
  of its rotated key, whose ranges differ. A scale is the largest number over the type's: it depends only on the token.

bfloat16 may be stored as its bits in uint16, and float8_e4m3fn in uint8: XLA's CPU backend widens scatters and gathers
of these types, and so copies the whole cache at each step, but not those of integers. Bits become numbers after the
gather.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

KEYS, VALUES = 0, 1
LANES = 128

_SCALES_OF_LATENTS = 2
_SCALE_BYTES = _SCALES_OF_LATENTS * 4

_HELD_AS_BITS = {jnp.dtype(jnp.uint16): jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.uint8): jnp.dtype(jnp.float8_e4m3fn)}


def page_shape(
    num_pages: int,
    kv_heads: int,
    page_size: int,
    head_dim: int,
    *,
    tiled: bool,
    shared: bool = False,
    in_8_bits: bool = False,
) -> tuple[int, ...]:
    """The shape of a layer's pages, plain or tiled. `shared`: the values are the keys, which have their scales behind
    them if they are `in_8_bits`."""
    if not tiled:
        scales = _SCALE_BYTES if shared and in_8_bits else 0
        return num_pages, kv_heads, 1 if shared else 2, page_size, head_dim + scales
    parts = 1 if shared or 2 * head_dim <= LANES else 2
    return num_pages, kv_heads, parts, page_size, -(-head_dim // LANES) * LANES


def to_storage(values: jax.Array, storage: jnp.dtype) -> jax.Array:
    """Rounds to the type that `storage` holds: uint16 has the bits of a bfloat16, uint8 those of a float8_e4m3fn.
    Values beyond the range of an 8-bit type are clipped to it."""
    if storage in _HELD_AS_BITS:
        return jax.lax.bitcast_convert_type(to_storage(values, _HELD_AS_BITS[storage]), storage)
    if storage.itemsize == 1:
        wide = values.astype(jnp.float32)
        limits = jnp.iinfo(storage) if jnp.issubdtype(storage, jnp.integer) else jnp.finfo(storage)
        whole = jnp.round(wide) if jnp.issubdtype(storage, jnp.integer) else wide
        return jnp.clip(whole, float(limits.min), float(limits.max)).astype(storage)
    return values.astype(storage)


def from_storage(stored: jax.Array) -> jax.Array:
    """The stored values, exactly, as float32."""
    if stored.dtype == jnp.uint16:
        # bfloat16 is the upper half of a float32.
        return jax.lax.bitcast_convert_type(stored.astype(jnp.uint32) << 16, jnp.float32)
    if stored.dtype == jnp.uint8:
        return jax.lax.bitcast_convert_type(stored, jnp.float8_e4m3fn).astype(jnp.float32)
    return stored.astype(jnp.float32)


def rows_of_pages(
    kv_pages: jax.Array,
    keys: jax.Array,
    values: jax.Array | None,
    kv_scales: jax.Array | None = None,
    value_dim: int | None = None,
) -> jax.Array:
    """Keys and values `[T, kv_heads, head_dim]` as rows of these pages, `[T, kv_heads, parts, lanes]`. `values` None:
    the values are the keys, of latent vectors the first `value_dim` numbers."""
    _, _, parts, _, lanes = kv_pages.shape
    if values is None and _has_scales(kv_pages, keys.shape[2]):
        return _rows_with_scales(keys, value_dim, kv_pages.dtype)[:, :, None]
    in_all_lanes = values is None and 2 * keys.shape[2] > lanes
    sides = jnp.stack([keys] if in_all_lanes else [keys, keys if values is None else values], axis=2)
    if kv_scales is not None:
        sides = sides.astype(jnp.float32) / kv_scales[:, :, None]
    padded = jnp.pad(sides, ((0, 0), (0, 0), (0, 0), (0, parts * lanes // sides.shape[2] - sides.shape[3])))
    return to_storage(padded.reshape(*sides.shape[:2], parts, lanes), kv_pages.dtype)


def _has_scales(kv_pages: jax.Array, width: int) -> bool:
    """Whether plain pages have scales behind latents of `width` numbers."""
    return kv_pages.dtype.itemsize == 1 and kv_pages.shape[2] == 1 and kv_pages.shape[4] == width + _SCALE_BYTES


def _rows_with_scales(latents: jax.Array, value_dim: int | None, storage: jnp.dtype) -> jax.Array:
    """Latents `[T, 1, width]` in 8 bits with the bytes of their scales behind them."""
    held = _HELD_AS_BITS.get(storage, storage)
    largest = float((jnp.iinfo if jnp.issubdtype(held, jnp.integer) else jnp.finfo)(held).max)
    stored, scales = [], []
    for part in jnp.split(latents.astype(jnp.float32), [value_dim], axis=-1):
        scale = jnp.abs(part).max(-1, keepdims=True) / largest
        stored.append(to_storage(part / jnp.where(scale == 0.0, 1.0, scale), storage))
        scales.append(scale)
    own = jax.lax.bitcast_convert_type(jnp.concatenate(scales, axis=-1), jnp.uint8)
    own = jax.lax.bitcast_convert_type(own.reshape(*latents.shape[:2], _SCALE_BYTES), storage)
    return jnp.concatenate([*stored, own], axis=-1)


def _numbers_with_scales(found: jax.Array, width: int, value_dim: int | None) -> jax.Array:
    """Latents `[..., lanes]` with scales behind them, as float32 `[..., width]`."""
    own = jax.lax.bitcast_convert_type(found[..., width:], jnp.uint8)
    scales = jax.lax.bitcast_convert_type(own.reshape(*own.shape[:-1], _SCALES_OF_LATENTS, 4), jnp.float32)
    parts = jnp.split(from_storage(found[..., :width]), [value_dim], axis=-1)
    return jnp.concatenate([part * scales[..., number, None] for number, part in enumerate(parts)], axis=-1)


def write_kv(
    kv_pages: jax.Array,
    keys: jax.Array,
    values: jax.Array | None,
    write_slots: jax.Array,
    kv_scales: jax.Array | None = None,
    value_dim: int | None = None,
) -> jax.Array:
    """Stores the keys `[T, kv_heads, head_dim]` and values (None if they are the keys) of a step's tokens in a layer's
    pages `[num_pages, kv_heads, parts, page_size, lanes]`, in place if these are donated. `write_slots` int32 `[T]`:
    `page * page_size + offset`; `kv_scales` float32 `[kv_heads, 2]`: the divisors of keys and values; `value_dim`: see
    `rows_of_pages`."""
    page_size = kv_pages.shape[3]
    stored = rows_of_pages(kv_pages, keys, values, kv_scales, value_dim)
    pages, offsets = write_slots // page_size, write_slots % page_size
    return kv_pages.at[pages, :, :, offsets].set(stored, mode="promise_in_bounds", wrap_negative_indices=False)


def gather_kv(
    kv_pages: jax.Array,
    pages: jax.Array,
    head_dim: int,
    kv_scales: jax.Array | None = None,
    value_dim: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gathers keys and values of `pages` int32 `[..., n]`, in the order of their tokens: two float32 arrays `[...,
    kv_heads, n * page_size, head_dim]`. Unwritten slots may hold NaN. `kv_scales`: float32 `[kv_heads, 2]`;
    `value_dim`: see `AttentionOptions`, the size of values then."""
    _, kv_heads, parts, page_size, lanes = kv_pages.shape
    *rows, count = pages.shape
    shared, scaled = parts == 1 and 2 * head_dim > lanes, _has_scales(kv_pages, head_dim)

    def gather(part: int) -> jax.Array:
        found = kv_pages.at[pages, :, part * (parts - 1)].get(mode="promise_in_bounds", wrap_negative_indices=False)
        first = part * (2 - parts) * (lanes // 2)
        if scaled:
            found = jnp.moveaxis(found, -4, -3).reshape(*rows, kv_heads, count * page_size, lanes)
            return _numbers_with_scales(found, head_dim, value_dim)
        found = jnp.moveaxis(found, -4, -3)[..., first : first + head_dim]  # [..., kv_heads, n, page_size, head_dim]
        numbers = from_storage(found.reshape(*rows, kv_heads, count * page_size, head_dim))
        return numbers if kv_scales is None else numbers * kv_scales[:, part, None, None]

    keys = gather(KEYS)
    return keys, keys[..., :value_dim] if shared else gather(VALUES)[..., :value_dim]
