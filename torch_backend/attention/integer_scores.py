"""Scores of int8 keys: queries are int8 too, with a scale each, and products are integers. This is SageAttention (Zhang
et al. 2025) over pages, with two differences: the mean subtracted from keys is fixed, and each key has its own scale,
so that a page's content depends on neither the other keys nor the chunks of its prompt."""

from __future__ import annotations

import torch

from torch_backend.attention.interface import AttentionOptions
from torch_backend.kv_pages import LARGEST_INT8


def integer_scores(
    queries: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor, key_mean: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Scaled scores of stored keys, float32 `[n, ..., q, k]`, before any cap and mask: `q @ key_mean + (q @ (key -
    key_mean))`, up to the rounding to 8 bits. `queries` `[n, ..., q, d]`; `levels` float32 `[n, 1 or more, k, d]`,
    integers up to 127; `scales` float32 `[n, 1, k]`; `key_mean` float32 `[n, d]`."""
    wide = queries.float()
    largest = wide.abs().amax(-1, keepdim=True)
    steps = torch.where(largest == 0.0, 1.0, largest / LARGEST_INT8)
    # Sums of at most 1,040 products of integers up to 127 are exact in float32, in any order.
    products = torch.round(wide / steps) @ levels.transpose(-1, -2)
    of_mean = wide @ key_mean[:, None, :, None]
    return (products * steps * scales[:, :, None] + of_mean) * options.scale
