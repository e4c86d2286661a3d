"""Values of a few bits in words of 32."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_jax.checkpoint.reader import Array

WORD = 32


def unpacked_words(words: Array, bits: int) -> NDArray[np.uint8]:
    """Values of 4 or 8 bits of int32 words `[rows, words]`, the lowest bits first: uint8 `[rows, values]`."""
    in_bytes: NDArray[np.uint8] = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return in_bytes
    pairs: NDArray[np.uint8] = np.stack((in_bytes & 15, in_bytes >> 4), axis=-1)
    return pairs.reshape(len(words), -1)


def signed_levels(levels: NDArray[np.uint8], bits: int) -> Array:
    """Levels as `GroupType` has them: of 4 bits as they are, of 8 bits less 128, as int8."""
    found: Array = levels & 15 if bits == 4 else (levels ^ np.uint8(128)).view(np.int8)
    return found


def cut(found: Array, wanted: slice, first: int) -> Array:
    """Some columns of an array whose first column is number `first`."""
    return found[:, wanted.start - first : wanted.stop - first]


def packed_words(levels: Array, bits: int) -> NDArray[np.int32]:
    """Levels `[rows, values]` as `GroupType` has them, in int32 words `[rows, words]`: the reverse of `unpacked_words`
    and `signed_levels`. Zeros fill the last word of a row."""
    raised = levels if bits == 4 else levels.view(np.uint8) ^ np.uint8(128)
    padded = np.pad(raised, ((0, 0), (0, -levels.shape[1] % (WORD // bits))))
    in_bytes = padded if bits == 8 else padded[:, ::2] | padded[:, 1::2] << 4
    words: NDArray[np.int32] = np.ascontiguousarray(in_bytes).view(np.int32)
    return words
