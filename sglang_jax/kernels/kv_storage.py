"""How keys and values are held in memory: pages of one array per layer.

A layer's pages are `[num_pages, kv_heads, 2, page_size, head_dim]`: keys at 0 of the third axis, values at 1, so that
one write stores both, a page's keys of one head lie together, and a tensor-parallel shard takes whole kv heads.

bfloat16 may be held as its bits in uint16. XLA's CPU backend widens bfloat16 scatters and gathers to float32 and
with them copies the whole cache at each step; integers it leaves alone. The bits are turned into numbers only
after they were gathered.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

KEYS, VALUES = 0, 1


def to_storage(values: jax.Array, storage: jnp.dtype) -> jax.Array:
    """Rounds to the type that `storage` holds: uint16 means the bits of a bfloat16."""
    if storage == jnp.uint16:
        return jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    return values.astype(storage)


def from_storage(stored: jax.Array) -> jax.Array:
    """The stored values, exactly, as float32."""
    if stored.dtype == jnp.uint16:
        # bfloat16 is the upper half of a float32.
        return jax.lax.bitcast_convert_type(stored.astype(jnp.uint32) << 16, jnp.float32)
    return stored.astype(jnp.float32)


def write_kv(kv_pages: jax.Array, keys: jax.Array, values: jax.Array, write_slots: jax.Array) -> jax.Array:
    """Stores the keys and values of a step's tokens in a layer's pages.

    **Arguments:** `kv_pages` `[num_pages, kv_heads, 2, page_size, head_dim]`, written in place where it is donated;
    `keys`, `values` `[T, kv_heads, head_dim]`; `write_slots` int32 `[T]`, `page * page_size + offset`.

    **Returns:** the pages after the write.
    """
    page_size = kv_pages.shape[3]
    stored = to_storage(jnp.stack([keys, values], axis=2), kv_pages.dtype)
    pages, offsets = write_slots // page_size, write_slots % page_size
    return kv_pages.at[pages, :, :, offsets].set(stored, mode="promise_in_bounds", wrap_negative_indices=False)


def gather_kv(kv_pages: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values of runs of pages.

    **Arguments:** `pages` int32 `[..., n]`, in the order of their tokens.

    **Returns:** two float32 arrays `[..., kv_heads, n * page_size, head_dim]`. Slots that no token was written to hold
    anything, NaN included.
    """
    _, kv_heads, _, page_size, head_dim = kv_pages.shape
    *rows, count = pages.shape

    def gather(part: int) -> jax.Array:
        found = kv_pages.at[pages, :, part].get(mode="promise_in_bounds", wrap_negative_indices=False)
        found = jnp.moveaxis(found, -4, -3)  # [..., kv_heads, n, page_size, head_dim]
        return from_storage(found.reshape(*rows, kv_heads, count * page_size, head_dim))

    return gather(KEYS), gather(VALUES)
