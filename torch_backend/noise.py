"""Counter-based randomness: the noise of a sample is a function of only (seed, position, token id), the same one in the
JAX backend and the Triton kernel, so a request samples the same tokens on all of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UInt32 = NDArray[np.uint32]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)

LARGEST_NOISE = 16.64
"""Upper bound of the noise: the uniform variate is at most 1 - 2**-24."""


def threefry_2x32(key: tuple[int, int], position: int, token_ids: UInt32) -> UInt32:
    """First word of Threefry-2x32 with 20 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"),
    uint32 `[ids]`, of the counters (position, token id) under `key`."""
    low, high = np.uint32(key[0]), np.uint32(key[1])
    keys = (low, high, low ^ high ^ _PARITY)
    left = np.full(token_ids.shape, np.uint32(position), np.uint32)
    left += keys[0]
    right = token_ids + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            left += right
            right = ((right << np.uint32(rotation)) | (right >> np.uint32(32 - rotation))) ^ left
        left += keys[(group + 1) % 3]
        # Sums of words wrap; numpy warns of this only for scalars.
        right += np.array([keys[(group + 2) % 3]]) + np.uint32(group + 1)
    return left


def gumbel_noise(key: tuple[int, int], position: int, token_ids: UInt32) -> NDArray[np.float32]:
    """Standard Gumbel variates, float32 `[ids]`, of the tokens `token_ids`. `key`: the request's seed, low word
    first."""
    bits = threefry_2x32(key, position, token_ids)
    # 23 bits plus a half: strictly inside (0, 1), so that both logarithms are finite.
    uniform = ((bits >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    noise: NDArray[np.float32] = -np.log(-np.log(uniform))
    return noise
