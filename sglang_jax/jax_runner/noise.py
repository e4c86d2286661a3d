"""Counter-based randomness: the noise of a sample is a function of only (seed, position, token id)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def threefry_2x32(
    key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), of uint32 that
    broadcast together. Not that of `jax.random`, which puts the rounds into a loop on the CPU and first derives a key
    per row."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    left, right = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            left = left + right
            right = ((right << rotation) | (right >> (32 - rotation))) ^ left
        left = left + keys[(group + 1) % 3]
        right = right + keys[(group + 2) % 3] + np.uint32(group + 1)
    return left, right


def gumbel_noise(seeds: jax.Array, positions: jax.Array, tokens: jax.Array) -> jax.Array:
    """Standard Gumbel variates, float32 `[rows, m]`. The key is the request's seed, and the counter is (position, token
    id), so a row's noise depends neither on other rows nor on its place in the batch.

    `seeds` uint32 `[rows, 2]`, low word first; `positions` int32 `[rows]`; `tokens` int32 `[rows, m]`, or `[1, m]` for
    all.
    """
    shape = (positions.shape[0], tokens.shape[1])
    token_ids = jnp.broadcast_to(tokens.astype(jnp.uint32), shape)
    position_words = jnp.broadcast_to(positions.astype(jnp.uint32)[:, None], shape)
    bits, _ = threefry_2x32((seeds[:, :1], seeds[:, 1:]), (position_words, token_ids))
    # 23 bits plus a half step are strictly inside (0, 1), so both logarithms are finite.
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * np.float32(2.0**-23)
    return -jnp.log(-jnp.log(uniform))
