"""How keys and values are held in memory: pages of one array per layer.

A layer's pages are `[num_pages, kv_heads, parts, page_size, lanes]`. A page of all heads is one run of memory, so that
one copy fetches it; a head's keys in it are a matrix `[page_size, lanes]`, as a product takes it; and a
tensor-parallel shard takes whole kv heads.

There are two forms:

- Plain, for CPU and GPU: keys at 0 of the third axis, values at 1, and `lanes` is `head_dim`.
- Tiled, for TPU, where memory comes in tiles of 8, 16 or 32 rows (of 4-, 2- and 1-byte types) of 128 lanes. `lanes` is
  `head_dim` rounded up to 128, which costs nothing for 128 and 256, a third more for 96 and 60 per cent more for 80.
  Heads of up to 64 have one part: keys in the lower half of the lanes, values in the upper half, which costs nothing
  for 64. Pages of 16 tokens or more are whole tiles; 8-bit pages of 16 are half ones, which the kernels put together.

Where values are the keys too, as of latent attention, there is one part in both forms, with keys in all lanes; tiled
ones of up to 64 numbers are in both halves of the lanes.

bfloat16 may be held as its bits in uint16, and float8_e4m3fn in uint8. XLA's CPU backend widens their scatters and
gathers and with them copies the whole cache at each step; integers it leaves alone. The bits are turned into numbers
only after they were gathered.

int8 and float8 hold keys and values divided by a scale of their kv head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

KEYS, VALUES = 0, 1
LANES = 128

_HELD_AS_BITS = {jnp.dtype(jnp.uint16): jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.uint8): jnp.dtype(jnp.float8_e4m3fn)}


def page_shape(
    num_pages: int, kv_heads: int, page_size: int, head_dim: int, *, tiled: bool, shared: bool = False
) -> tuple[int, ...]:
    """The shape of a layer's pages, plain or tiled. `shared`: values are the keys, too."""
    if not tiled:
        return num_pages, kv_heads, 1 if shared else 2, page_size, head_dim
    parts = 1 if shared or 2 * head_dim <= LANES else 2
    return num_pages, kv_heads, parts, page_size, -(-head_dim // LANES) * LANES


def to_storage(values: jax.Array, storage: jnp.dtype) -> jax.Array:
    """Rounds to the type that `storage` holds: uint16 means the bits of a bfloat16, uint8 of a float8_e4m3fn. What
    is too large for an 8-bit type becomes its largest value."""
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
    kv_pages: jax.Array, keys: jax.Array, values: jax.Array | None, kv_scales: jax.Array | None = None
) -> jax.Array:
    """Keys and values `[T, kv_heads, head_dim]` as rows of these pages: `[T, kv_heads, parts, lanes]`. No `values`:
    they are the keys."""
    _, _, parts, _, lanes = kv_pages.shape
    in_all_lanes = values is None and 2 * keys.shape[2] > lanes
    sides = jnp.stack([keys] if in_all_lanes else [keys, keys if values is None else values], axis=2)
    if kv_scales is not None:
        sides = sides.astype(jnp.float32) / kv_scales[:, :, None]
    padded = jnp.pad(sides, ((0, 0), (0, 0), (0, 0), (0, parts * lanes // sides.shape[2] - sides.shape[3])))
    return to_storage(padded.reshape(*sides.shape[:2], parts, lanes), kv_pages.dtype)


def write_kv(
    kv_pages: jax.Array,
    keys: jax.Array,
    values: jax.Array | None,
    write_slots: jax.Array,
    kv_scales: jax.Array | None = None,
) -> jax.Array:
    """Stores the keys and values of a step's tokens in a layer's pages.

    **Arguments:** `kv_pages` `[num_pages, kv_heads, parts, page_size, lanes]`, written in place where it is donated;
    `keys`, `values` `[T, kv_heads, head_dim]`, the latter None where they are the keys; `write_slots` int32 `[T]`,
    `page * page_size + offset`; `kv_scales` float32 `[kv_heads, 2]`, what keys and values are divided by.

    **Returns:** the pages after the write.
    """
    page_size = kv_pages.shape[3]
    stored = rows_of_pages(kv_pages, keys, values, kv_scales)
    pages, offsets = write_slots // page_size, write_slots % page_size
    return kv_pages.at[pages, :, :, offsets].set(stored, mode="promise_in_bounds", wrap_negative_indices=False)


def gather_kv(
    kv_pages: jax.Array, pages: jax.Array, head_dim: int, kv_scales: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Keys and values of runs of pages.

    **Arguments:** `pages` int32 `[..., n]`, in the order of their tokens; `kv_scales` float32 `[kv_heads, 2]`.

    **Returns:** two float32 arrays `[..., kv_heads, n * page_size, head_dim]`. Slots that no token was written to hold
    anything, NaN included.
    """
    _, kv_heads, parts, page_size, lanes = kv_pages.shape
    *rows, count = pages.shape
    shared = parts == 1 and 2 * head_dim > lanes

    def gather(part: int) -> jax.Array:
        found = kv_pages.at[pages, :, part * (parts - 1)].get(mode="promise_in_bounds", wrap_negative_indices=False)
        first = part * (2 - parts) * (lanes // 2)
        found = jnp.moveaxis(found, -4, -3)[..., first : first + head_dim]  # [..., kv_heads, n, page_size, head_dim]
        numbers = from_storage(found.reshape(*rows, kv_heads, count * page_size, head_dim))
        return numbers if kv_scales is None else numbers * kv_scales[:, part, None, None]

    keys = gather(KEYS)
    return keys, keys if shared else gather(VALUES)
