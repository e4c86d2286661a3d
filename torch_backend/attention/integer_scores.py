"""Scores of int8 keys: queries in int8 as well, a scale for each, and products that are whole numbers.

SageAttention (Zhang et al. 2025) over pages. What differs: the mean that is taken off keys is fixed, and a key's scale
is its own, so that what a page holds depends neither on the other keys nor on how a prompt was cut into chunks.
"""

from __future__ import annotations

import torch

from torch_backend.attention.interface import AttentionOptions
from torch_backend.kv_pages import LARGEST_INT8


def integer_scores(
    queries: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor, key_mean: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Scaled scores of stored keys, before any cap and mask: what `q @ key_mean + (q @ (key - key_mean))` is, but for
    the rounding of queries and keys to 8 bits.

    **Arguments:** `queries` `[n, ..., q, d]`; `levels` float32 `[n, 1 or more, k, d]`, whole numbers up to 127;
    `scales` float32 `[n, 1, k]`; `key_mean` float32 `[n, d]`.

    **Returns:** float32 `[n, ..., q, k]`.
    """
    wide = queries.float()
    largest = wide.abs().amax(-1, keepdim=True)
    steps = torch.where(largest == 0.0, 1.0, largest / LARGEST_INT8)
    # Sums of at most 1,040 products of whole numbers up to 127 are exact in float32, in any order.
    products = torch.round(wide / steps) @ levels.transpose(-1, -2)
    of_mean = wide @ key_mean[:, None, :, None]
    return (products * steps * scales[:, :, None] + of_mean) * options.scale
